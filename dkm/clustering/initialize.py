"""Where centroids start: k-means of the weights themselves, or the paper's random choice.

Everything in this file is computed on the CPU in a fixed order, so that equal weights give equal centroids on every
rank.  k-means of weights that are on a GPU is in `initialize_many.py`.
"""

import numpy as np
import torch
from torch import Tensor

from .assign import assign
from .initialize_many import by_batches, kmeans_of_weights
from .options import INITS
from .vectors import compute_dtype

BINS = 1024  # of the histogram for d = 1, and at least 16 per centroid
WINDOW = 48  # how many bins the bound between two clusters may move per round, and at least 4 times a cluster's width
SAMPLE = 1 << 16  # for d > 1 at most so many vectors are looked at; for d = 1 at most 16 times as many values
FEW = 1 << 14  # vectors, for d > 1: with fewer, every step goes over all of them, and is short


def init_centroids(W: Tensor, k: int, *, init: str = "kmeans", seed: int = 0) -> Tensor:
    """`(n, d) -> (k, d)` centroids to start from, in at least float32, on W's device.

    init: "kmeans" is k-means: optimal on a histogram and then polished for d = 1, k-means++ and Lloyd
    steps for d > 1.  "random" is the paper's k randomly selected vectors.

    Deterministic: the same W, k and seed give the same centroids on one kind of device.  Two kinds draw and round
    differently: their centroids are equally good, and not the same.  Where W has fewer than k distinct vectors, some
    centroids are equal.
    """
    if init not in INITS:
        raise ValueError(f'init must be "kmeans" or "random", got {init!r}')
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be an integer of at least 1, got {k!r}")
    if W.ndim != 2 or W.numel() == 0:
        raise ValueError(f"W must be (n, d) with at least one weight, got shape {tuple(W.shape)}")
    if not W.is_floating_point():
        raise TypeError(f"W must be a floating-point tensor, got {W.dtype}")
    if not bool(W.detach().isfinite().all()):
        raise ValueError("W holds NaN or infinite values: there are no centroids of those")
    if init == "kmeans" and by_batches(W.device):
        return kmeans_of_weights([W.detach()], k, seed)[0]
    find = {"kmeans": kmeans, "random": random}[init]
    return find(W.detach(), k, seed).to(device=W.device, dtype=compute_dtype(W.dtype))


def random(W: Tensor, k: int, seed: int) -> Tensor:
    """k vectors of W, all different ones if W has as many."""
    generator = torch.Generator().manual_seed(seed)
    if len(W) >= k:
        return W[_choose(len(W), k, generator).to(W.device)]
    return W[torch.arange(k, device=W.device) % len(W)]


