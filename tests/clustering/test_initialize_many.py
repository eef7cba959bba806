"""Where the centroids of weights on a GPU start.  The same operations run on the CPU here."""

from functools import cache

import numpy as np
import pytest
import torch
from kmeans_cases import CASES, cost, draw, error, optimal_costs, plain_kmeans
from torch.utils._python_dispatch import TorchDispatchMode

import dkm
from dkm.clustering import initialize, initialize_many
from dkm.clustering.initialize_many import kmeans_of_weights, sample


def one(W: torch.Tensor, k: int, seed: int = 0) -> torch.Tensor:
    return kmeans_of_weights([W], k, seed)[0]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@cache
def optima(case: str) -> tuple[np.ndarray, list[float]]:
    values = draw(case, 1100)  # more than the bins of a histogram for few centroids
    return values, optimal_costs(values, 64)


@pytest.mark.parametrize("case", CASES)
def test_within_a_percent_of_the_optimum(case: str):
    values, best = optima(case)
    for k in (1, 2, 3, 4, 8, 16, 64):
        found = cost(values, one(torch.from_numpy(values)[:, None], k)[:, 0].numpy())
        limit = 1.15 if case == "exponents" else 1.01  # as on a CPU, see test_initialize.py
        assert found <= limit * best[k - 1] + 1e-12 * best[0], f"k = {k}: {found} and the best is {best[k - 1]}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("k", [4, 16, 128])
def test_single_weights_are_clustered_as_well_as_on_a_cpu(case: str, k: int):
    values = draw(case, 6000)
    W = torch.from_numpy(values)[:, None]
    mine, cpu = (cost(values, C[:, 0].numpy()) for C in (one(W, k), dkm.init_centroids(W, k)))
    assert mine <= 1.002 * cpu + 1e-12 * np.var(values) * len(values)


@pytest.mark.parametrize("n", [500, 8000])
@pytest.mark.parametrize("tails", ["normal", "heavy"])
@pytest.mark.parametrize(("k", "d"), [(24, 4), (16, 2)])
def test_vectors_are_clustered_as_well_as_by_plain_kmeans(n: int, tails: str, k: int, d: int):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(n, d)) if tails == "normal" else rng.standard_t(3, size=(n, d))
    W = torch.from_numpy(values).float()
    mine = np.mean([error(W, one(W, k, seed)) for seed in range(8)])
    plain = np.mean([error(W, plain_kmeans(W, k, seed)) for seed in range(8)])
    assert mine <= 1.03 * plain  # the seeds of one method differ by as much


@pytest.mark.parametrize("d", [1, 3])
def test_weights_of_different_sizes_together(d: int):
    """Batched or alone, a weight has the same centroids, but for rounding: what fills a batch up has no influence."""
    weights = [3 + normal(n, d, seed=n) for n in (700, 20, 1, 300, 999)]
    for C, W in zip(kmeans_of_weights(weights, 8, 1), weights, strict=True):
        alone = one(W, 8, 1)
        torch.testing.assert_close(error(W, C), error(W, alone), rtol=1e-3, atol=1e-9)
        assert (W.amin(0) - 1e-5 <= C).all()
        assert (W.amax(0) + 1e-5 >= C).all()


