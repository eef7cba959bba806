"""The gradient of tau, which is a sum of terms of both signs, keeps its precision."""

import pytest
import torch
from backends import ON_CPU
from torch import Tensor

from dkm import cluster, init_centroids
from dkm.clustering.kernels import reference
from dkm.modelling.clustered import squared_error

ITERATIONS = 3
DIRECTIONS = 8
SIZES = [(4, 1), (6, 1), (8, 1), (4, 2), (8, 2)]


def problem(bits: int, d: int, metric: str, multiple: float) -> tuple[Tensor, Tensor, Tensor, float]:
    """W, C, several G, and tau, which is a multiple of the squared error per weight, or the root of that."""
    W, G = torch.randn(2000, d) * 0.05, torch.randn(DIRECTIONS, 2000, d)
    C = init_centroids(W, 2**bits)
    tau = multiple * float(squared_error(W, C))
    return W, C, G, tau if metric == "sqeuclidean" else tau**0.5


def gradients_of_tau(W: Tensor, C: Tensor, G: Tensor, tau: float, impl: str, dtype: torch.dtype, **options) -> Tensor:
    """One for each G."""
    argument = torch.tensor(tau, dtype=dtype, requires_grad=True)
    W_tilde = cluster(W.to(dtype), C.to(dtype), tau=argument, eps=0.0, impl=impl, **options).W_tilde
    found = [torch.autograd.grad(W_tilde, argument, g, retain_graph=True)[0] for g in G.to(dtype)]
    return torch.stack(found).double()


def size_of_terms(W: Tensor, C: Tensor, G: Tensor, tau: float, metric: str) -> float:
    """The sum of |dlogit * logit| / tau over all iterations, with logits relative to the largest of their vector."""
    W, C, G, steps = W.double(), C.double(), G.double(), []
    for _ in range(ITERATIONS):
        steps.append((-reference.distance(W, C, metric) / tau).requires_grad_())
        A, C_used = steps[-1].softmax(1), C
        C = (A.T @ W) / A.sum(0)[:, None]
    gradients = torch.autograd.grad(A @ C_used, steps, G)
    with torch.no_grad():
        terms = [(g * (x - x.amax(1, keepdim=True))).abs().sum() for g, x in zip(gradients, steps, strict=True)]
    return float(sum(terms)) / tau


@pytest.mark.parametrize(("metric", "ours"), [("euclidean", "blocked"), *(("sqeuclidean", impl) for impl in ON_CPU)])
@pytest.mark.parametrize("multiple", [0.05, 0.2, 1.0])
@pytest.mark.parametrize(
    ("bits", "d", "gradient"),
    [(bits, d, gradient) for bits, d in SIZES for gradient in ("unrolled", "last")]
    # with more centroids, the reference of this one would take minutes
    + [(bits, d, "implicit") for bits, d in SIZES if bits < 8],
)
def test_as_accurate_as_the_float32_reference(
    bits: int, d: int, gradient: str, multiple: float, metric: str, ours: str
):
    """Against float64, over several directions, because a single error may be small by luck.

    Twice the reference's error is allowed, and four roundings (eps) of the terms of the sum.
    """
    options = dict(metric=metric, gradient=gradient, max_iter=ITERATIONS)
    W, C, G, tau = problem(bits, d, metric, multiple)
    found = {
        (impl, dtype): gradients_of_tau(W, C, G, tau, impl, dtype, **options)
        for impl in ("reference", ours)
        for dtype in (torch.double, torch.float)
    }
    if gradient != "implicit":  # the reference solves the system of the fixed point exactly, ours in a few passes
        torch.testing.assert_close(found[ours, torch.double], found["reference", torch.double], rtol=1e-8, atol=0)
    errors = {
        impl: float((found[impl, torch.float] - found[impl, torch.double]).square().mean().sqrt())
        for impl in ("reference", ours)
    }
    floor = 4 * torch.finfo(torch.float).eps * size_of_terms(W, C, G[0], tau, metric)
    assert errors[ours] <= 2 * errors["reference"] + floor, errors


@pytest.mark.parametrize("impl", ON_CPU)
def test_only_tau_is_wanted(impl: str):
    """It is the same whether or not W and C need a gradient, and has the shape of tau."""
    W, C, G, tau = problem(3, 2, "sqeuclidean", 1.0)
    alone = gradients_of_tau(W, C, G, tau, impl, torch.double, max_iter=ITERATIONS)[0]
    arguments = [x.double().requires_grad_() for x in (W, C, torch.tensor([tau]))]
    weight, centroids, temperature = arguments
    W_tilde = cluster(weight, centroids, tau=temperature, eps=0.0, max_iter=ITERATIONS, impl=impl).W_tilde
    together = torch.autograd.grad(W_tilde, arguments, G[0].double())[2]
    assert together.shape == (1,)
    torch.testing.assert_close(together[0], alone, rtol=1e-6, atol=0)  # tau was rounded to float32
