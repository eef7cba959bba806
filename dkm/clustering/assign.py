"""Which centroid is the nearest: the hard assignment that evaluation and the file use."""

import torch
from torch import Tensor

from .kernels.blocked import BLOCK
from .kernels.native import nearest
from .vectors import compute_dtype, in_memory

CACHED = 1 << 16  # numbers that a CPU's cache holds, next to what else is in it
ON_GPU = 1 << 25  # distances of groups that are in memory together: each block is a few launches


def assign(W: Tensor, C: Tensor) -> Tensor:
    """`(n, d), (k, d) -> (n,)` int64: the index of each vector's nearest centroid.  Of equally near ones it is always
    the same one.

    Works block by block: memory is O(n) whatever k.
    """
    if W.ndim != 2 or C.ndim != 2 or W.shape[1] != C.shape[1]:
        raise ValueError(f"assign needs W (n, d) and C (k, d), got W {tuple(W.shape)} and C {tuple(C.shape)}")
    W, C = W.detach(), C.detach().to(compute_dtype(W.dtype))
    has_memory = in_memory(W)
    if C.shape[1] == 1:
        # by bisection between sorted centroids: exact, and O(n log k)
        levels, order = C[:, 0].sort(stable=True)
        edges = (levels[1:] + levels[:-1]) / 2
        # Of equal centroids the first one is taken.  Clamped, because the position of NaN is past the end.
        labels = order[torch.searchsorted(levels, levels).clamp(max=len(levels) - 1)]
        found = nearest.positions(W[:, 0], edges, labels) if has_memory else None
        return (
            labels.index_select(0, torch.bucketize(W[:, 0].to(C.dtype).contiguous(), edges)) if found is None else found
        )
    if has_memory and (found := nearest.nearest(W, C)) is not None:
        return found
    with torch.autocast(W.device.type, enabled=False):
        offsets = -C.square().sum(1) / 2
        if has_memory:
            return _largest(W, C, offsets)
        blocks = W.split(max(1, (CACHED if W.device.type == "cpu" else BLOCK) // len(C)))
        return torch.cat([torch.addmm(offsets, block.to(C.dtype), C.t()).argmax(1) for block in blocks])


def _largest(W: Tensor, C: Tensor, offsets: Tensor) -> Tensor:
    """`(n,)` int64: for each vector w the largest of `w.c + offset`.  numpy finds it with vector instructions, in a
    quarter of the time that PyTorch takes."""
    rows = max(1, CACHED // len(C))
    codes = torch.empty(len(W), dtype=torch.int64, device=W.device)
    product = C.new_empty(min(rows, len(W)), len(C))
    for block, into in zip(W.split(rows), codes.split(rows), strict=True):
        found = product[: len(block)]
        torch.addmm(offsets, block.to(C.dtype), C.t(), out=found)
        found.numpy().argmax(1, out=into.numpy())
    return codes


def assign_groups(V: Tensor, C: Tensor) -> Tensor:
    """`assign` of every group: `(g, n, d), (g, k, d) -> (g, n)` int64."""
    V, C = V.detach(), C.detach().to(compute_dtype(V.dtype))
    if C.shape[2] == 1:
        levels, order = C[:, :, 0].sort(dim=1, stable=True)
        edges = ((levels[:, 1:] + levels[:, :-1]) / 2).contiguous()
        first = torch.searchsorted(levels, levels).clamp(max=levels.shape[1] - 1)
        return order.gather(1, first.gather(1, torch.searchsorted(edges, V[:, :, 0].to(C.dtype).contiguous())))
    codes = torch.empty(V.shape[:2], dtype=torch.int64, device=V.device)
    block = ON_GPU if V.is_cuda else BLOCK
    groups = max(1, block // (V.shape[1] * C.shape[1]))
    vectors = max(1, block // C.shape[1])
    with torch.autocast(V.device.type, enabled=False):
        offsets = -C.square().sum(2)[:, None, :] / 2
        for at in _slices(len(V), groups):
            for of in _slices(V.shape[1], vectors):
                codes[at, of] = torch.baddbmm(offsets[at], V[at, of].to(C.dtype), C[at].mT).argmax(2)
    return codes


def _slices(n: int, step: int) -> list[slice]:
    return [slice(first, first + step) for first in range(0, n, step)]
