"""Groups against the literal clustering of each: values, gradients, iterations."""

import pytest
import torch
from backends import ON_CPU
from group_cases import CASES, literal, problem

from dkm.clustering.grouped import cluster_groups
from dkm.clustering.groups import Group, Grouping
from dkm.clustering.kernels import blocked_groups, native
from dkm.clustering.options import GRADIENTS, METRICS, ClusterOptions

# float64: as exact as rounding allows; a thousand operations of 1e-16, amplified by a temperature of a tenth
LIMIT = 1e-10


def results(function, W, C, tau, G, grouping, options):
    """W_tilde, the next centroids, the iterations, and the gradients of W, C and tau."""
    W, C, tau = (X.detach().requires_grad_() for X in (W, C, tau))
    W_tilde, C_next, iterations = function(W, C, tau, grouping, options)
    gradients = torch.autograd.grad(W_tilde, (W, C, tau), G.to(W_tilde.dtype), allow_unused=True)
    return W_tilde.detach(), C_next, iterations, *gradients


def error(got, wanted):
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize(("shape", "group", "dim"), CASES)
def test_exact_in_float64(shape, group, dim, gradient, impl, monkeypatch):
    monkeypatch.setattr(blocked_groups, "TILE", 100)  # a few groups at a time
    monkeypatch.setattr(native.groups, "PIECE", 40)
    grouping = Grouping.of(shape, group, dim)
    W, C, tau, G = problem(shape, grouping, 3)
    options = ClusterOptions(eps=1e-9, max_iter=60 if gradient == "implicit" else 4, gradient=gradient, impl=impl)
    got, wanted = (results(f, W, C, tau, G, grouping, options) for f in (cluster_groups, literal))
    assert torch.equal(got[2], wanted[2])
    # "implicit" solves its system in a fixed number of passes; the reference solves it exactly
    limit = 1e-5 if gradient == "implicit" else LIMIT
    for name, a, b in zip(("W_tilde", "C", "", "dW", "dC", "dtau"), got, wanted, strict=True):
        if name == "dC" and gradient != "unrolled":
            assert a is None or not a.any()
        elif name:
            assert error(a, b) < limit, name


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("max_iter", range(1, 8))
def test_iterations_and_metrics(metric, max_iter, impl):
    grouping = Grouping.of((9, 13), Group(4, 6), 2)
    W, C, tau, G = problem((9, 13), grouping, 4)
    options = ClusterOptions(eps=1e-9, max_iter=max_iter, metric=metric, impl=impl)
    got, wanted = (results(f, W, C, tau, G, grouping, options) for f in (cluster_groups, literal))
    assert torch.equal(got[2], wanted[2])
    assert int(got[2].max()) == max_iter  # a group of one vector needs two
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < LIMIT


@pytest.mark.parametrize("impl", ON_CPU)
def test_each_group_converges_for_itself(impl):
    grouping = Grouping.of((6, 40), Group(1), 1)
    W, C, tau, G = problem((6, 40), grouping, 2)
    options = ClusterOptions(eps=0.02, max_iter=12, impl=impl)
    got, wanted = (results(f, W, C, tau, G, grouping, options) for f in (cluster_groups, literal))
    assert len(set(wanted[2].tolist())) > 1  # what this test is about
    assert torch.equal(got[2], wanted[2])
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < LIMIT


@pytest.mark.parametrize("impl", ["reference", *ON_CPU])
@pytest.mark.parametrize(("shape", "group", "dim"), [CASES[2], CASES[4], CASES[5]])
def test_large_groups_go_one_by_one(shape, group, dim, impl, monkeypatch):
    monkeypatch.setattr(blocked_groups, "LARGEST", 0)
    grouping = Grouping.of(shape, group, dim)
    W, C, tau, G = problem(shape, grouping, 3)
    options = ClusterOptions(eps=1e-9, max_iter=3, impl=impl)
    got, wanted = (results(f, W, C, tau, G, grouping, options) for f in (cluster_groups, literal))
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < LIMIT


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype, impl):
    """Computed in float32: as far from the reference in float64 as rounding of the result says."""
    grouping = Grouping.of((9, 13), Group(4, 6), 2)
    W, C, tau, G = problem((9, 13), grouping, 4)
    W, G = W.to(dtype), G.to(dtype)
    options = ClusterOptions(eps=0.0, max_iter=3, impl=impl)
    got = results(cluster_groups, W, C.float(), tau.float(), G, grouping, options)
    wanted = results(literal, W.double(), C, tau, G.double(), grouping, options)
    assert got[0].dtype == got[3].dtype == dtype
    assert got[1].dtype == torch.float32
    limit = max(torch.finfo(dtype).eps, 1e-4)
    assert error(got[0], wanted[0]) < limit
    assert error(got[3], wanted[3]) < limit
    assert error(got[1], wanted[1]) < 1e-4


@pytest.mark.parametrize("impl", ON_CPU)
def test_empty_centroids_stay(impl):
    grouping = Grouping.of((2, 8), Group(1), 1)
    W, C, tau, G = problem((2, 8), grouping, 3)
    C[0, 2] = 1e3
    options = ClusterOptions(eps=0.0, max_iter=3, impl=impl)
    got, wanted = (results(f, W, C, tau, G, grouping, options) for f in (cluster_groups, literal))
    assert float(got[1][0, 2]) == 1e3
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < LIMIT


def test_one_temperature_for_all_groups():
    grouping = Grouping.of((6, 10), Group(1), 1)
    W, C, _, _ = problem((6, 10), grouping, 3)
    options = ClusterOptions(impl="blocked")
    one, all_alike = (
        cluster_groups(W, C, tau, grouping, options).W_tilde
        for tau in (0.2, torch.full((6,), 0.2, dtype=torch.float64))
    )
    assert torch.equal(one, all_alike)


def test_compiled():
    torch._dynamo.reset()
    grouping = Grouping.of((7, 10), Group(3), 1)
    W, C, tau, G = problem((7, 10), grouping, 3)
    options = ClusterOptions(eps=0.0, max_iter=3, impl="blocked")
    compiled = torch.compile(cluster_groups, backend="aot_eager", fullgraph=True)
    got, wanted = (results(f, W, C, tau, G, grouping, options) for f in (compiled, cluster_groups))
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < LIMIT


@pytest.mark.parametrize("impl", ON_CPU)
def test_memory_is_that_of_a_few_groups(impl):
    """The attention of all groups, in all iterations, would take 4 GB."""
    import resource

    grouping = Grouping.of((2048, 512), Group(8, 64), 1)
    W = torch.randn(2048, 512).requires_grad_()
    C = torch.randn(grouping.count, 16, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cluster_groups(W, C, 0.1, grouping, ClusterOptions(eps=0.0, impl=impl)).W_tilde.sum().backward()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB
