"""Clustered tensors as Core ML's palettes: a table of entries, an index for each vector, perhaps a scale for each row.

Core ML divides a weight into boxes, each axis by its own size.  Every box has a table, and every vector lies along one
axis.  Our groups are tiles of the weight as a matrix, and our vectors run on from one axis to the next, so some tensors
do not fit.  Nothing here needs coremltools.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.codec import CHUNK
from ..formats.described import Codes, Described

WIDTHS = (1, 2, 3, 4, 6, 8)  # bits of an index


@dataclass(frozen=True)
class Palette:
    """What `constexpr_lut_to_dense` of iOS 18 takes, and the scale after it."""

    indices: Tensor  # uint8, of the weight's shape, but for the vector axis, which is divided by the vectors' size
    table: Tensor  # float32 (boxes along axis 0, ..., boxes along the last one, entries, vector size)
    vector_axis: int | None  # None where the size is 1
    scale: Tensor | None  # float32 (rows, 1, ..., 1)

    @property
    def bits(self) -> int:
        """The width of an index."""
        return self.table.shape[-2].bit_length() - 1

    def values(self) -> Tensor:
        """The weight that Core ML makes of it, float32."""
        size, rank = self.table.shape[-1], self.indices.dim()
        box = torch.zeros((), dtype=torch.int64)  # the number of the box of each index
        for axis in range(rank):
            boxes, length = self.table.shape[axis], self.indices.shape[axis]
            own = torch.arange(length) // (length // boxes)
            box = box * boxes + own.view([-1 if i == axis else 1 for i in range(rank)])
        places = box * self.table.shape[-2] + self.indices
        values = self.table.reshape(-1, size)[places]
        if self.vector_axis is not None:  # the values of a vector go where the vector was
            values = values.movedim(-1, self.vector_axis + 1).flatten(self.vector_axis, self.vector_axis + 1)
        else:
            values = values.squeeze(-1)
        return values if self.scale is None else values * self.scale


def palette(each: Described, dtype: torch.dtype) -> Palette | str:
    """The palette of a clustered tensor, or in words why there is none.

    `dtype` is what Core ML computes in: a table that it cannot hold exactly is no palette of this tensor.
    """
    content = each.content
    assert isinstance(content, Codes)
    if content.outliers is not None:
        return f"Core ML's palettes store no value besides indices, and this has {content.outliers}"
    width = next((width for width in WIDTHS if width >= content.bits), None)
    if width is None:
        return f"Core ML has indices of at most {WIDTHS[-1]} bits, and these have {content.bits}"
    if not 2 <= len(each.shape) <= 5:
        return f"Core ML's layers have palettes for weights of 2 to 5 axes, and this one has {len(each.shape)}"
    box = _box(each)
    if box is None:
        return f"Core ML has tiles along axes only, all of one size: {content.spec.label} of {_sizes(each)} is not"
    axis = None if content.dim == 1 else _vector_axis(box, content.dim)
    if content.dim > 1 and axis is None:
        return f"Core ML has vectors along one axis only: those of {content.dim} values in {_sizes(each)} are not"
    entries = content.centroids.to(torch.float16 if content.centroids.element_size() == 1 else content.centroids.dtype)
    table = entries.cpu().double() * 2.0**content.exponent
    if not torch.equal(table.to(dtype).double(), table):
        return f"{str(dtype).removeprefix('torch.')} does not hold its centroids"
    scale = None if content.scales is None else content.scales.cpu().view(-1, *[1] * (len(each.shape) - 1))
    if scale is not None and not torch.equal(scale.to(dtype).double(), scale.double()):
        return f"{str(dtype).removeprefix('torch.')} does not hold its scales"
    boxes = [size // own for size, own in zip(each.shape, box, strict=True)]
    table = table.float().view(*boxes, 2**content.bits, content.dim)
    table = torch.nn.functional.pad(table, (0, 0, 0, 2**width - 2**content.bits))
    made = Palette(_indices(each, box, axis), table, axis, None if scale is None else scale.float())
    if not torch.equal(made.values(), each.values().float()):  # rounded once more, or float64
        return f"as products in float32, its values are not those of {str(each.dtype).removeprefix('torch.')}"
    return made


def _sizes(each: Described) -> str:
    return "x".join(map(str, each.shape))


def _box(each: Described) -> list[int] | None:
    """The shape of the part of a tensor that is one group; None where it is no box, or where boxes are not alike."""
    shape, grouping = list(each.shape), each.grouping
    if not grouping.all_count:
        return None
    if grouping.rows == 1:
        return _run(shape, grouping.tile_columns)
    rest = _run(shape[1:], grouping.tile_columns)
    return None if rest is None else [grouping.tile_rows, *rest]


def _run(shape: list[int], weights: int) -> list[int] | None:
    """The box that so many consecutive weights of a tensor make; None where they make none."""
    box = []
    for axis, size in enumerate(shape):
        inner = math.prod(shape[axis + 1 :])
        own = min(size, max(1, weights // inner))
        if size % own:
            return None
        box.append(own)
    return box if math.prod(box) == weights else None


def _vector_axis(box: list[int], dim: int) -> int | None:
    """The axis along which all vectors of a box lie."""
    axis = max((i for i, size in enumerate(box) if size > 1), default=0)
    return axis if box[axis] % dim == 0 else None


def _indices(each: Described, box: list[int], axis: int | None) -> Tensor:
    """The codes, each at the place of its vector."""
    content = each.content
    assert isinstance(content, Codes)
    n = each.grouping.codes
    codes = torch.cat([content.codes(i, min(i + CHUNK, n)).to(torch.uint8) for i in range(0, n, CHUNK)])
    boxes = [size // own for size, own in zip(each.shape, box, strict=True)]
    inside = [own // content.dim if i == axis else own for i, own in enumerate(box)]
    rank = len(box)
    # groups, then the vectors of each -> the groups along each axis beside the vectors along it
    order = [place for i in range(rank) for place in (i, rank + i)]
    places = codes.view(*boxes, *inside).permute(order)
    return places.reshape([a * b for a, b in zip(boxes, inside, strict=True)])
