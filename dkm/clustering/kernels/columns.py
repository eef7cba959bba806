"""The vectors of a flat weight as columns of a matrix, some of them at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

WIDE = 64  # from this many centroids on, a block lies in memory as (b, k), where sums over centroids are faster


class Vectors:
    """Flat `(N,)` tensors as columns `(d, n)`, read in blocks of b columns: in `dtype`, and sorted where that pays."""

    def __init__(self, W: Tensor, k: int, d: int, dtype: torch.dtype, *, entries: int, near: bool, ordered: bool):
        """A block has about so many `entries` of the attention, and neighbours only if they are to be `near`; W may be
        `ordered` already."""
        self.d, self.dtype, self.n = d, dtype, -(-W.numel() // d)
        self.buffers: dict[str, Tensor] = {}  # reused: new memory for every block would cost as much as filling it
        self.centers: dict[int, tuple[Tensor, float]] = {}
        self.order = _local_order(W) if near and not ordered else None
        self.b = max(1, entries // k)
        if near:
            # Short blocks reach few centroids: there is less to compute, and differences keep their precision.
            self.b = max(128, min(2 * entries // k, 16 * self.n // k))

    def __iter__(self) -> Iterator[slice]:
        for first in range(0, self.n, self.b):
            yield slice(first, min(first + self.b, self.n))

    def scratch(self, name: str, shape: tuple[int, int], like: Tensor) -> Tensor:
        """An uninitialised `(k, b)` buffer, in the memory order that is faster for this k.

        The same name always gets the same memory.
        """
        k, b = shape
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < k * b:
            buffer = self.buffers[name] = like.new_empty(k * b)
        return buffer[: k * b].view(b, k).t() if k >= WIDE and self.d > 1 else buffer[: k * b].view(k, b)

    def columns(self, flat: Tensor) -> Tensor:
        """`(N,) -> (d, n)`, contiguous, with zeros after the last value: transposed once and not in every iteration."""
        if self.d == 1:
            return flat[None]
        columns = flat.new_zeros(self.d, self.n)
        whole = flat.numel() // self.d
        columns[:, :whole] = flat[: whole * self.d].view(whole, self.d).t()
        if whole < self.n:
            columns[: flat.numel() - whole * self.d, whole] = flat[whole * self.d :]
        return columns

    def flat(self, columns: Tensor, N: int) -> Tensor:
        """The inverse of `columns`."""
        return columns[0] if self.d == 1 else columns.t().reshape(-1)[:N]

    def read(self, columns: Tensor, block: slice) -> Tensor:
        """`(d, b)`: a block of columns."""
        if self.order is not None:
            return columns[:, self.order[block].long()].to(self.dtype)
        return columns[:, block].to(self.dtype)

    def read_once(self, flat: Tensor, block: slice) -> Tensor:
        """`read` of a flat tensor that is needed only once: transposing all of it would take as much memory again."""
        if self.d == 1:
            return self.read(flat[None], block)
        values = flat[block.start * self.d : block.stop * self.d]
        if missing := (block.stop - block.start) * self.d - values.numel():
            values = torch.cat([values, values.new_zeros(missing)])
        return values.view(-1, self.d).t().to(self.dtype)

    def center(self, w: Tensor, block: slice) -> tuple[Tensor, float]:
        """For a block of vectors `(d, b)` the `(d, 1)` that differences are taken relative to, and how long the longest
        vector is after that, for d > 1.  They are computed once."""
        if block.start not in self.centers:
            center, longest = w.mean(1, keepdim=True), 0.0
            if self.d > 1:  # only where the subtraction is exact: that is between numbers of one sign and similar size
                center.masked_fill_(2 * (w - center).abs().amax(1, keepdim=True) > center.abs(), 0)
                longest = float((w - center).square().sum(0).amax().sqrt())
            self.centers[block.start] = center, longest
        return self.centers[block.start]

    def add(self, columns: Tensor, block: slice, values: Tensor) -> None:
        """Add `(d, b)` values to a block of columns."""
        if self.order is not None:
            columns[:, self.order[block].long()] += values.to(columns.dtype)
        else:
            columns[:, block] += values


def _local_order(W: Tensor) -> Tensor:
    """`(N,)` int32: the order that sorts W within pieces of 2^20 weights.  Sorting all of W would be no better."""
    order = torch.empty(W.shape, dtype=torch.int32, device=W.device)
    for first in range(0, W.numel(), 1 << 20):
        piece = W[first : first + (1 << 20)]
        if W.device.type == "cpu" and W.dtype in (torch.float32, torch.float64):
            index = torch.from_numpy(piece.detach().numpy().argsort())  # numpy sorts with vector instructions
        else:
            index = piece.argsort()
        order[first : first + (1 << 20)] = index.add_(first)
    return order
