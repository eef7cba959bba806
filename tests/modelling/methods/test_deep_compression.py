"""Deep Compression by its definition."""

import pytest
import torch
from method_helpers import CONFIGURATIONS, backward, close, make_gradient, make_weight
from torch import nn

import dkm
from dkm.clustering.vectors import from_vectors, to_vectors
from dkm.modelling.methods.deep_compression import DeepCompression

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize(("bits", "dim"), CONFIGURATIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_dc_by_the_sum_trains_as_if_the_centroids_were_the_parameters(bits: int, dim: int, optimizer: str):
    weight = make_weight()
    dc = DeepCompression(weight, bits, dim, gradient_scale="sum")
    C, codes = nn.Parameter(dc.C.clone()), dc.cluster_of.long()
    ours, theirs = (OPTIMIZERS[optimizer]([parameter]) for parameter in (weight, C))
    target = make_gradient(weight)
    for _ in range(5):
        for make, step in ((lambda: dc(weight), ours), (lambda: from_vectors(C[codes], weight.shape), theirs)):
            step.zero_grad()
            (make() - target).square().sum().backward()
            step.step()
    used = torch.zeros_like(C).index_add_(0, codes, to_vectors(torch.ones_like(weight), dim)) > 0
    close(dc.centroids(weight)[1][used], C[used])  # an empty one has nobody to decay it
    assert torch.equal(dc.codes(weight)[1], codes)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_dc_by_the_sum_gives_each_weight_the_sum_of_the_gradients_of_its_cluster(dim: int):
    weight = make_weight()
    dc = DeepCompression(weight, 2, dim, gradient_scale="sum")
    C = dc.C.clone().requires_grad_()
    wanted = torch.autograd.grad(from_vectors(C[dc.cluster_of.long()], weight.shape), C, make_gradient(weight))[0]
    close(backward(dc(weight), weight), from_vectors(wanted[dc.cluster_of.long()], weight.shape))


@pytest.mark.parametrize(("bits", "dim"), [(2, 1), (2, 5)])
def test_a_step_of_sgd_moves_dc_along_the_projection_of_the_gradient(bits: int, dim: int):
    """Of all tensors whose clusters share a value, W~ - lr P G is the nearest to W~ - lr G: what least squares say."""
    weight = make_weight()
    dc = DeepCompression(weight, bits, dim)
    before, G = dc(weight).detach(), make_gradient(weight)
    members = torch.eye(2**bits, dtype=torch.float64)[dc.cluster_of.long()]  # (n, k)
    free = torch.linalg.lstsq(members, to_vectors(before - 0.1 * G, dim), driver="gelsd").solution
    optimizer = torch.optim.SGD([weight], lr=0.1)
    dc(weight).backward(G)
    optimizer.step()
    close(dc(weight).detach(), from_vectors(members @ free, weight.shape))


def test_an_unknown_gradient():
    with pytest.raises(ValueError, match="gradient_scale must be one of mean, sum, got 'median'"):
        dkm.compress_(nn.Linear(200, 100), "all:2", method="dc", gradient_scale="median")


def test_dc_starts_from_the_k_means_of_evenly_spaced_centroids():
    weight = make_weight()
    w = weight.detach().view(-1)
    C = torch.linspace(float(w.min()), float(w.max()), 8, dtype=torch.float64)
    for _ in range(300):
        codes = (w[:, None] - C).abs().argmin(1)
        C = torch.stack([w[codes == j].mean() if (codes == j).any() else C[j] for j in range(8)])
    torch.testing.assert_close(DeepCompression(weight, 3).C[:, 0], C)


def test_dc_keeps_its_clusters_and_evaluates_the_newest_weight():
    weight = make_weight()
    dc = DeepCompression(weight, 2)
    before = dc.codes(weight)[1]
    with torch.no_grad():
        weight.mul_(-3)
    C, codes = dc.codes(weight)
    assert torch.equal(codes, before)
    torch.testing.assert_close(C.double()[codes].view(weight.shape), dc(weight).detach(), rtol=1e-3, atol=0)
