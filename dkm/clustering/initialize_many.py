"""Where the centroids of weights on a GPU start: k-means of several weights at a time.

On a GPU, each operation is a launch, and k-means of one weight takes thousands of short ones.  So weights are clustered
in batches, as groups are: see `kmeans_many.py`.  No more is looked at than on a CPU, see `initialize.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .kmeans_many import kmeans, kmeans_1d
from .vectors import compute_dtype

SAMPLE = 1 << 16  # vectors of a weight that are looked at, and at least 16 per centroid
VALUES = 1 << 20  # for d = 1
CHUNK, CHUNK_1D = 1 << 24, 1 << 22  # so many values are looked at together; for d = 1 they are sorted, in float64
WORD = (1 << 32) - 1


@torch.no_grad()
def kmeans_of_weights(weights: Sequence[Tensor], k: int, seed: int) -> list[Tensor]:
    """`(n, d)` each, of one d, dtype and device -> `(k, d)` each, the centroids of k-means in at least float32.

    Deterministic on a kind of device.  All weights draw the same numbers, so that it does not matter, but for rounding,
    which other weights there are.
    """
    d = weights[0].shape[1]
    most = VALUES if d == 1 else max(SAMPLE, 16 * k)
    draws = torch.rand(k, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found: list[Tensor] = [torch.empty(0)] * len(weights)
    for batch in _batches([min(len(w), most) for w in weights], CHUNK_1D if d == 1 else CHUNK // d):
        V, counted = _padded([sample(weights[i], most, seed) for i in batch])
        dtype = compute_dtype(V.dtype)
        if d == 1:
            C = kmeans_1d(V[..., 0].double(), counted, k, histogram=True)[..., None]
        else:
            C = kmeans(V.to(dtype), counted, k, draws.expand(-1, len(batch)), steps=30 if k <= 1024 else 10)
        for i, c in zip(batch, C.to(dtype).unbind(), strict=True):
            found[i] = c.clone()  # a view would keep the others of the batch in memory
    return found


def by_batches(device: torch.device) -> bool:
    """Whether weights on this device are clustered here; where not, `initialize.py` does it on the CPU."""
    return device.type == "cuda"


def sample(W: Tensor, count: int, seed: int) -> Tensor:
    """`count` rows of W, all different ones; all rows where there are no more.  For d = 1 also the two extremes.

    One is taken out of each of `count` parts of equal size, at a place that a hash of the seed says: it takes no
    generator, whose numbers would depend on the device, and no permutation of all rows.
    """
    n = len(W)
    if n <= count:
        return W
    i = torch.arange(count + 1, device=W.device)
    edges = i * n // count
    mixed = (i[:-1] + (seed * 0x9E3779B1 & WORD)) & WORD
    for shift, factor in ((16, 0x7FEB352D), (15, 0x6C078965)):  # below 2^31: a product must fit into an int64
        mixed = ((mixed ^ (mixed >> shift)) * factor) & WORD
    chosen = W[edges[:-1] + (mixed ^ (mixed >> 16)) % edges.diff()]
    return chosen if W.shape[1] > 1 else torch.cat([chosen, torch.stack(W.aminmax())[:, None]])


def _batches(sizes: list[int], most: int) -> list[list[int]]:
    """Indices in batches, which are filled up to their largest size each and then hold no more than `most`, or one."""
    batches: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if batches and (len(batches[-1]) + 1) * sizes[batches[-1][0]] <= most:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _padded(weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """`(n, d)` each -> all of them, filled up with zeros, `(g, largest n, d)`, and what counts `(g, largest n)`."""
    V = weights[0].new_zeros(len(weights), max(map(len, weights)), weights[0].shape[1])
    for i, w in enumerate(weights):
        V[i, : len(w)] = w
    counts = torch.tensor([len(w) for w in weights], device=V.device)
    return V, torch.arange(V.shape[1], device=V.device) < counts[:, None]
