"""Weights whose mean is far from zero: differences between weights and centroids keep their precision."""

import pytest
import torch
from backends import ON_CPU

from dkm import assign, cluster, init_centroids


@pytest.mark.parametrize("mean", [0.0, 1.0, 10.0, 100.0])  # in standard deviations
@pytest.mark.parametrize("bits", [1, 2, 4, 6])
@pytest.mark.parametrize("impl", [*ON_CPU, "triton"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_the_gradient_is_as_accurate_as_that_of_the_reference(mean: float, bits: int, impl: str):
    """Against float64 on the same float32 inputs, at the coldest temperature of a training, 0.1 m.

    The reference computes differences directly.  Ours may have twice its error, and a rounding of the largest gradient.
    """
    if impl == "triton":
        pytest.importorskip("triton")
    W = (torch.randn(3_000 if impl == "triton" else 20_000, 1, dtype=torch.float64) + mean).mul(0.05).float()
    W = W.to("cuda" if impl == "triton" and torch.cuda.is_available() else "cpu")
    G, C = torch.randn_like(W), init_centroids(W, 2**bits)
    tau = 0.1 * float((W - C[assign(W, C)]).square().mean())
    found = {}
    ways = {"exact": ("reference", torch.double), "reference": ("reference", torch.float)}
    for name, (way, dtype) in (ways | {"ours": (impl, torch.float)}).items():
        weight = W.to(dtype).requires_grad_()
        W_tilde = cluster(weight, C.to(dtype), tau=tau, eps=0, max_iter=2, impl=way).W_tilde
        found[name] = torch.autograd.grad(W_tilde, weight, G.to(dtype))[0].double()
    errors = {name: float((found[name] - found["exact"]).norm() / found["exact"].norm()) for name in found}
    assert errors["ours"] <= 2 * errors["reference"] + 1e-6, errors
