"""Which centroid is the nearest: the hard assignment that evaluation and the file use."""

import torch
from torch import Tensor

from .kernels.blocked import BLOCK
from .vectors import compute_dtype


def assign(W: Tensor, C: Tensor) -> Tensor:
    """`(n, d), (k, d) -> (n,)` int64: the index of each vector's nearest centroid.  Of equally near ones it is always
    the same one.

    Works block by block: memory is O(n) whatever k.
    """
    if W.ndim != 2 or C.ndim != 2 or W.shape[1] != C.shape[1]:
        raise ValueError(f"assign needs W (n, d) and C (k, d), got W {tuple(W.shape)} and C {tuple(C.shape)}")
    W, C = W.detach(), C.detach().to(compute_dtype(W.dtype))
    if C.shape[1] == 1:
        # by bisection between sorted centroids: exact, and O(n log k)
        levels, order = C[:, 0].sort(stable=True)
        edges = (levels[1:] + levels[:-1]) / 2
        # Of equal centroids the first one is taken.  Clamped, because the position of NaN is past the end.
        first = torch.searchsorted(levels, levels).clamp(max=len(levels) - 1)
        return order[first[torch.bucketize(W[:, 0].to(C.dtype).contiguous(), edges)]]
    with torch.autocast(W.device.type, enabled=False):
        offsets = -C.square().sum(1) / 2
        rows = max(1, BLOCK // len(C))
        return torch.cat([torch.addmm(offsets, block.to(C.dtype), C.t()).argmax(1) for block in W.split(rows)])
