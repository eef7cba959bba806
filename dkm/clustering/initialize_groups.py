"""Where the centroids of groups start: k-means of every group, many groups at a time.

Everything here runs on the device of the weight, because a model of billions of weights would take too long on a CPU.
Where the order of additions could change a sum, integers are added, so that a device gives the same centroids again
and all ranks agree.  A CPU and a GPU may differ in the last bits.
"""

import math

import torch
from torch import Tensor

from .assign import assign_groups
from .groups import Grouping
from .initialize import init_centroids
from .options import INITS
from .vectors import compute_dtype

CHUNK = 1 << 21  # so many vectors are looked at together, or one group
BLOCK = 1 << 22  # so many distances are in memory together
LARGE = 1 << 20  # vectors: larger groups are few and are clustered one after the other, like tensors
WINDOW = 12  # how many values the bound between two clusters may move to either side per round, for d = 1
ROUNDS = 6
STEPS = 300  # of Lloyd's algorithm for d = 1, at most, and so many between two looks at whether anything moves:
LOOK = 20


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
            found.append(_kmeans_1d(v[..., 0].double(), c, k)[..., None].to(dtype))
        else:
            found.append(_kmeans(v.to(dtype), c, k, generator))
    return torch.cat(found)


def _random(V: Tensor, counted: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """`(g, n, d), (g, n) -> (g, k, d)`: k vectors of every group, all different ones if it has as many."""
    keys = torch.rand(counted.shape, generator=generator).to(V.device).masked_fill(~counted, 2.0)
    return _take(V, keys.argsort(dim=1, stable=True).gather(1, _round(counted.sum(1), k)))


def _round(counts: Tensor, k: int) -> Tensor:
    """`(g,) -> (g, k)`: the numbers from 0 to each count, again and again."""
    return torch.arange(k, device=counts.device) % counts[:, None]


def _take(V: Tensor, indices: Tensor) -> Tensor:
    """`(g, n, d), (g, m) -> (g, m, d)`: vectors of every group by their indices."""
    return V.gather(1, indices[..., None].expand(-1, -1, V.shape[2]))


def _integers(X: Tensor) -> tuple[Tensor, Tensor]:
    """`(g, n, ...)` -> the same values as int64, whose sums over n are exact, and the unit of each group `(g, 1, ...)`.

    The unit is a power of two: the largest value has 62 bits, less those that a sum of n values needs.
    """
    largest = X.abs().flatten(1).amax(1).double().clamp(min=2.0**-900)  # of zeros
    exponent = torch.frexp(largest).exponent - (62 - X.shape[1].bit_length())
    unit = torch.exp2(exponent.double()).view(-1, *[1] * (X.ndim - 1))
    return (X.double() / unit).round_().long(), unit


# --- d = 1 ---------------------------------------------------------------------------------------


def _kmeans_1d(values: Tensor, counted: Tensor, k: int) -> Tensor:
    """`(g, n)` float64, of which some count -> `(g, k)` sorted centroids."""
    counts = counted.sum(1, keepdim=True)
    x = values.masked_fill(~counted, math.inf).sort(1).values
    low, high = x[:, :1], x.gather(1, counts - 1)
    valid = torch.arange(x.shape[1], device=x.device) < counts
    x = torch.where(valid, x, high)
    width = torch.where(high > low, high - low, 1.0)
    u = (x - low) / width
    C = low + width * _spread(u, valid, counts, k)
    # Where there are no more than k distinct values, these are the centroids.
    new = torch.cat([torch.ones_like(valid[:, :1]), x[:, 1:] > x[:, :-1]], 1) & valid
    distinct = new.sum(1)
    few = distinct <= k
    exact = x.masked_fill(~new, math.inf)[few].sort(1).values.gather(1, _round(distinct[few], k))
    C[few] = exact.sort(1).values
    return torch.minimum(torch.maximum(C, low), high)


def _spread(u: Tensor, valid: Tensor, counts: Tensor, k: int) -> Tensor:
    """`(g, n)` sorted values from 0 to 1, of which the first so many are valid -> `(g, k)` sorted centroids.

    The start is in proportion to the cube root of the density, as `initialize._kmeans_1d` explains: a gap between two
    values has a share in proportion to its power of 2/3, but never more than that of one centroid.
    """
    share = u.diff(dim=1).pow(2 / 3)
    for _ in range(3):
        share = torch.minimum(share, share.sum(1, keepdim=True) / k)
    position = torch.nn.functional.pad(_integers(share)[0].cumsum(1), (1, 0)) if u.shape[1] > 1 else u.long()
    places = torch.arange(2 * k + 1, device=u.device) * (position[:, -1:].double() / (2 * k))
    at = torch.searchsorted(position, places.long()).clamp(max=u.shape[1] - 1)
    C, bounds = u.gather(1, at[:, 1::2]), at[:, 2:-1:2]
    integers, unit = _integers(u)
    sums = torch.nn.functional.pad((integers * valid).cumsum(1), (1, 0))
    if k > 1:
        bounds = _best_bounds(u, valid, counts, bounds)

    def bounds_of(C: Tensor) -> Tensor:
        """Before which value each centroid's interval begins, but the first one's: `(g, k - 1)`."""
        return torch.searchsorted(u, (C[:, 1:] + C[:, :-1]) / 2)

    def step(C: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """The means of the intervals; where one holds no value, C.  And how many values they hold."""
        bounds = torch.cat([torch.zeros_like(counts), torch.minimum(bounds, counts), counts], 1)
        count = bounds.diff(dim=1)
        return torch.where(count > 0, sums.gather(1, bounds).diff(dim=1) * unit / count.clamp(min=1), C), count

    C, _ = step(C, bounds)
    for i in range(1, STEPS + 1):
        moved, count = step(C, bounds_of(C))
        if i % LOOK == 0:
            if not bool(((moved != C) | (count == 0)).any()):
                break
            _, error = nearest_of_group(u[..., None], moved[..., None])
            error = error.masked_fill(~valid, -1.0)
            moved = _refill(u[..., None], moved[..., None], error, count == 0)[..., 0].sort(1).values
        C = moved
    return C


def _best_bounds(u: Tensor, valid: Tensor, counts: Tensor, bounds: Tensor) -> Tensor:
    """`(g, n)` sorted values and the `(g, k - 1)` bounds between their clusters -> better bounds.

    Dynamic programming in which each bound stays within a window around its present place, repeated from the bounds
    that it found.
    """
    g, k = len(u), bounds.shape[1] + 1
    moments = []
    for power in (1, 2):
        integers, unit = _integers((u - 0.5).pow(power) * valid)  # centred, or squares would cancel more
        moments.append(torch.nn.functional.pad(integers.cumsum(1), (1, 0)) * unit)
    offsets = torch.arange(-WINDOW, WINDOW + 1, device=u.device)
    order = torch.arange(1, k, device=u.device)
    bounds = torch.minimum((bounds - order).cummax(1).values + order, counts - k + order)  # no empty cluster
    for _ in range(ROUNDS):
        best = torch.zeros(g, 1, dtype=u.dtype, device=u.device)
        left, choices, places = torch.zeros_like(counts), [], []
        for j in range(1, k + 1):
            right = counts if j == k else torch.minimum((bounds[:, j - 1 : j] + offsets).clamp(min=j), counts)
            mass = (right[:, None] - left[..., None]).to(u.dtype)
            total, squares = (m.gather(1, right)[:, None] - m.gather(1, left)[..., None] for m in moments)
            cost = squares - total.square() / mass
            cost = torch.where(mass > 0, cost, math.inf) + best[..., None]
            best, choice = cost.min(1)
            choices.append(choice)
            places.append(right)
            left = right
        at, found = torch.zeros_like(counts), []
        for choice, right in zip(reversed(choices[1:]), reversed(places[:-1]), strict=True):
            at = choice.gather(1, at)
            found.append(right.gather(1, at))
        moved = torch.cat(found[::-1], 1)
        if torch.equal(moved, bounds):
            break
        bounds = moved
    return bounds


# --- any d ---------------------------------------------------------------------------------------


def _refill(V: Tensor, C: Tensor, error: Tensor, empty: Tensor) -> Tensor:
    """C `(g, k, d)`, with the empty ones `(g, k)` at the vectors that are farthest from theirs: `error` `(g, n)`."""
    if not bool(empty.any()):
        return C
    most = min(int(empty.sum(1).amax()), V.shape[1])
    worst = error.topk(most, dim=1).indices
    rank = (empty.long().cumsum(1) - 1).clamp(min=0) % most
    return torch.where(empty[..., None], _take(V, worst.gather(1, rank)), C)


def _kmeans(V: Tensor, counted: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """`(g, n, d)`, of which some count -> `(g, k, d)`: k-means++ and Lloyd's algorithm."""
    center = (V * counted[..., None]).sum(1, keepdim=True) / counted.sum(1)[:, None, None]  # or squares would cancel
    V = torch.where(counted[..., None], V - center, 0.0)
    C = _plus_plus(V, counted, k, generator)
    integers, unit = _integers(V)
    for _ in range(15 if k <= 1024 else 5):
        codes, error = nearest_of_group(V, C)
        cells = (codes + k * torch.arange(len(C), device=V.device)[:, None])[counted]
        count = torch.bincount(cells, minlength=len(C) * k).view(len(C), k, 1)
        sums = torch.zeros(len(C) * k, V.shape[2], dtype=torch.int64, device=V.device)
        sums = sums.index_add_(0, cells, integers[counted]).view_as(C)
        moved = torch.where(count > 0, (sums * unit / count.clamp(min=1)).to(C.dtype), C)
        moved = _refill(V, moved, error.masked_fill(~counted, -1.0), count[..., 0] == 0)
        if bool(((moved - C).abs().amax((1, 2)) <= 1e-5 * V.abs().amax((1, 2))).all()):
            break
        C = moved
    return moved + center


def nearest_of_group(V: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """`(g, n, d), (g, k, d)` -> the index of each vector's nearest centroid, and the squared distance: `(g, n)`."""
    codes = assign_groups(V, C)
    return codes, (V - _take(C, codes)).square().sum(2)


def _plus_plus(V: Tensor, counted: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """k-means++ in every group: the next centroid is a vector drawn with probability proportional to its squared
    distance from the nearest centroid so far."""
    draws = torch.rand(k, len(V), 1, generator=generator, dtype=torch.float64).to(V.device)
    C, distance = [], counted.to(V.dtype)
    for draw in draws:
        cumulative = _integers(distance)[0].cumsum(1)
        # The first whose sum is larger: it has a distance.  Where none has, the first vector, which always counts.
        threshold = (draw * cumulative[:, -1:]).long()
        chosen = torch.searchsorted(cumulative, threshold, right=True)
        C.append(_take(V, torch.where(chosen < V.shape[1], chosen, 0)))
        away = (V - C[-1]).square().sum(2).masked_fill(~counted, 0.0)
        distance = away if len(C) == 1 else torch.minimum(distance, away)
    return torch.cat(C, 1)
