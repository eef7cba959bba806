"""Values and vectors for k-means, and what is the best that it can find."""

import numpy as np
import torch


def draw(case: str, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return {
        "normal": lambda: 0.05 * rng.normal(size=n),
        "off centre": lambda: 1000 + 0.05 * rng.normal(size=n),
        "laplace": lambda: rng.laplace(size=n),
        "uniform": lambda: rng.uniform(-1, 1, n),
        "bimodal": lambda: rng.normal(size=n) * 0.1 + rng.choice([-3, 1], n),
        "heavy tails": lambda: rng.standard_t(1.5, n),
        "one outlier": lambda: np.append(rng.normal(size=n - 1), 1e4),
        "mostly zero": lambda: rng.normal(size=n) * (rng.random(n) < 0.2),
        "few distinct": lambda: rng.normal(size=50)[rng.integers(0, 50, n)],
        "duplicates": lambda: np.round(rng.normal(size=n), 1),
        "exponents": lambda: rng.choice([-1, 1], n) * np.exp2(rng.uniform(-20, 5, n)),
    }[case]()


CASES = (
    "normal",
    "off centre",
    "laplace",
    "uniform",
    "bimodal",
    "heavy tails",
    "one outlier",
    "mostly zero",
    "few distinct",
    "duplicates",
    "exponents",
)


def cost(values: np.ndarray, centroids: np.ndarray) -> float:
    """The squared error of the values `(n,)`, each replaced by the nearest of the centroids `(k,)`."""
    levels = np.sort(centroids.astype(np.float64))
    nearest = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, values)]
    return float(np.square(values - nearest).sum())


def optimal_costs(values: np.ndarray, k: int) -> list[float]:
    """The least squared error with 1, 2, ... k centroids: dynamic programming, O(k n^2)."""
    x, counts = np.unique(values, return_counts=True)
    x = x - x.mean()
    mass, total, squares = (np.concatenate([[0], np.cumsum(counts * x**p)]) for p in range(3))
    n = len(x)
    # interval[i, j]: the error of x[i..j] around its mean
    m, t, s = (a[None, 1:] - a[:-1, None] for a in (mass, total, squares))
    interval = np.where(np.triu(np.ones((n, n), bool)), s - t * t / np.where(m > 0, m, 1), np.inf).clip(0)
    best, scratch = [interval[0]], np.empty_like(interval)
    for _ in range(k - 1):  # best[k][j] = min over i of best[k - 1][i - 1] + interval[i, j]
        np.add(interval, np.concatenate([[np.inf], best[-1][:-1]])[:, None], out=scratch)
        best.append(np.minimum(scratch.min(0), best[-1]))
    return [float(row[-1]) for row in best]


def error(W: torch.Tensor, C: torch.Tensor) -> float:
    """The mean squared distance to the nearest centroid; exactly 0 where every vector is a centroid."""
    return float((W.double()[:, None] - C.double()).square().sum(-1).amin(1).mean())


def plain_kmeans(W: torch.Tensor, k: int, seed: int) -> torch.Tensor:
    """k-means++ and 15 steps of Lloyd's algorithm, every one over all vectors."""
    rng, V = np.random.default_rng(seed), W.double()
    C = V[rng.integers(len(V))][None]
    for _ in range(k - 1):
        distance = torch.cdist(V, C).square().amin(1).numpy()
        C = torch.cat([C, V[rng.choice(len(V), p=distance / distance.sum())][None]])
    for _ in range(15):
        codes = torch.cdist(V, C).argmin(1)
        count = torch.bincount(codes, minlength=k)[:, None]
        C = torch.where(count > 0, torch.zeros_like(C).index_add_(0, codes, V) / count, C)
    return C
