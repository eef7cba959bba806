"""k-means of many sets of vectors at a time: of groups of weights, and of the weights of a model on a GPU.

The sets are `(g, n, d)`, and a mask `(g, n)` says which vectors count.  Everything runs on their device.  Where the
order of additions could change a sum, integers are added, so that a device gives the same centroids again and all ranks
agree.  A CPU and a GPU may differ in the last bits.
"""

import math

import torch
from torch import Tensor

from .assign import assign_groups
from .bounds import best_bounds

BLOCK = 1 << 22  # so many distances are in memory together
WINDOW = 12  # how many values the bound between two clusters may move to either side per round, for d = 1
ROUNDS = 6
STEPS = 300  # of Lloyd's algorithm for d = 1, at most, and so many between two looks at whether anything moves:
LOOK = 20


def repeated(counts: Tensor, k: int) -> Tensor:
    """`(g,) -> (g, k)`: the numbers from 0 to each count, again and again."""
    return torch.arange(k, device=counts.device) % counts[:, None]


def take(V: Tensor, indices: Tensor) -> Tensor:
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


def kmeans_1d(values: Tensor, counted: Tensor, k: int, *, histogram: bool = False) -> Tensor:
    """`(g, n)` float64, of which some count -> `(g, k)` sorted centroids.

    histogram: for many values, the bounds between clusters are sought on a histogram.
    """
    counts = counted.sum(1, keepdim=True)
    x = values.masked_fill(~counted, math.inf).sort(1).values
    low, high = x[:, :1], x.gather(1, counts - 1)
    valid = torch.arange(x.shape[1], device=x.device) < counts
    x = torch.where(valid, x, high)
    width = torch.where(high > low, high - low, 1.0)
    new = torch.cat([torch.ones_like(valid[:, :1]), x[:, 1:] > x[:, :-1]], 1) & valid
    # Where there are no more than k distinct values, these are the centroids.
    distinct = new.sum(1)
    few, many = (distinct <= k).nonzero()[:, 0], (distinct > k).nonzero()[:, 0]
    C = x.new_empty(len(x), k)
    exact = x.masked_fill(~new, math.inf)[few].sort(1).values.gather(1, repeated(distinct[few], k))
    C[few] = exact.sort(1).values
    if len(many):
        u = ((x - low) / width)[many]
        spread = _spread(u, valid[many], counts[many], k, new[many] if histogram else None)
        C[many] = low[many] + width[many] * spread
    return torch.minimum(torch.maximum(C, low), high)


def _spread(u: Tensor, valid: Tensor, counts: Tensor, k: int, new: Tensor | None) -> Tensor:
    """`(g, n)` sorted values from 0 to 1, of which the first so many are valid -> `(g, k)` sorted centroids.

    new: which values differ from the one before, for a histogram.

    The start is in proportion to the cube root of the density, as `initialize._kmeans_1d` explains: a gap between two
    values has a share in proportion to its power of 2/3, but never more than that of one centroid.
    """
    share = u.diff(dim=1).pow(2 / 3)
    for _ in range(3):
        share = torch.minimum(share, share.sum(1, keepdim=True) / k)
    position = torch.nn.functional.pad(_integers(share)[0].cumsum(1), (1, 0)) if u.shape[1] > 1 else u.long()
    places = torch.arange(2 * k + 1, device=u.device) * (position[:, -1:].double() / (2 * k))
    at = torch.searchsorted(position, places.long()).clamp(max=u.shape[1] - 1)
    C, bounds = u.gather(1, at[:, 1::2]), at[:, 2:-1:2].contiguous()
    integers, unit = _integers(u)
    sums = torch.nn.functional.pad((integers * valid).cumsum(1), (1, 0))
    if k > 1 and new is not None:
        mass = torch.minimum(torch.arange(u.shape[1] + 1, device=u.device), counts).double()
        bounds = best_bounds(torch.stack([mass, *_moments(u, valid)]), position, new, bounds)
    elif k > 1:
        bounds = _near_bounds(u, valid, counts, bounds)

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


def _moments(u: Tensor, valid: Tensor) -> list[Tensor]:
    """The prefix sums of the valid values and of their squares, both centred, or squares would cancel more."""
    sums = []
    for power in (1, 2):
        integers, unit = _integers((u - 0.5).pow(power) * valid)
        sums.append(torch.nn.functional.pad(integers.cumsum(1), (1, 0)) * unit)
    return sums


def _near_bounds(u: Tensor, valid: Tensor, counts: Tensor, bounds: Tensor) -> Tensor:
    """`(g, n)` sorted values and the `(g, k - 1)` bounds between their clusters -> better bounds.

    Dynamic programming in which each bound stays within a window around its present place, repeated from the bounds
    that it found.
    """
    g, k = len(u), bounds.shape[1] + 1
    moments = _moments(u, valid)
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
    return torch.where(empty[..., None], take(V, worst.gather(1, rank)), C)


def kmeans(V: Tensor, counted: Tensor, k: int, draws: Tensor, steps: int) -> Tensor:
    """`(g, n, d)`, of which some count -> `(g, k, d)`: k-means++, for which `draws` `(k, g)` are random numbers, and at
    most so many steps of Lloyd's algorithm."""
    center = (V * counted[..., None]).sum(1, keepdim=True) / counted.sum(1)[:, None, None]  # or squares would cancel
    V = torch.where(counted[..., None], V - center, 0.0)
    C = _plus_plus(V, counted, draws.to(V.device))
    integers, unit = _integers(V)
    for _ in range(steps):
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
    return codes, (V - take(C, codes)).square().sum(2)


def _plus_plus(V: Tensor, counted: Tensor, draws: Tensor) -> Tensor:
    """k-means++ in every group: the next centroid is a vector drawn with probability proportional to its squared
    distance from the nearest centroid so far."""
    C, distance = [], counted.to(V.dtype)
    for draw in draws[..., None]:
        cumulative = _integers(distance)[0].cumsum(1)
        # The first whose sum is larger: it has a distance.  Where none has, the first vector, which always counts.
        threshold = (draw * cumulative[:, -1:]).long()
        chosen = torch.searchsorted(cumulative, threshold, right=True)
        C.append(take(V, torch.where(chosen < V.shape[1], chosen, 0)))
        away = (V - C[-1]).square().sum(2).masked_fill(~counted, 0.0)
        distance = away if len(C) == 1 else torch.minimum(distance, away)
    return torch.cat(C, 1)
