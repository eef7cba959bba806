"""Where the centroids of groups start: k-means of every group, many groups at a time.

Everything here runs on the device of the weight, because a model of billions of weights would take too long on a CPU.
A device gives the same centroids again, see `kmeans_many.py`.
"""

import torch
from torch import Tensor

from .groups import Grouping
from .initialize import init_centroids
from .kmeans_many import BLOCK, WINDOW, kmeans, kmeans_1d, repeated, take
from .options import INITS
from .vectors import compute_dtype

CHUNK = 1 << 21  # so many vectors are looked at together, or one group
LARGE = 1 << 20  # vectors: larger groups are few and are clustered one after the other, like tensors


def init_group_centroids(W: Tensor, k: int, grouping: Grouping, *, init: str = "kmeans", seed: int = 0) -> Tensor:
    """A weight of any shape -> `(groups, k, d)` centroids to start from, in at least float32, on W's device.

    init: "kmeans" or "random", as in `init_centroids`, for every group by itself.  Vectors that do not count have no
    influence.  Where a group has fewer than k distinct vectors, some of its centroids are equal.

    Deterministic: the same W, grouping, k and seed give the same centroids on every device of one kind.
    """
    if init not in INITS:
        raise ValueError(f'init must be "kmeans" or "random", got {init!r}')
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be an integer of at least 1, got {k!r}")
    if W.numel() != grouping.rows * grouping.columns or W.numel() == 0:
        raise ValueError(f"a grouping of {grouping.rows} x {grouping.columns} weights, and W has {W.numel()}")
    if not W.is_floating_point():
        raise TypeError(f"W must be a floating-point tensor, got {W.dtype}")
    if not bool(W.detach().isfinite().all()):
        raise ValueError("W holds NaN or infinite values: there are no centroids of those")
    V, counted = grouping.split(W.detach()), grouping.counted(W.device)
    if grouping.count == 1 or grouping.vectors > LARGE:
        alone = [init_centroids(v[c], k, init=init, seed=seed) for v, c in zip(V, counted, strict=True)]
        return torch.stack(alone)
    generator = torch.Generator().manual_seed(seed)
    dtype, groups = compute_dtype(W.dtype), CHUNK // grouping.vectors
    if grouping.dim == 1:
        groups = min(groups, BLOCK // (2 * WINDOW + 1) ** 2)
    found = []
    for v, c in zip(V.split(max(1, groups)), counted.split(max(1, groups)), strict=True):
        if init == "random":
            found.append(_random(v, c, k, generator).to(dtype))
        elif grouping.dim == 1:
            found.append(kmeans_1d(v[..., 0].double(), c, k)[..., None].to(dtype))
        else:
            draws = torch.rand(k, len(v), generator=generator, dtype=torch.float64)
            found.append(kmeans(v.to(dtype), c, k, draws, steps=15 if k <= 1024 else 5))
    return torch.cat(found)


def _random(V: Tensor, counted: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """`(g, n, d), (g, n) -> (g, k, d)`: k vectors of every group, all different ones if it has as many."""
    keys = torch.rand(counted.shape, generator=generator).to(V.device).masked_fill(~counted, 2.0)
    return take(V, keys.argsort(dim=1, stable=True).gather(1, repeated(counted.sum(1), k)))