def kmeans(W: Tensor, k: int, seed: int) -> Tensor:
    """The centroids of k-means, `(n, d) -> (k, d)`, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    if W.shape[1] == 1:
        return torch.from_numpy(_kmeans_1d(sorted_values(W[:, 0], generator), k))[:, None]
    if len(W) >= FEW:  # in random order, which `_lloyd` relies on
        W = W[_choose(len(W), max(SAMPLE, 16 * k), generator).to(W.device)]
    V = W.to(device="cpu", dtype=compute_dtype(W.dtype))
    return _lloyd(V, plus_plus(V[:SAMPLE], k, generator))


def _choose(n: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` of `n` indices in random order, without repeats; all of them where count >= n."""
    if n <= 1 << 24:
        return torch.randperm(n, generator=generator)[:count]
    # A permutation of billions of indices takes more memory than the weights.  Draws with repetition, of which the
    # repeated ones are removed, need none; collisions among few draws are rare.
    drawn = torch.randint(n, (count + count // 8 + 8,), generator=generator)
    return drawn[np.sort(np.unique(drawn.numpy(), return_index=True)[1])][:count]


# --- d = 1 ---------------------------------------------------------------------------------------


def sorted_values(w: Tensor, generator: torch.Generator) -> np.ndarray:
    """All values in ascending order.  Of very many values a sample is taken, large enough that no centroid would move
    visibly, and the two extremes."""
    if len(w) > 16 * SAMPLE:
        chosen = w[_choose(len(w), 16 * SAMPLE, generator).to(w.device)]
        w = torch.cat([chosen, torch.stack(w.aminmax())])
    return np.sort(w.cpu().double().numpy())


def _kmeans_1d(values: np.ndarray, k: int) -> np.ndarray:
    """`(n,)` sorted values -> `(k,)` sorted centroids of least squared error.

    Dynamic programming finds the best intervals of a histogram; Lloyd steps on the values themselves do the rest.
    """
    x, counts = np.unique(values, return_counts=True)
    if len(x) <= k:
        return np.sort(np.resize(x, k))
    # Where values are dense the best centroids are dense too, in proportion to the cube root of the density.  So a
    # gap g between neighbouring values deserves a share of the bins in proportion to g^(2/3), but never more than the
    # share of one centroid.
    share = np.cbrt(np.diff(x)) ** 2
    for _ in range(3):
        share = np.minimum(share, share.sum() / k)
    position = np.concatenate([[0.0], np.cumsum(share)]) / share.sum()
    bins = max(BINS, 16 * k)
    first = np.arange(len(x))
    if len(x) > bins:
        first = np.unique(np.searchsorted(position, np.linspace(0, 1, bins, endpoint=False)))
    center = values.mean()  # squares of uncentred values would cancel
    moments = [np.add.reduceat(counts * (x - center) ** p, first) for p in range(3)]
    sums = np.stack([np.concatenate([[0.0], np.cumsum(moment)]) for moment in moments])
    bounds = np.searchsorted(position[first], np.linspace(0, 1, k + 1))
    bounds[-1] = len(first)
    bounds = _best_bounds(sums, bounds)
    mass, total = np.diff(sums[0, bounds]), np.diff(sums[1, bounds])
    return lloyd_1d(values, total / mass + center)


def _best_bounds(sums: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """`(3, bins + 1)` prefix sums of counts, values and squares -> `(k + 1,)` bounds of the best k intervals.

    Dynamic programming in which bound j stays within a window around its present place.  It is repeated from the
    bounds that it found until nothing moves.  A round takes O(k window^2); unrestricted it would take O(k bins^2).
    """
    k, bins = len(bounds) - 1, sums.shape[1] - 1
    window = max(WINDOW, 4 * bins // k)
    for _ in range(max(3, 1 << 13 >> k.bit_length())):
        # Every interval holds at least one bin: bound j lies between j and bins - k + j, in order.
        center = np.clip(bounds, np.arange(k + 1), bins - k + np.arange(k + 1))
        lowest = np.maximum(center - window, np.arange(k + 1))
        highest = np.minimum(center + window, bins - k + np.arange(k + 1))
        lowest[[0, -1]] = highest[[0, -1]] = 0, bins
        best, choices = np.zeros(1), []
        for j in range(1, k + 1):
            left = sums[:, lowest[j - 1] : highest[j - 1] + 1, None]
            mass, total, squares = sums[:, None, lowest[j] : highest[j] + 1] - left
            empty = mass <= 0
            mass[empty] = 1
            cost = squares - total * total / mass
            cost[empty] = np.inf
            cost += best[:, None]
            choices.append(cost.argmin(0))
            best = cost[choices[-1], np.arange(cost.shape[1])]
        backwards, at = [bins], 0
        for j in range(k, 0, -1):
            at = choices[j - 1][at]
            backwards.append(lowest[j - 1] + at)
        moved = np.array(backwards[::-1])
        if np.array_equal(moved, bounds):
            break
        bounds = moved
    return bounds


def lloyd_1d(values: np.ndarray, C: np.ndarray, steps: int = 300) -> np.ndarray:
    """Lloyd's algorithm on sorted values, `(n,), (k,) -> (k,)`.  Prefix sums make a step cost O(k log n)."""
    center = values.mean()
    sums = np.concatenate([[0.0], np.cumsum(values - center)])
    for _ in range(steps):
        bounds = np.concatenate([[0], np.searchsorted(values, (C[1:] + C[:-1]) / 2), [len(values)]])
        count = np.diff(bounds)
        moved = np.where(count > 0, np.diff(sums[bounds]) / np.maximum(count, 1) + center, C)
        if np.abs(moved - C).max() <= 1e-7 * (values[-1] - values[0]):
            return moved
        C = moved
    return C


# --- d > 1 ---------------------------------------------------------------------------------------


def plus_plus(V: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """k-means++: the next centroid is a vector drawn with probability proportional to its squared distance from the
    nearest centroid so far.

    Of many vectors several are drawn at a time, from the distances before them.  One is taken with the probability to
    which its distance has shrunk meanwhile; so it is a draw from the distances of its own moment.
    """
    columns = (V - V.mean(0)).t().contiguous()  # centred, or the squares would cancel more
    squares = columns.square().sum(0)
    distance = squares.new_full((len(V),), torch.inf)
    away, chosen = torch.empty_like(distance), []

    def take(i: int) -> None:
        chosen.append(i)
        torch.addmv(squares, columns.t(), columns[:, i], alpha=-2, out=away).add_(squares[i])
        torch.minimum(distance, away, out=distance)

    several = 16 if len(V) >= FEW else 1
    take(int(torch.randint(len(V), (), generator=generator)))
    while len(chosen) < k:
        cumulative = distance.clamp_(min=0).cumsum(0, dtype=torch.float64)
        draws = torch.rand(several, generator=generator, dtype=torch.float64)
        drawn = torch.searchsorted(cumulative, draws * cumulative[-1]).clamp(max=len(V) - 1)
        limits = distance[drawn]
        limits[0] = 0  # the first one is taken
        limits[1:] *= torch.rand(several - 1, generator=generator, dtype=torch.float64)
        for i, limit in zip(drawn.tolist(), limits.tolist(), strict=True):
            if len(chosen) < k and float(distance[i]) >= limit:
                take(i)
    return V[chosen]


def _lloyd(V: Tensor, C: Tensor) -> Tensor:
    """Lloyd's algorithm, `(n, d), (k, d) -> (k, d)`, for vectors in random order.

    Most of the way goes over one part of the vectors after the other, which takes a fraction of the time and ends at no
    larger error.  The parts have enough vectors per centroid that their means are not mostly noise.
    """
    k = len(C)
    parts = 1 if len(V) < max(FEW, 32 * k) else 4 if len(V) < 256 * k else 8
    for part in V.tensor_split(parts) * (16 // parts if parts > 1 else 0):
        sums, count, _ = _cells(part, C)
        C = torch.where(count > 0, sums / count, C)
    for _ in range(3 if parts > 1 else 15 if k <= 1024 else 5):
        sums, count, codes = _cells(V, C)
        moved, empty = sums / count.clamp(min=1), count[:, 0] == 0
        if bool(empty.any()):  # an empty cluster starts again at one of the vectors that are farthest from theirs
            error = (V - C[codes]).square_().sum(1)
            worst = error.topk(min(int(empty.sum()), len(V))).indices
            moved[empty] = V[worst].repeat(-(-int(empty.sum()) // len(worst)), 1)[: int(empty.sum())]
        if bool((moved - C).abs().amax() <= 1e-5 * V.abs().amax()):
            return moved
        C = moved
    return C


def _cells(V: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The vectors of each centroid: their sums `(k, d)`, their numbers `(k, 1)`, and each one's centroid `(n,)`."""
    codes = assign(V, C)
    count = torch.bincount(codes, minlength=len(C)).to(V.dtype)[:, None]
    return torch.zeros_like(C).index_add_(0, codes, V), count, codes
