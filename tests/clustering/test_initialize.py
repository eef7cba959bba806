"""Where centroids start."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kmeans_cases import CASES, cost, draw, error, optimal_costs, plain_kmeans

import dkm
from dkm.clustering import initialize


def quantiles_and_lloyd(values: np.ndarray, k: int) -> np.ndarray:
    C = np.quantile(values, (np.arange(k) + 0.5) / k)
    for _ in range(100):
        codes = np.searchsorted((C[1:] + C[:-1]) / 2, values)
        count = np.bincount(codes, minlength=k)
        C = np.where(count > 0, np.bincount(codes, values, k) / np.maximum(count, 1), C)
    return C


def vectors(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32))


def kmeans_1d(values: np.ndarray, k: int, **options) -> np.ndarray:
    return dkm.init_centroids(torch.from_numpy(values)[:, None], k, **options)[:, 0].numpy()


# --- d = 1 ---------------------------------------------------------------------------------------


@cache
def optima(case: str) -> tuple[np.ndarray, list[float]]:
    values = draw(case, 1100)  # more than the bins of the histogram
    return values, optimal_costs(values, 64)


@pytest.mark.parametrize("case", CASES)
def test_within_a_percent_of_the_optimum(case):
    values, best = optima(case)
    for k in (1, 2, 3, 4, 8, 16, 32, 64):
        found = cost(values, kmeans_1d(values, k))
        limit = 1.15 if case == "exponents" else 1.01  # 25 octaves, evenly: no network has such weights
        assert found <= limit * best[k - 1] + 1e-12 * best[0], f"k = {k}: {found} and the best is {best[k - 1]}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("k", [4, 16, 256])
def test_never_worse_than_quantiles_and_lloyd(case, k):
    values = draw(case, 6_000)
    mine, plain = (cost(values, C) for C in (kmeans_1d(values, k), quantiles_and_lloyd(values, k)))
    assert mine <= plain * (1 + 1e-4) + 1e-12 * np.var(values) * len(values)


numbers = st.floats(-1e4, 1e4, width=32)


@settings(max_examples=100)
@given(st.lists(numbers, min_size=1, max_size=60).map(np.array), st.integers(1, 64))
def test_within_a_percent_on_anything(values, k):
    C = kmeans_1d(values, k)
    assert C.shape == (k,)
    assert np.isfinite(C).all()
    best = optimal_costs(values, k)
    assert cost(values, C) <= 1.01 * best[-1] + 1e-12 * (best[0] + np.square(values).sum())


@pytest.mark.parametrize("k", [50, 51, 64, 4096])
def test_as_many_centroids_as_distinct_values(k):
    values = draw("few distinct", 3000)
    assert len(np.unique(values)) == 50
    assert cost(values, kmeans_1d(values, k)) == 0


def test_centroids_are_within_the_values():
    values = draw("heavy tails", 20_000)
    C = kmeans_1d(values, 256)
    assert values.min() <= C.min()
    assert C.max() <= values.max()


def test_many_weights_are_sampled_and_the_extremes_are_not_lost(monkeypatch):
    monkeypatch.setattr(initialize, "SAMPLE", 1 << 11)
    values = np.append(draw("normal", 100_000), 1e3)
    C = kmeans_1d(values, 16)
    assert C.max() == 1e3
    assert cost(values, C) <= 1.02 * cost(values[:-1], quantiles_and_lloyd(values[:-1], 15))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_does_not_matter(threads):
    W = vectors(300_000, 1)
    before = torch.get_num_threads()
    expected = dkm.init_centroids(W, 64)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(dkm.init_centroids(W, 64), expected)
    finally:
        torch.set_num_threads(before)


# --- any d ---------------------------------------------------------------------------------------

ODD = {
    "all equal": torch.full((100, 1), 0.3),
    "zeros": torch.zeros(100, 1),
    "one": torch.tensor([[0.3]]),
    "fewer than k": torch.tensor([[0.3], [-1.0], [2.0]]),
    "tiny": torch.randn(100, 1) * 1e-30,
    "huge": torch.randn(100, 1) * 1e4,
    "denormal": torch.randn(100, 1) * 1e-42,
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("d", [1, 2, 8])
@pytest.mark.parametrize("k", [1, 2, 16, 256])
@pytest.mark.parametrize("init", ["kmeans", "random"])
def test_odd_weights_give_finite_centroids(case, d, k, init):
    W = ODD[case].expand(-1, d)
    C = dkm.init_centroids(W, k, init=init)
    assert C.shape == (k, d)
    assert C.isfinite().all()


@pytest.mark.parametrize("case", ["all equal", "zeros", "one", "fewer than k"])
@pytest.mark.parametrize("d", [1, 2, 8])
def test_no_error_with_enough_centroids(case, d):
    W = ODD[case].expand(-1, d)
    assert error(W, dkm.init_centroids(W, 16)) == 0


@pytest.mark.parametrize("d", [2, 4, 8])
@pytest.mark.parametrize("k", [16, 64])
def test_better_than_random_vectors(d, k):
    W = vectors(5000, d)
    random = min(error(W, dkm.init_centroids(W, k, init="random", seed=seed)) for seed in range(3))
    assert error(W, dkm.init_centroids(W, k)) < 0.9 * random


@pytest.mark.parametrize("n", [500, 4000, 8000])  # Lloyd's algorithm on all, on quarters and on eighths of the vectors
@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_as_good_as_plain_kmeans(n, tails, monkeypatch):
    monkeypatch.setattr(initialize, "FEW", 1000)
    rng, k = np.random.default_rng(0), 24
    values = rng.normal(size=(n, 4)) if tails == "normal" else rng.standard_t(3, size=(n, 4))
    W = torch.from_numpy(values).float()
    mine = np.mean([error(W, dkm.init_centroids(W, k, seed=seed)) for seed in range(8)])
    plain = np.mean([error(W, plain_kmeans(W, k, seed)) for seed in range(8)])
    assert mine <= 1.03 * plain  # the seeds of one method differ by as much


@pytest.mark.parametrize("few", [0, 100])  # several draws at a time, and one after the other
def test_plus_plus_draws_in_proportion_to_the_squared_distance(few, monkeypatch):
    """Three places with 1, 2 and 4 vectors, at known distances: how often each pair of places comes out first."""
    monkeypatch.setattr(initialize, "FEW", few)
    places = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0]])
    counts = torch.tensor([1.0, 2.0, 4.0])
    V = places.repeat_interleave(counts.long(), dim=0)
    weight = torch.cdist(places, places).square() * counts
    expected = (counts / counts.sum())[:, None] * weight / weight.sum(1, keepdim=True)  # first, second
    runs, found = 4000, torch.zeros(3, 3)
    for seed in range(runs):
        C = initialize.plus_plus(V, 3, torch.Generator().manual_seed(seed))
        first, second, third = (int((places == c).all(1).nonzero()) for c in C)
        found[first, second] += 1
        assert {first, second, third} == {0, 1, 2}  # what is chosen has no distance left
    spread = (expected * (1 - expected) / runs).sqrt()
    assert ((found / runs - expected).abs() <= 5 * spread).all()


@pytest.mark.parametrize("d", [2, 4, 8])
def test_finds_clusters_that_are_there(d):
    centers = vectors(16, d, seed=1) * 10
    W = centers[torch.arange(1600) % 16] + 0.01 * vectors(1600, d)
    assert error(W, dkm.init_centroids(W, 16)) < 0.01


@pytest.mark.parametrize("d", [1, 2, 4, 8])
@pytest.mark.parametrize("init", ["kmeans", "random"])
@pytest.mark.parametrize("sample", [16, 1 << 16])  # fewer than there are, and all
def test_equal_seeds_give_equal_centroids(d, init, sample, monkeypatch):
    monkeypatch.setattr(initialize, "SAMPLE", sample)
    W = vectors(500, d)
    torch.manual_seed(1)
    first = dkm.init_centroids(W, 16, init=init, seed=3)
    torch.manual_seed(2)
    assert torch.equal(dkm.init_centroids(W.clone(), 16, init=init, seed=3), first)


@pytest.mark.parametrize("init", ["kmeans", "random"])
def test_other_seeds_give_other_centroids(init):
    W = vectors(5000, 4)
    first, second = (dkm.init_centroids(W, 16, init=init, seed=seed) for seed in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("init", ["kmeans", "random"])
def test_the_global_generator_is_left_alone(init):
    before = torch.get_rng_state()
    dkm.init_centroids(vectors(500, 2), 16, init=init)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_weights_are_left_alone():
    W = vectors(500, 2)
    before = W.clone()
    dkm.init_centroids(W, 16)
    assert torch.equal(W, before)


@pytest.mark.parametrize("d", [1, 2, 8])
@pytest.mark.parametrize("n", [10, 16, 100])
def test_random_picks_rows(n, d):
    W = vectors(n, d)
    C = dkm.init_centroids(W, 16, init="random")
    rows = (C[:, None] == W[None]).all(-1)
    assert rows.any(1).all()
    assert (rows.any(0).sum()) == min(n, 16)  # without replacement, while there are enough


def test_unknown_init():
    with pytest.raises(ValueError, match=r"init must be .* got 'linear'"):
        dkm.init_centroids(vectors(10, 1), 2, init="linear")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("d", [1, 4])
@pytest.mark.parametrize("init", ["kmeans", "random"])
def test_dtype_is_at_least_float32(dtype, d, init):
    C = dkm.init_centroids(vectors(300, d).to(dtype), 16, init=init)
    assert C.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert C.isfinite().all()


@pytest.mark.parametrize("d", [1, 4])
def test_16_bit_weights_are_clustered_as_the_same_values_in_32(d):
    W = vectors(300, d).to(torch.bfloat16)
    assert torch.equal(dkm.init_centroids(W, 16), dkm.init_centroids(W.float(), 16))


@pytest.mark.parametrize("d", [1, 4])
def test_no_graph(d):
    assert not dkm.init_centroids(vectors(300, d).requires_grad_(), 16).requires_grad
