"""Codes, centroids, scales and an exponent -> the weight: the one place that says what these stand for.

A weight is its centroid's value, times the scale of its row, times 2^exponent.  The products are computed in float32,
or in float64 for a tensor of float64, in this order, and the result is rounded to the tensor's dtype.  An outlier has
a value of its own instead.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .groups import Group, Grouping
from .vectors import compute_dtype

PIECE = 1 << 20  # weights that are decoded at a time


class Outliers(NamedTuple):
    """Weights of a tensor that are kept as they are."""

    positions: Tensor  # (m,) int64: where they are in the tensor, row-major; ascending, none of them twice
    values: Tensor  # (m,), of the tensor's dtype

    def stored_positions(self, numel: int) -> Tensor:
        """The positions as a file has them, for a tensor of so many weights."""
        return self.positions.to(position_dtype(numel))

    def nbytes(self, numel: int) -> int:
        """What they take in a file."""
        return len(self.positions) * (position_dtype(numel).itemsize + self.values.element_size())

    def __str__(self) -> str:
        count = len(self.positions)
        return f"{count:,} outlier{'s' * (count > 1)}"

    def put(self, weight: Tensor) -> Tensor:
        """Into a contiguous weight, which is changed and returned."""
        weight.view(-1)[self.positions.to(weight.device)] = self.values.to(weight.device)
        return weight


def position_dtype(numel: int) -> torch.dtype:
    """Of the positions in a tensor of so many weights, in a file."""
    return torch.uint32 if numel <= 2**32 else torch.int64


class Piece(NamedTuple):
    """A part of the matrix of a grouping: whole tiles, or a part of one."""

    rows: slice
    columns: slice
    first: int  # the number of its first group
    grouping: Grouping  # of this part alone

    def spread(self, codes: Tensor) -> Tensor:
        """The codes of this part -> `(groups, vectors)`, where vectors that do not count have any code."""
        own = self.grouping
        if own.all_count:
            return codes.view(own.count, own.vectors)
        counted = own.counted(codes.device)
        return codes[counted.view(-1).cumsum(0) - 1].view(counted.shape)  # the first vector of all always counts


def as_runs(grouping: Grouping) -> Grouping:
    """The same groups in one row, where each of them is one run of consecutive weights."""
    if grouping.tile_columns != grouping.columns:
        return grouping
    weights = grouping.rows * grouping.columns
    return Grouping(1, weights, 1, min(grouping.weights, weights), grouping.dim)


def pieces(grouping: Grouping) -> Iterator[Piece]:
    """Parts of the matrix of `as_runs(grouping)`, in the order of their codes.

    They have about PIECE weights, or one tile where a tile has more and more than one row.
    """
    whole = as_runs(grouping)
    size = whole.vectors * whole.dim  # of a tile that is filled up
    tall = max(1, PIECE // (whole.across * size))  # tiles at a time, one below the other
    wide = min(whole.across, max(1, PIECE // size))  # and side by side
    for down in range(0, whole.down, tall):
        top, bottom = down * whole.tile_rows, min((down + tall) * whole.tile_rows, whole.rows)
        for across in range(0, whole.across, wide):
            left, right = across * whole.tile_columns, min((across + wide) * whole.tile_columns, whole.columns)
            step, tile = right - left, whole.tile_columns
            if whole.rows == 1 and size > PIECE:  # a part of one run
                step = tile = max(1, PIECE // whole.dim) * whole.dim
            for begin in range(left, right, step):
                end = min(begin + step, right)
                # in one row, a shorter tile has the same vectors; in several rows, its width says where they lie
                width = min(tile, end - begin) if whole.rows == 1 else tile
                own = Grouping(bottom - top, end - begin, whole.tile_rows, width, whole.dim)
                yield Piece(slice(top, bottom), slice(begin, end), down * whole.across + across, own)


def decode(
    codes: Tensor | Callable[[int, int], Tensor],
    centroids: Tensor,
    scales: Tensor | None,
    exponent: int,
    group: Group | None,
    shape: Sequence[int],
    dim: int,
    dtype: torch.dtype,
    outliers: Outliers | None = None,
) -> Tensor:
    """The weight of this shape and dtype.  Besides it, memory is taken by a piece of it only.

    `codes` are `(n,)` integers, one for each vector that counts, group after group; or a function that returns those
    from one place to another, so that they need not exist all at once.  `centroids` are `(groups, k, dim)`, or
    `(k, dim)` without a group; `scales` are `(shape[0],)`.
    """
    whole = as_runs(Grouping.of(tuple(shape), group, dim))
    k, device, at = centroids.shape[-2], centroids.device, 0
    table = centroids.reshape(-1, dim)
    if table.element_size() == 1:  # not everything can be done with 8-bit floats
        table = table.view(torch.uint8)
    weight = torch.empty(whole.rows, whole.columns, dtype=dtype, device=device)
    for piece in pieces(whole):
        own, end = piece.grouping, at + piece.grouping.codes
        part = codes[at:end] if isinstance(codes, Tensor) else codes(at, end)
        firsts = k * torch.arange(piece.first, piece.first + own.count, device=device)
        vectors = table.index_select(0, (piece.spread(part.long()) + firsts[:, None]).view(-1))
        values = own.join(vectors).view(own.rows, own.columns).view(centroids.dtype)
        weight[piece.rows, piece.columns] = products(values, _scales(scales, piece, weight), exponent, dtype)
        at = end
    weight = weight.view(tuple(shape))
    return weight if outliers is None else outliers.put(weight)


def products(centroids: Tensor, scales: Tensor | None, exponent: int, dtype: torch.dtype) -> Tensor:
    """Values of centroids and, of a shape that fits, scales -> the weights that they stand for, in `dtype`."""
    values = centroids.to(compute_dtype(dtype))
    if scales is not None:
        values = values * scales.to(values.dtype)
    if exponent:
        values = values * 2.0**exponent
    return values.to(dtype)


def all_finite(centroids: Tensor, scales: Tensor | None, exponent: int, dtype: torch.dtype) -> bool:
    """Whether any of the centroids gives a finite weight with any of the scales.  Takes a copy of the centroids."""
    if centroids.element_size() == 1:  # not everything can be done with 8-bit floats; the conversion is exact
        centroids = centroids.to(torch.float16)
    largest = centroids.abs().amax()  # NaN where there is one
    return bool(products(largest, None if scales is None else scales.amax(), exponent, dtype).isfinite())


def _scales(scales: Tensor | None, piece: Piece, weight: Tensor) -> Tensor | None:
    """The scales of the weights of a piece, of a shape that fits the piece."""
    if scales is None:
        return None
    if len(weight) > 1:
        return scales[piece.rows, None]
    places = torch.arange(piece.columns.start, piece.columns.stop, device=scales.device)
    return scales[places // (weight.numel() // len(scales))]
