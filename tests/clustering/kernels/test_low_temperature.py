"""Vectors at a low temperature, where a logit by products would be a small difference of large numbers."""

import pytest
import torch
from backends import ON_CPU

from dkm import assign, cluster, init_centroids

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEANS = [0.0, 1.0, 10.0, 100.0]  # in standard deviations


def assert_as_accurate_as_the_reference(W: torch.Tensor, C: torch.Tensor, tau: float, gradient: str, impl: str) -> None:
    """Against float64 on the same float32 inputs.

    The reference computes differences directly.  Ours may have twice its error, and a rounding of the largest gradient.
    """
    device = DEVICE if impl == "triton" else "cpu"
    W, C, found = W.to(device), C.to(device), {}
    G = torch.randn_like(W)
    ways = {"exact": ("reference", torch.double), "reference": ("reference", torch.float)}
    for name, (way, dtype) in (ways | {"ours": (impl, torch.float)}).items():
        weight = W.to(dtype).requires_grad_()
        W_tilde = cluster(weight, C.to(dtype), tau=tau, eps=0, max_iter=2, gradient=gradient, impl=way).W_tilde
        found[name] = torch.autograd.grad(W_tilde, weight, G.to(dtype))[0].double()
    errors = {name: float((found[name] - found["exact"]).norm() / found["exact"].norm()) for name in found}
    assert errors["ours"] <= 2 * errors["reference"] + 1e-6, errors


def weights(n: int, d: int, mean: float) -> torch.Tensor:
    return (torch.randn(n, d, dtype=torch.float64) + mean).mul(0.05).float()


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("multiple", [0.05, 1.0])
@pytest.mark.parametrize(
    ("k", "d", "gradient"),
    [
        (256, 2, "unrolled"),
        (256, 2, "last"),
        (2, 2, "unrolled"),
        (64, 3, "unrolled"),
        (256, 4, "unrolled"),
        (256, 8, "unrolled"),
        (16, 10, "unrolled"),
        (256, 16, "unrolled"),
    ],
)
def test_down_to_a_twentieth_of_the_squared_error(
    k: int, d: int, gradient: str, multiple: float, mean: float, impl: str
):
    W = weights(6000, d, mean)
    C = init_centroids(W, k)
    tau = multiple * float((W - C[assign(W, C)]).square().mean())
    assert_as_accurate_as_the_reference(W, C, tau, gradient, impl)


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("mean", MEANS)
def test_a_temperature_far_below_the_squared_error(mean: float, impl: str):
    """Only the few vectors half way between two centroids have a gradient here: it takes many to have some."""
    W = weights(20_000, 10, mean)
    assert_as_accurate_as_the_reference(W, init_centroids(W, 16), 4.6e-4 * 0.05**2, "last", impl)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("mean", [0.0, 3.0, 10.0, 100.0])
@pytest.mark.parametrize(
    ("k", "d", "n", "gradient"),  # with few vectors per centroid, a handful of them would decide
    [
        (64, 2, 1500, "last"),  # by differences
        (64, 3, 1500, "unrolled"),  # by products, as all that follow
        (64, 4, 1500, "unrolled"),
        (32, 8, 2000, "unrolled"),
        (16, 10, 1500, "unrolled"),
        (64, 16, 1500, "unrolled"),
    ],
)
def test_kernels_down_to_a_twentieth_of_the_squared_error(k: int, d: int, n: int, gradient: str, mean: float):
    pytest.importorskip("triton")
    W = weights(n, d, mean)
    C = init_centroids(W, k)
    tau = 0.05 * float((W - C[assign(W, C)]).square().mean())
    assert_as_accurate_as_the_reference(W, C, tau, gradient, "triton")


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("mean", [0.0, 10.0])
def test_kernels_at_a_temperature_far_below_the_squared_error(mean: float):
    pytest.importorskip("triton")
    W = weights(4097, 10, mean)
    assert_as_accurate_as_the_reference(W, init_centroids(W, 16), 4.6e-4 * 0.05**2, "last", "triton")
