"""The first centroids of many weights at a time."""

import copy

import pytest
import torch
from torch import nn

import dkm
from dkm.modelling import first_centroids
from dkm.modelling.clustered import Clustered


@pytest.fixture
def batched(monkeypatch) -> list[int]:
    """As on a GPU; returns how many weights each batch had."""
    found, compute = [], first_centroids.kmeans_of_weights

    def counted(weights, k, seed):
        found.append(len(weights))
        return compute(weights, k, seed)

    monkeypatch.setattr(first_centroids, "by_batches", lambda device: True)
    monkeypatch.setattr(first_centroids, "kmeans_of_weights", counted)
    return found


def network() -> nn.Module:
    torch.manual_seed(0)
    # smaller weights would have 8 bits, whatever the plan
    return nn.Sequential(nn.Conv2d(3, 400, 3), nn.Conv2d(400, 4, 3), nn.Flatten(), nn.Linear(16, 640))


def clustered(model: nn.Module) -> list[Clustered]:
    return [module for module in model.modules() if isinstance(module, Clustered)]


def test_weights_of_one_kind_start_together(batched: list[int], monkeypatch):
    model = network()
    alone = copy.deepcopy(model)
    dkm.compress_(model, "cv:4/2, fc:2/1", steps=10, seed=3)
    assert sorted(batched) == [1, 2]
    monkeypatch.setattr(first_centroids, "by_batches", lambda device: False)
    dkm.compress_(alone, "cv:4/2, fc:2/1", steps=10, seed=3)
    for a, b in zip(clustered(model), clustered(alone), strict=True):
        assert a.C.shape == b.C.shape
        assert torch.equal(a.C, a.start)
        assert a.unit <= 1.15 * b.unit  # k-means++ with other draws
    x = torch.randn(2, 3, 6, 6)
    model(x).sum().backward()  # and it trains


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("all:4/2", dict(init="random")),
        ("all:2/2 per 2x64", {}),
        ("all:4/2 scaled", {}),
        ("all:4/1", dict(method="ewgs")),  # chooses its first centroids itself
        ("all:1/1", dict(method="bwn")),
    ],
    ids=str,
)
def test_who_starts_alone(plan: str, options: dict, batched: list[int]):
    model = network()
    dkm.compress_(model, plan, steps=10, **options)
    assert batched == []


@pytest.mark.parametrize("method", ["hard", "dkm"])
def test_other_methods_start_together_too(method: str, batched: list[int]):
    dkm.compress_(network(), "all:4/2", method=method, **({"steps": 10} if method == "dkm" else {}))
    assert batched == [3]


def test_weights_of_an_extreme_scale_start_alone(batched: list[int]):
    model = network()
    with torch.no_grad():
        model[0].weight.mul_(1e-20)
    dkm.compress_(model, "all:4/2", steps=10)
    assert batched == [2]
    assert all(c.C.isfinite().all() for c in clustered(model))
