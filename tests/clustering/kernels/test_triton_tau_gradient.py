"""The gradient of tau by the GPU kernels: on a GPU where there is one, else through Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from dkm import cluster, init_centroids
from dkm.clustering.kernels import reference
from dkm.clustering.kernels import triton as kernels
from dkm.clustering.kernels.triton import tiles
from dkm.clustering.options import METRICS, ClusterOptions
from dkm.modelling.clustered import squared_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIRECTIONS = 4

# numpy's opinion of inf - inf in lanes that are masked out, and of 1 / 0 that is not used
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def problem(bits: int, d: int, metric: str = "sqeuclidean", n: int = 300) -> tuple[Tensor, Tensor, Tensor, float]:
    """W, C, several G, and a tau of a fifth of the squared error per weight, or the root of that."""
    W, G = torch.randn(n, d) * 0.05, torch.randn(DIRECTIONS, n, d)
    C = init_centroids(W, 2**bits)
    tau = 0.2 * float(squared_error(W, C))
    return W.to(DEVICE), C.to(DEVICE), G.to(DEVICE), tau if metric == "sqeuclidean" else tau**0.5


def gradients_of_tau(W: Tensor, C: Tensor, G: Tensor, tau: float, impl: str, dtype: torch.dtype, **options) -> Tensor:
    """One for each G."""
    argument = torch.tensor(tau, dtype=dtype, device=DEVICE, requires_grad=True)
    W_tilde = cluster(W.to(dtype), C.to(dtype), tau=argument, eps=0.0, max_iter=2, impl=impl, **options).W_tilde
    found = [torch.autograd.grad(W_tilde, argument, g, retain_graph=True)[0] for g in G.to(dtype)]
    return torch.stack(found).double()


def size_of_terms(W: Tensor, C: Tensor, G: Tensor, tau: float, metric: str) -> float:
    """The sum of |dlogit * logit| / tau for W_tilde = A C, with logits relative to the largest of their vector."""
    W, C, G = W.double(), C.double(), G.double()
    logits = (-reference.distance(W, C, metric) / tau).requires_grad_()
    (gradient,) = torch.autograd.grad(logits.softmax(1) @ C, logits, G)
    return float((gradient * (logits - logits.amax(1, keepdim=True))).detach().abs().sum()) / tau


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("bits", "d", "gradient"),
    [(b, d, gradient) for b, d in [(4, 1), (6, 1), (8, 1), (4, 2), (8, 8)] for gradient in ("unrolled", "last")]
    + [(4, 1, "implicit"), (6, 1, "implicit"), (4, 2, "implicit")],
)
def test_as_accurate_as_the_float32_reference(bits, d, gradient, metric):
    """Against float64, over several directions, because a single error may be small by luck.

    Twice the reference's error is allowed, and four roundings (eps) of the terms of the sum.  The linear system of the
    implicit gradient is solved in a few passes, as by `blocked`, which is therefore what it is compared with.
    """
    options = dict(metric=metric, gradient=gradient)
    W, C, G, tau = problem(bits, d, metric)
    plain = "blocked" if gradient == "implicit" else "reference"
    exact = gradients_of_tau(W, C, G, tau, plain, torch.double, **options)
    errors = {
        impl: float((gradients_of_tau(W, C, G, tau, impl, torch.float, **options) - exact).square().mean().sqrt())
        for impl in (plain, "triton")
    }
    floor = 4 * torch.finfo(torch.float).eps * size_of_terms(W, C, G[0], tau, metric)
    assert errors["triton"] <= 2 * errors[plain] + floor, (errors, floor)


@pytest.mark.parametrize(("bits", "dtype"), [(6, torch.float32), (4, torch.bfloat16)])
def test_whichever_way_the_backward_pass_takes(bits, dtype, monkeypatch):
    """Windows of near centroids and a table of values keep the gradients of the centroids in the same place."""
    W, C, G, tau = problem(bits, 1)
    W, G = W.to(dtype), G[0].to(dtype)
    wanted = gradients_of_tau(W, C, G[None], tau, "reference", torch.double)[0]
    for name in ("WINDOWS", "VALUE_TABLE"):
        monkeypatch.setattr(tiles, name, 0)
    assert tiles.by_value_table(W, 2**bits, 1) or tiles.by_windows(W, 2**bits, 1, "sqeuclidean")
    argument = torch.tensor(tau, device=DEVICE, requires_grad=True)
    W_tilde = cluster(W, C, tau=argument, eps=0.0, max_iter=2, impl="triton").W_tilde
    found = torch.autograd.grad(W_tilde, argument, G)[0].double()
    # a rounding of tau and of each logit, which is up to some hundred, times how much larger the terms are than the sum
    rounding = 100 * torch.finfo(torch.float).eps * size_of_terms(W, C, G, tau, "sqeuclidean")
    assert abs(found - wanted) <= rounding


def test_a_shard_gives_its_share():
    """The shares of two halves of a weight, with the sums over both, add up to the gradient of the whole."""
    W, C, G, tau = problem(4, 1)
    W, G, temperature = W.flatten(), G[0].flatten(), torch.tensor(tau, device=DEVICE)
    options = ClusterOptions(eps=0.0, max_iter=2, gradient="last")
    _, trace = kernels.forward(W, C, temperature, options)
    whole = kernels.backward(G, W, temperature, trace, options, temperature=True).dtau
    shares = [
        kernels.backward(g, w, temperature, trace, options, reduce=lambda x: x, temperature=True).dtau
        for w, g in zip(W.split(130), G.split(130), strict=True)
    ]
    torch.testing.assert_close(sum(shares), whole, rtol=1e-4, atol=1e-4 * float(whole.abs()))
    assert kernels.backward(G, W, temperature, trace, options).dtau is None


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("gradient", ["unrolled", "last", "implicit"])
def test_a_cuda_graph_captures_it(gradient):
    W, C, G, tau = problem(4, 2, n=5000)
    argument = torch.tensor(tau, device=DEVICE, requires_grad=True)

    def step() -> Tensor:
        W_tilde = cluster(W, C, tau=argument, gradient=gradient, impl="triton").W_tilde
        return torch.autograd.grad(W_tilde, argument, G[0])[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wanted = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(got, wanted)
