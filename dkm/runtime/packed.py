"""A clustered tensor that stays packed: its codes, centroids and scales, and the weights that these stand for.

The bytes are those of the file.  Weights are decoded when they are needed, some rows at a time, and have exactly the
values that loading the file without `packed` gives.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..clustering.decode import Outliers, as_runs, products
from ..clustering.spec import Spec
from ..clustering.vectors import compute_dtype
from ..formats.described import Codes
from ..modelling.packed_tensor import PackedTensor
from .unpacking import combinations, joined, numbers_at, rows_of, unpack

BLOCK = 1 << 18  # weights that are decoded at a time, on a CPU: they and what decoding needs fit its cache
LARGE_BLOCK = 1 << 24  # on a GPU, and where a compiler makes one loop of the decoding


class PackedWeight(PackedTensor):
    """Codes, centroids and scales as buffers, which keep their dtypes; `dtype` follows the model's `.to(dtype)`.

    The rest is static.  With equal `shape`, `spec` and `exponent`, a `state_dict` can be loaded into another one.
    """

    codes: Tensor  # (bytes,) uint8: the codes of the file, packed as in formats/codec.py
    centroids: Tensor  # (k, dim) or, where there are groups, (groups, k, dim); 16 bit or E4M3
    scales: Tensor | None  # (shape[0],), 16 bit
    positions: Tensor | None  # (m,) int64: of weights with values of their own
    outliers: Tensor | None  # (m,), of the tensor's dtype in the file
    facts: Tensor  # what is static, as integers, so that a state_dict of another tensor is refused
    like: Tensor  # empty, of the dtype that weights are computed in

    def __init__(self, content: Codes, shape: tuple[int, ...], source: torch.dtype, dtype: torch.dtype | None = None):
        super().__init__()
        self.shape, self.spec, self.exponent = tuple(shape), content.spec, content.exponent
        self.source = source  # the tensor's dtype in the file: values are rounded to it, and then to `dtype`
        self.grouping = as_runs(self.spec.grouping(self.shape))
        self.count = shape[0] if shape else 1  # of rows
        self.pitch = math.prod(shape[1:])  # weights of a row
        self.per_band = replace(self.grouping, rows=self.grouping.tile_rows).codes  # of tiles side by side
        self.register_buffer("codes", content.packed)
        self.register_buffer("centroids", content.centroids)
        self.register_buffer("scales", content.scales)
        own = content.outliers
        self.register_buffer("positions", None if own is None else own.positions)
        self.register_buffer("outliers", None if own is None else own.values)
        facts = _facts(self.spec, self.shape, self.exponent, source)
        self.register_buffer("facts", torch.tensor(facts if own is None else [*facts, -len(own.values)]))
        self.register_buffer("like", torch.empty(0, dtype=dtype or source), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        """Where the codes are, and the weights."""
        return self.codes.device

    def content(self) -> Codes:
        """What a file has of it.  Nothing is copied."""
        own = self.spec
        apart = None
        if self.positions is not None and self.outliers is not None:
            apart = Outliers(self.positions, self.outliers)
        return Codes(own.bits, own.dim, self.exponent, self.codes, self.centroids, own.group, self.scales, apart)

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        own = (self.codes, self.centroids, self.scales, self.positions, self.outliers)
        return sum(tensor.nbytes for tensor in own if tensor is not None)

    def dense(self) -> Tensor:
        """All weights, of the tensor's shape."""
        blocks = self.blocks()
        if len(blocks) == 1:
            return self.rows(0, self.count).view(self.shape)
        weight = torch.empty(self.count, self.pitch, dtype=self.dtype, device=self.device)
        for start, stop in blocks:
            weight[start:stop] = self.rows(start, stop).view(-1, self.pitch)
        return weight.view(self.shape)

    def blocks(self) -> list[tuple[int, int]]:
        """Ranges of rows that take little memory: about a block of weights, or a row, or the height of one tile."""
        large = self.codes.is_cuda or torch.compiler.is_compiling()
        step = max(1, (LARGE_BLOCK if large else BLOCK) // self.pitch)
        tall = self.grouping.tile_rows  # 1 where groups are runs of weights
        step = max(tall, step // tall * tall)
        return [(start, min(start + step, self.count)) for start in range(0, self.count, step)]

    def rows(self, start: int, stop: int) -> Tensor:
        """The weights of these rows, `(stop - start, *shape[1:])`.  Rows are indices of the first axis."""
        own = self.grouping
        if self.straddles():
            return self.take(torch.arange(start, stop, device=self.device))
        values = self._of_runs(start, stop) if own.rows == 1 else self._of_tiles(start, stop)
        values = self._scaled(values.view(stop - start, self.pitch), slice(start, stop))
        return self._with_outliers(values, start).view(-1, *self.shape[1:])

    def take(self, rows: Tensor) -> Tensor:
        """The weights of these rows, `(len(rows), *shape[1:])`, for integers from 0 to `shape[0] - 1`."""
        if not (rows.is_cuda or rows.is_meta or torch.compiler.is_compiling()) and len(rows):
            low, high = map(int, rows.aminmax())
            if low < 0 or high >= self.count:
                raise IndexError(f"row {low if low < 0 else high} of a weight that has {self.count}")
        bits, dim = self.spec.bits, self.spec.dim
        per_row = self.pitch // dim
        if self.spec.group is None and self.pitch % dim == 0 and per_row * bits % 8 == 0:  # rows are whole bytes
            stream = self.codes.view(self.count, -1).index_select(0, rows).view(-1)
            m = joined(bits, dim * self._table_dtype().itemsize, len(rows) * per_row, per_row, 1)
            indices = unpack(stream, m * bits, 0, -(-len(rows) * per_row // m))
            values = rows_of(self._table(0, 1, m), indices).view(-1)[: len(rows) * self.pitch]
        else:
            places, groups, offsets = self._places(rows)
            found = numbers_at(self.codes, bits, places)
            values = self._table(0, self.grouping.count).view(-1)[((groups << bits) + found) * dim + offsets]
        values = self._scaled(values.view(-1, self.pitch), rows)
        if self.positions is not None and self.outliers is not None:
            wanted = rows.long()[:, None] * self.pitch + torch.arange(self.pitch, device=self.device)
            at = torch.searchsorted(self.positions, wanted).clamp(max=len(self.positions) - 1)
            values = torch.where(self.positions[at] == wanted, self.outliers.to(self.dtype)[at], values)
        return values.view(-1, *self.shape[1:])

    def values(self) -> Tensor:
        """`(k, dim)`: what the codes of a tensor without groups stand for, without its scales.  With scales, the
        exponent is left out as well."""
        return self._table(0, 1)

    def straddles(self) -> bool:
        """Whether a vector has weights of two rows of a tile, or a run ends with a part of one: rare, and slow."""
        own = self.grouping
        if own.rows == 1:
            return own.count > 1 and own.tile_columns % own.dim > 0
        return own.tile_columns % own.dim > 0 or own.columns % own.dim > 0

    def _of_runs(self, start: int, stop: int) -> Tensor:
        """The weights of these rows in one dimension, before scales, where every group is a run of weights."""
        own, bits, per_group = self.grouping, self.spec.bits, self.grouping.vectors
        begin, end = start * self.pitch, stop * self.pitch
        first, last = begin // own.dim, -(-end // own.dim)  # codes
        groups = slice(first // per_group, -(-last // per_group))
        count = groups.stop - groups.start
        m = joined(bits, own.dim * self._table_dtype().itemsize, last - first, per_group, count)
        low, high = first // m, -(-last // m)
        indices = unpack(self.codes, m * bits, low, high)
        if count > 1:
            number = torch.arange(low, high, dtype=torch.int32, device=self.device) // (per_group // m)
            indices = indices + (number - groups.start << m * bits)
        values = rows_of(self._table(groups.start, groups.stop, m), indices).view(-1)
        return values[begin - low * m * own.dim : end - low * m * own.dim]

    def _of_tiles(self, start: int, stop: int) -> Tensor:
        """The same, `(rows, columns)`, where groups are tiles.  Whole tiles are decoded."""
        own = self.grouping
        top, bottom = start // own.tile_rows, -(-stop // own.tile_rows)  # tiles
        whole = min(bottom, own.rows // own.tile_rows)
        bands = [self._of_bands(top, whole, own.tile_rows)] if top < whole else []
        if whole < bottom:
            bands.append(self._of_bands(whole, bottom, own.rows % own.tile_rows))
        values = bands[0] if len(bands) == 1 else torch.cat(bands)
        return values[start - top * own.tile_rows : stop - top * own.tile_rows]

    def _of_bands(self, top: int, bottom: int, tall: int) -> Tensor:
        """Tiles of this height, from row to row of tiles: `((bottom - top) * tall, columns)`."""
        own, bits, bands = self.grouping, self.spec.bits, bottom - top
        inner, beside = divmod(own.columns, own.tile_columns)
        tile, edge = tall * own.tile_columns // own.dim, tall * beside // own.dim  # codes
        first, per_band = top * own.tile_rows * own.columns // own.dim, tall * own.columns // own.dim
        m = joined(
            bits,
            own.dim * self._table_dtype().itemsize,
            bands * per_band,
            math.gcd(tile, edge, first),
            bands * own.across,
        )
        table = self._table(top * own.across, bottom * own.across, m)
        indices = unpack(self.codes, m * bits, first // m, (first + bands * per_band) // m).view(bands, -1)
        groups = torch.arange(bands * own.across, dtype=torch.int32, device=self.device).view(bands, -1, 1) << m * bits
        parts = []
        for at, codes, wide in ((slice(0, inner), tile, own.tile_columns), (slice(inner, None), edge, beside)):
            if codes and (count := len(range(own.across)[at])):
                place = slice(at.start * tile // m, (at.start * tile + count * codes) // m)
                mine = indices[:, place].view(bands, count, codes // m) + groups[:, at]
                values = rows_of(table, mine.view(-1)).view(bands, count, tall, wide)
                parts.append(values.transpose(1, 2).reshape(bands * tall, count * wide))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _places(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of every weight of these rows, `(len(rows), pitch)` each: the place of its code, its group, and its place in
        the vector."""
        own, dim = self.grouping, self.spec.dim
        columns = torch.arange(self.pitch, device=self.device)
        if own.rows == 1:
            flat = rows.long()[:, None] * self.pitch + columns
            run, place = flat // own.tile_columns, flat % own.tile_columns
            return run * own.vectors + place // dim, run, place % dim
        band, row = (rows // own.tile_rows).long()[:, None], (rows % own.tile_rows).long()[:, None]
        tile, column = columns // own.tile_columns, columns % own.tile_columns
        tall = (own.rows - band * own.tile_rows).clamp(max=own.tile_rows)
        per_tile = (tall * own.tile_columns - 1) // dim + 1  # codes of a tile that has all its columns
        place = row * own.tile_columns + column
        number = place // dim
        beside = own.columns % own.tile_columns
        if beside and own.tile_columns - beside >= dim:  # at the right edge, vectors do not count that lie beyond it
            all_rows = torch.arange(own.tile_rows, device=self.device) * own.tile_columns
            counted = (all_rows + beside - 1) // dim - all_rows // dim + 1
            before = (counted.cumsum(0) - counted)[row] + number - row * own.tile_columns // dim
            number = torch.where(tile == own.across - 1, before, number)
        return band * self.per_band + tile * per_tile + number, band * own.across + tile, place % dim

    def _table_dtype(self) -> torch.dtype:
        """Of centroids: where there are scales, these come on top, and the result is rounded after that."""
        return self.dtype if self.scales is None else compute_dtype(self.source)

    def _table(self, start: int, stop: int, m: int = 1) -> Tensor:
        """The values of `m` codes at once for these groups: `(groups * k^m, m * dim)`, without scales."""
        centroids = self.centroids.view(-1, 2**self.spec.bits, self.spec.dim)[start:stop]
        if self.scales is None:
            centroids = products(centroids, None, self.exponent, self.source)
        return combinations(centroids.to(self._table_dtype()), m).view(-1, m * self.spec.dim)

    def _scaled(self, values: Tensor, rows: slice | Tensor) -> Tensor:
        """`(n, pitch)` values of the table -> the weights of these n rows."""
        if self.scales is None:
            return values
        return products(values, self.scales[rows][:, None], self.exponent, self.source).to(self.dtype)

    def _with_outliers(self, values: Tensor, start: int) -> Tensor:
        """`(rows, pitch)` weights from this row on, with the outliers among them in their places."""
        if self.positions is None or self.outliers is None:
            return values
        n = values.numel()
        places = self.positions - start * self.pitch
        places = torch.where((places >= 0) & (places < n), places, n)  # those of other rows go beyond the end
        padded = torch.cat([values.reshape(-1), values.new_zeros(1)])
        padded[places] = self.outliers.to(values.dtype)
        return padded[:n].view(values.shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedWeight":
        """What `.to` and `.half` do.  As integers, centroids, scales and outliers keep their dtypes."""
        own: dict[str, Any] = self._buffers
        dtypes = {name: own[name].dtype for name in ("centroids", "scales", "outliers") if own[name] is not None}
        for name, dtype in dtypes.items():
            own[name] = own[name].view(AS_INTEGERS[dtype.itemsize])
        try:
            return super()._apply(fn, recurse)
        finally:
            for name, dtype in dtypes.items():
                own[name] = own[name].view(dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Refuse the codes of a tensor that means something else by them."""
        given = state_dict.get(f"{prefix}facts")
        if given is not None and not torch.equal(given.cpu(), self.facts.cpu()):
            errors = rest[-1]
            errors.append(
                f"{prefix.rstrip('.')} is {self.spec.label} of shape {self.shape}, and the state is of another"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.spec.label}, shape={self.shape}, dtype={self.dtype}"


AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _facts(spec: Spec, shape: tuple[int, ...], exponent: int, source: torch.dtype) -> list[int]:
    group = (-1, -1) if spec.group is None else (spec.group.rows or 0, spec.group.columns or 0)
    return [spec.bits, spec.dim, *group, exponent, source.itemsize, int(source == torch.bfloat16), *shape]
