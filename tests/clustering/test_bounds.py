"""The best bounds between clusters of sorted values."""

import itertools

import pytest
import torch
from kmeans_cases import optimal_costs

from dkm.clustering import bounds


def prefix_sums(values: torch.Tensor) -> torch.Tensor:
    """`(g, n) -> (3, g, n + 1)`."""
    powers = torch.stack([values**p for p in range(3)])
    return torch.nn.functional.pad(powers.cumsum(2), (1, 0))


def cost(values: torch.Tensor, found: torch.Tensor) -> float:
    """The squared error of `(n,)` sorted values with `(k - 1,)` bounds between their clusters."""
    parts = values.tensor_split(found.tolist())
    return float(sum((part - part.mean()).square().sum() for part in parts if len(part)))


def find(values: torch.Tensor, k: int) -> torch.Tensor:
    """The bounds of `(g, n)` sorted values, from equally many values in each cluster."""
    n = values.shape[1]
    position = torch.arange(n).expand(len(values), -1).contiguous()
    first = torch.cat([torch.ones(len(values), 1, dtype=torch.bool), values.diff(dim=1) > 0], 1)
    start = (torch.arange(1, k) * n // k).expand(len(values), -1).contiguous()
    return bounds.best_bounds(prefix_sums(values), position, first, start)


@pytest.mark.parametrize("k", [2, 3, 4, 5, 7])
def test_the_best_of_all_bounds(k: int):
    """Few enough values that every choice of bounds can be tried, and that the windows leave none out."""
    values = torch.randn(6, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(k)).sort(1).values
    for row, found in zip(values, find(values, k), strict=True):
        best = min(cost(row, torch.tensor(b)) for b in itertools.combinations(range(1, 13), k - 1))
        assert cost(row, found) <= best * (1 + 1e-12)


@pytest.mark.parametrize("k", [2, 6])
def test_close_to_the_best_with_more_values_than_bins(k: int, monkeypatch):
    monkeypatch.setattr(bounds, "LEAST_BINS", 64)
    values = torch.randn(3, 2000, dtype=torch.float64, generator=torch.Generator().manual_seed(k)).sort(1).values
    for row, found in zip(values, find(values, k), strict=True):
        assert cost(row, found) <= 1.01 * optimal_costs(row.numpy(), k)[-1]  # a bound can be at an edge only


def test_blocks_do_not_change_the_bounds(monkeypatch):
    values = torch.randn(2, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).sort(1).values
    whole = find(values, 9)
    monkeypatch.setattr(bounds, "BLOCK", 1)
    assert torch.equal(find(values, 9), whole)


def test_equal_values_are_not_parted():
    values = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 9.0], dtype=torch.float64)[None]
    assert find(values, 3).tolist() == [[7, 9]]


def test_more_clusters_than_values():
    """Some clusters stay empty: bounds are still in order and within the values."""
    values = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    found = find(values, 8)[0]
    assert found.tolist() == sorted(found.tolist())
    assert 0 <= int(found.min()) <= int(found.max()) <= 3
    assert cost(values[0], found) == 0