def test_batches_hold_what_they_may(monkeypatch):
    sizes = [5, 100, 30, 31, 7, 2]
    batches = initialize_many._batches(sizes, 64)
    assert sorted(i for batch in batches for i in batch) == list(range(6))
    assert all(len(batch) == 1 or len(batch) * max(sizes[i] for i in batch) <= 64 for batch in batches)
    assert len(batches) == 3
    weights = [normal(n, 2, seed=n) for n in sizes]
    together = kmeans_of_weights(weights, 2, 0)
    monkeypatch.setattr(initialize_many, "CHUNK", 1)  # every weight by itself
    for W, a, b in zip(weights, together, kmeans_of_weights(weights, 2, 0), strict=True):
        torch.testing.assert_close(error(W, a), error(W, b), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("k", [50, 51, 64, 4096])
def test_as_many_centroids_as_distinct_values(k: int):
    values = draw("few distinct", 3000)
    assert cost(values, one(torch.from_numpy(values)[:, None], k)[:, 0].numpy()) == 0


@pytest.mark.parametrize("d", [1, 2, 8])
@pytest.mark.parametrize("k", [1, 2, 16, 256])
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1.0, 1e4])
@pytest.mark.parametrize("n", [1, 3, 100])
def test_odd_weights_give_finite_centroids(d: int, k: int, scale: float, n: int):
    W = scale * normal(n, 1).expand(-1, d)
    C = one(W, k)
    assert C.shape == (k, d)
    assert C.isfinite().all()
    if n <= k:
        torch.testing.assert_close(error(W, C), 0.0, rtol=0, atol=1e-12 * scale**2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("d", [1, 4])
def test_dtype_is_at_least_float32(dtype: torch.dtype, d: int):
    C = one(normal(300, d).to(dtype).requires_grad_(), 16)
    assert C.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not C.requires_grad


@pytest.mark.parametrize("d", [1, 4])
@pytest.mark.parametrize("most", [64, 1 << 16])  # fewer than there are, and all
def test_equal_seeds_give_equal_centroids(d: int, most: int, monkeypatch):
    monkeypatch.setattr(initialize_many, "SAMPLE", most)
    monkeypatch.setattr(initialize_many, "VALUES", most)
    W = normal(500, d)
    before = torch.get_rng_state()
    first = one(W, 4, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one(W.clone(), 4, seed=3), first)
    if d > 1 or most < 500:
        assert not torch.equal(one(W, 4, seed=4), first)


def test_a_sample_has_different_rows_from_everywhere():
    W = torch.arange(10_007)[:, None].expand(-1, 2)
    found = sample(W, 500, seed=5)[:, 0]
    assert len(found.unique()) == 500
    # one of each part of about twenty; within its part a row is anywhere
    edges = torch.arange(501) * 10_007 // 500
    assert ((edges[:-1] <= found) & (found < edges[1:])).all()
    assert abs(float(((found - edges[:-1] + 0.5) / edges.diff()).mean()) - 0.5) < 5 * 12**-0.5 / 500**0.5
    assert not torch.equal(sample(W, 500, seed=6)[:, 0], found)
    assert sample(W, 10_007, seed=5) is W


def test_a_sample_of_single_weights_has_their_extremes():
    W = torch.cat([normal(5000, 1), torch.tensor([[-7.0], [9.0]])])
    found = sample(W, 100, seed=0)
    assert (len(found), float(found.min()), float(found.max())) == (102, -7.0, 9.0)


@pytest.mark.parametrize("d", [1, 4])
def test_where_init_centroids_uses_it(d: int, monkeypatch):
    """For weights on a GPU; what is refused is the same everywhere."""
    W = normal(300, d)
    monkeypatch.setattr(initialize, "by_batches", lambda device: True)
    assert torch.equal(dkm.init_centroids(W, 16, seed=2), one(W, 16, seed=2))
    with pytest.raises(ValueError, match="NaN or infinite"):
        dkm.init_centroids(W / 0, 16)
    assert initialize_many.by_batches(torch.device("cuda", 1))
    assert not initialize_many.by_batches(torch.device("cpu"))


class Operations(TorchDispatchMode):
    """Counts them: each is a launch on a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("d", [1, 8])
def test_a_batch_takes_hardly_more_operations_than_one_weight(d: int):
    counts = []
    for weights in (1, 8):
        with Operations() as operations:
            kmeans_of_weights([normal(400, d, seed=seed) for seed in range(weights)], 16, 0)
        counts.append(operations.count)
    assert counts[1] < 3 * counts[0]
