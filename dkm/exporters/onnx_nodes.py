"""Tensors as nodes of an ONNX graph: initializers with what the .dkm file has, and standard operators that decode them.

    NAME/codes      packed codes, UINT8 (see formats/codec.py): BitShift, BitwiseAnd and, where codes are spread over
                    several bytes, BitwiseOr
    NAME/centroids  those of all groups, 16 bit or FLOAT8E4M3FN: Cast; Gather by the codes, to which the first place of
                    a group is added
    NAME/scales     16 bit: Cast, Mul
    NAME/positions, NAME/outliers  INT64, and the tensor's dtype: Cast, ScatterElements

A Reshape, with a Transpose where groups are tiles, gives the weight, NAME.  Opset 19 has all of these operators.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from math import gcd
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
from onnx_ir.tape import Tape
from onnx_ir.tensor_adapters import TorchTensor, from_torch_dtype
from torch import Tensor

from ..clustering.decode import as_runs
from ..clustering.groups import Grouping
from ..formats.codec import pack
from ..formats.described import Codes, Described

HALVES = (torch.float16, torch.bfloat16)


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the graph has a tensor of this one: float32 instead of 16 bits."""
    return torch.float32 if dtype in HALVES else dtype


class Nodes:
    """Nodes and initializers that are not in a graph yet."""

    def __init__(self) -> None:
        self._tape = Tape()
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self.bytes = 0  # of all stored tensors, without constants

    def place_in(self, graph: ir.Graph) -> None:
        """Put them in front of all nodes of the graph."""
        for value in self._tape.initializers:
            graph.register_initializer(value)
        if len(graph):
            graph.insert_before(graph[0], self._tape.nodes)
        else:
            graph.extend(self._tape.nodes)

    def store(self, name: str, tensor: Tensor) -> ir.Value:
        """An initializer with the values of a tensor."""
        self.bytes += tensor.nbytes
        return self._tape.initializer(TorchTensor(tensor.detach().cpu().contiguous(), name))

    def constant(self, values: Sequence[float] | float, dtype: torch.dtype = torch.int64) -> ir.Value:
        """A small constant; those with the same values are one initializer."""
        key = (dtype, tuple(values) if isinstance(values, Sequence) else values)
        if key not in self._constants:
            tensor = torch.tensor(values, dtype=dtype)
            self._constants[key] = self._tape.initializer(TorchTensor(tensor, f"constant/{len(self._constants)}"))
        return self._constants[key]

    def op(self, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """The output of a new node."""
        return self._tape.op(kind, inputs, attributes)

    def cast(self, value: ir.Value, dtype: torch.dtype) -> ir.Value:
        """A value in another dtype."""
        return self.op("Cast", value, to=from_torch_dtype(dtype))

    def reshape(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """A value in another shape."""
        return self.op("Reshape", value, self.constant(shape))

    def first(self, value: ir.Value, count: int, axis: int) -> ir.Value:
        """The first ones along an axis."""
        return self.op("Slice", value, self.constant([0]), self.constant([count]), self.constant([axis]))


def tensor_nodes(nodes: Nodes, each: Described) -> ir.Value:
    """The values of a tensor in the dtype that the graph has them in."""
    own, dtype = each.content, widened(each.dtype)
    if isinstance(own, Codes):
        value = _decoded(nodes, each, own)
    elif own.dtype != dtype:
        value = nodes.cast(nodes.store(f"{each.name}/values", own), dtype)
    else:
        return nodes.store(each.name, own)
    value.name = each.name
    return value


def _decoded(nodes: Nodes, each: Described, own: Codes) -> ir.Value:
    """As in `clustering/decode.py`: centroids, times scales, times 2^exponent, rounded to the tensor's dtype."""
    dtype = torch.promote_types(each.dtype, torch.float32)
    value = _looked_up(nodes, each, own, dtype)
    if own.scales is not None:
        scales = nodes.store(f"{each.name}/scales", own.scales.view(-1, *(1 for _ in each.shape[1:])))
        value = nodes.op("Mul", value, nodes.cast(scales, dtype))
        value = value if each.shape else nodes.reshape(value, [])
    if own.exponent:
        value = nodes.op("Mul", value, nodes.constant(2.0**own.exponent, dtype))
    if each.dtype in HALVES and (own.scales is not None or own.exponent or own.centroids.dtype != each.dtype):
        value = nodes.cast(nodes.cast(value, each.dtype), dtype)
    if own.outliers is not None:
        positions = nodes.store(f"{each.name}/positions", own.outliers.positions)
        values = nodes.cast(nodes.store(f"{each.name}/outliers", own.outliers.values), dtype)
        value = nodes.op("ScatterElements", nodes.reshape(value, [-1]), positions, values, axis=0)
        value = nodes.reshape(value, each.shape)
    return value


def _looked_up(nodes: Nodes, each: Described, own: Codes, dtype: torch.dtype) -> ir.Value:
    """The values of the centroids, in the shape of the tensor."""
    whole = as_runs(each.grouping)
    centroids = own.centroids.view(whole.count, -1, own.dim)
    if whole.all_count:
        return _part(nodes, each.name, whole, own.packed, own.bits, centroids, dtype, each.shape)
    bands: list[list[ir.Value]] = []
    for region in _regions(whole):
        codes = region.codes(own, whole)
        grouping = region.grouping
        value = _part(
            nodes,
            f"{each.name}/{region.top}x{region.left}",
            grouping,
            pack(codes, own.bits),
            own.bits,
            centroids[region.groups(whole)],
            dtype,
            (grouping.rows, grouping.columns),
        )
        if region.width < grouping.columns:
            value = nodes.first(value, region.width, 1)
        if not region.left:
            bands.append([])
        bands[-1].append(value)
    rows = [band[0] if len(band) == 1 else nodes.op("Concat", *band, axis=1) for band in bands]
    return nodes.reshape(rows[0] if len(rows) == 1 else nodes.op("Concat", *rows, axis=0), each.shape)


class _Region(NamedTuple):
    """Tiles of one size side by side and one below the other: all whole ones, or those at an edge of the matrix."""

    top: int  # in tiles
    bottom: int
    left: int
    right: int
    width: int  # in weights
    grouping: Grouping  # of this region alone; its tiles fit, and may be wider than the matrix

    def groups(self, whole: Grouping) -> Tensor:
        """The numbers of its groups."""
        numbers = torch.arange(whole.count).view(whole.down, whole.across)
        return numbers[self.top : self.bottom, self.left : self.right].reshape(-1)

    def codes(self, own: Codes, whole: Grouping) -> Tensor:
        """Its codes, group after group."""
        counted = whole.counted()
        grid = torch.zeros(counted.shape, dtype=torch.int16)
        grid[counted] = own.codes(0, whole.codes).short()
        groups = self.groups(whole)
        return grid[groups][:, counted[groups].any(0)].reshape(-1)


def _regions(whole: Grouping) -> Iterator[_Region]:
    """From the left to the right, and from the top to the bottom."""
    # where a vector of a tile has values of two rows, those of a narrower tile lie irregularly: it is filled up
    irregular = whole.tile_rows > 1 and whole.tile_columns % whole.dim
    columns = [(0, whole.across)] if irregular else _ranges(whole.columns, whole.tile_columns)
    for top, bottom in _ranges(whole.rows, whole.tile_rows):
        height = min(bottom * whole.tile_rows, whole.rows) - top * whole.tile_rows
        for left, right in columns:
            width = min(right * whole.tile_columns, whole.columns) - left * whole.tile_columns
            tile = whole.tile_columns if irregular else min(whole.tile_columns, width)
            if whole.tile_rows > 1 and tile < whole.tile_columns:  # every row of a tile begins with a new vector
                tile = -(-tile // whole.dim) * whole.dim
            own = Grouping(height, tile * (right - left), min(whole.tile_rows, height), tile, whole.dim)
            yield _Region(top, bottom, left, right, width, own)


def _ranges(total: int, tile: int) -> list[tuple[int, int]]:
    """The tiles that fit, and the one that does not."""
    whole, rest = divmod(total, tile)
    return [each for each in ((0, whole), (whole, whole + bool(rest))) if each[0] < each[1]]


def _part(
    nodes: Nodes,
    name: str,
    grouping: Grouping,
    packed: Tensor,
    bits: int,
    centroids: Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
) -> ir.Value:
    """The matrix of a grouping whose tiles fit, in another shape: `split` of the grouping, backwards."""
    count, vectors, dim = grouping.count, grouping.vectors, grouping.dim
    k = centroids.shape[1]
    codes = _unpacked(nodes, f"{name}/codes", packed, bits, count * vectors)
    if count > 1:
        firsts = nodes.op("Range", *(nodes.constant(at, torch.int32) for at in (0, count * k, k)))
        codes = nodes.op("Add", nodes.reshape(codes, [count, vectors]), nodes.reshape(firsts, [count, 1]))
    table = nodes.store(f"{name}/centroids", centroids.reshape(-1, *([dim] if dim > 1 else [])))
    value = nodes.op("Gather", nodes.cast(table, dtype), codes, axis=0)
    if vectors * dim > grouping.weights:
        value = nodes.first(nodes.reshape(value, [count, vectors * dim]), grouping.weights, 1)
    if grouping.across > 1 and grouping.tile_rows > 1:
        tiles = [grouping.down, grouping.across, grouping.tile_rows, grouping.tile_columns]
        value = nodes.op("Transpose", nodes.reshape(value, tiles), perm=[0, 2, 1, 3])
    return nodes.reshape(value, shape)


def _unpacked(nodes: Nodes, name: str, packed: Tensor, bits: int, n: int) -> ir.Value:
    """`(n,)` int32: the codes in these bytes.

    Every so many bytes, so many codes begin with a byte.  The bits of a code that begins at bit s of a byte are that
    byte shifted by s to the right, the next one by 8 - s to the left, and the one after that, for more than 8 bits,
    by 16 - s.  What does not belong to the code is above its bits, and cut off.
    """
    period, at_a_time = bits // gcd(bits, 8), 8 // gcd(bits, 8)
    missing = -len(packed) % period
    data = nodes.store(name, torch.nn.functional.pad(packed, (0, missing)).view(-1, period))
    if bits != 8:
        dtype = torch.uint8 if bits < 8 else torch.uint32
        data = data if bits < 8 else nodes.cast(data, dtype)
        starts = [bits * i for i in range(at_a_time)]
        longest = max(start % 8 + bits for start in starts)
        pieces = []
        for i in range(-(-longest // 8)):
            piece = data
            if period > 1:
                places = nodes.constant([min(start // 8 + i, period - 1) for start in starts])
                piece = nodes.op("Gather", data, places, axis=1)
            shifts = [abs(8 * i - start % 8) for start in starts]
            shifts = [min(shift, 7) if bits < 8 else shift for shift in shifts]  # a byte cannot be shifted by 8
            direction = "LEFT" if i else "RIGHT"
            pieces.append(nodes.op("BitShift", piece, nodes.constant(shifts, dtype), direction=direction))
        codes = reduce(lambda one, other: nodes.op("BitwiseOr", one, other), pieces)
        data = nodes.op("BitwiseAnd", codes, nodes.constant(2**bits - 1, dtype))
    data = nodes.reshape(data, [-1])
    if (len(packed) + missing) // period * at_a_time > n:
        data = nodes.first(data, n, 0)
    return nodes.cast(data, torch.int32)
