"""Every implementation of the clustering against the literal one, in float64."""

import math

import pytest
import torch
from backends import ON_CPU
from torch import Tensor

from dkm import assign, cluster, init_centroids
from dkm.clustering.kernels import blocked
from dkm.clustering.options import METRICS


def problem(n: int, d: int, k: int, dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, centroids near but not at their k-means, an upstream gradient."""
    W = torch.randn(n, d, dtype=torch.float64) * 0.05
    C = init_centroids(W, k) + 0.005 * torch.randn(k, d, dtype=torch.float64)
    return W.to(dtype), C.to(dtype), torch.randn(n, d, dtype=torch.float64).to(dtype)


def run(W: Tensor, C: Tensor, G: Tensor, impl: str, **options):
    W, C = W.clone().requires_grad_(), C.clone().requires_grad_()
    W_tilde, C_next, iterations = cluster(W, C, impl=impl, **options)
    dW, dC = torch.autograd.grad(W_tilde, (W, C), G)
    return {"W_tilde": W_tilde.detach(), "C": C_next, "dW": dW, "dC": dC}, iterations


def error(got: Tensor, wanted: Tensor, scale: Tensor | None = None) -> float:
    """Norm of the difference relative to the wanted norm, or to that of `scale` where it is larger."""
    size = max(wanted.double().norm(), scale.double().norm()) if scale is not None else wanted.double().norm()
    return float((got.double() - wanted.double()).norm() / size.clamp(min=1e-300))


def assert_as_exact_as_possible(W, C, G, impl: str, **options):
    """Equal to the reference up to 1e-12 (values) and 1e-10 (gradients).

    The loop itself amplifies rounding: at small tau a vector between two centroids that few others share moves
    them by (2/tau) |c1 - c2|^2 / (4 mass) times its change, in every iteration.  How much so is measured by the
    reference on weights that differ in their last bit; no implementation can be expected to do better.
    """
    wanted, wanted_iterations = run(W, C, G, "reference", **options)
    got, iterations = run(W, C, G, impl, **options)
    nudged, _ = run(W * (1 + torch.finfo(W.dtype).eps * torch.randn_like(W)), C, G, "reference", **options)
    assert iterations == wanted_iterations
    for name, tolerance in {"W_tilde": 1e-12, "C": 1e-12, "dW": 1e-10, "dC": 1e-10}.items():
        # gradients are sums over G: where they cancel to nothing, G's size is what rounding is relative to
        scale = G if name.startswith("d") else None
        limit = max(tolerance, 16 * error(nudged[name], wanted[name], scale))
        assert limit < 1e-3, "an ill-conditioned problem tests nothing"
        assert error(got[name], wanted[name], scale) <= limit, name


# `native` leaves the other metric to `blocked`
WAYS = [(metric, impl) for metric in METRICS for impl in ON_CPU if metric == "sqeuclidean" or impl == "blocked"]


@pytest.fixture
def small_blocks(monkeypatch):
    """So that a few hundred vectors make several blocks and a ragged last one."""
    monkeypatch.setattr(blocked, "BLOCK", 3000)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("metric", "impl"), WAYS)
@pytest.mark.parametrize("d", [1, 2, 3, 4, 8, 10, 16])
@pytest.mark.parametrize(
    ("k", "n", "tau", "iterations"),
    [
        (1, 101, 1e-3, 3),
        (2, 997, 1.0, 5),
        (2, 997, 1e-3, 7),
        (5, 333, 1e-2, 2),
        (16, 1009, 1e-4, 5),
        (16, 1009, 1e-3, 1),
        (33, 701, 1e-3, 4),
        (64, 1501, 1e-5, 5),
        (100, 803, 1e-2, 6),
        (256, 601, 1e-3, 5),
        (256, 601, 1e-4, 3),
        (1024, 1103, 1e-3, 2),
    ],
)
def test_equals_reference(metric, impl, d, k, n, tau, iterations):
    if metric == "euclidean":
        tau, n = math.sqrt(tau), min(n, 401)
    # eps is above rounding: a single centroid is at rest after one iteration
    assert_as_exact_as_possible(*problem(n, d, k), impl, tau=tau, eps=1e-13, max_iter=iterations, metric=metric)


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("tau", [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0])
@pytest.mark.parametrize(("d", "k"), [(1, 4), (1, 256), (4, 16), (8, 32)])
def test_equals_reference_at_every_tau(tau, d, k, impl):
    assert_as_exact_as_possible(*problem(2003, d, k), impl, tau=tau, eps=0, max_iter=5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("metric", "impl"), WAYS)
@pytest.mark.parametrize(("d", "k"), [(1, 3), (1, 70), (3, 5)])
@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_gradcheck(metric, impl, d, k, iterations):
    W, C, _ = problem(83, d, k)
    W, C = W.requires_grad_(), C.requires_grad_()
    options = dict(tau=3e-3 if metric == "sqeuclidean" else 3e-2, eps=0, max_iter=iterations, metric=metric)
    assert torch.autograd.gradcheck(lambda W, C: cluster(W, C, impl=impl, **options).W_tilde, (W, C), eps=1e-7)


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("d", [1, 4])
def test_stops_when_the_reference_stops(d, impl):
    W, C, G = problem(1003, d, 8)
    stops = set()
    for eps in (0, 1e-4, 1e-3, 3e-3, 1e-2, 1.0):
        assert_as_exact_as_possible(W, C, G, impl, tau=1e-3, eps=eps, max_iter=6)
        stops.add(int(cluster(W, C, tau=1e-3, eps=eps, max_iter=6, impl=impl).iterations))
    assert 1 in stops
    assert 6 in stops
    assert len(stops) >= 3


def test_output_belongs_to_its_attention():
    """W~ = A C with the C that A was computed from, and the next call starts one update later."""
    W, C, _ = problem(50, 2, 4)
    W_tilde, C_next, _ = cluster(W, C, tau=1e-3, max_iter=1)
    A = torch.softmax(-torch.cdist(W, C).square() / 1e-3, 1)
    torch.testing.assert_close(W_tilde, A @ C)
    torch.testing.assert_close(C_next, (A.T @ W) / A.sum(0)[:, None])
    assert not C_next.requires_grad


# Errors of float32 against float64.  A logit is off by about u |w| |c| / tau (u = 6e-8; for d = 1 by differences
# only by u |w - c| |w| / tau), the attention by as much, relatively, and W~ by that times the distance between the
# centroids a weight lies between.  At the temperatures training uses, tau >= 0.1 m, that is below 1e-3 of a logit;
# five iterations amplify it (see above), gradients more than values.
@pytest.mark.parametrize(("d", "k"), [(1, 4), (1, 16), (1, 256), (4, 16), (8, 256), (16, 64)])
@pytest.mark.parametrize("temperature", [2.0, 0.1])
@pytest.mark.parametrize("impl", ON_CPU)
def test_float32_is_as_close_as_unrolled_float32(d, k, temperature, impl):
    W, C, G = problem(4001, d, k, torch.float32)
    C = init_centroids(W, k)
    tau = temperature * float((W - C[assign(W, C)]).square().mean())
    options = dict(tau=tau, eps=0, max_iter=5)
    wanted, _ = run(W.double(), C.double(), G.double(), "reference", **options)
    literal, _ = run(W, C, G, "reference", **options)
    got, _ = run(W, C, G, impl, **options)

    def nudge(X: Tensor, size: float) -> Tensor:
        return X.double() * (1 + size * torch.randn_like(X, dtype=torch.float64))

    # What rounding alone makes of the result: that of the weights and, in the centroids, that of a float32 sum of n
    # terms, about sqrt(n) times as large.  How a processor adds up n terms decides how much better than that it is,
    # for the literal implementation as for ours.
    unit = 2**-24
    nudged = [run(nudge(W, unit), nudge(C, len(W) ** 0.5 * unit), G.double(), "reference", **options)[0] for _ in "ab"]
    for name in ("W_tilde", "dW"):
        floor = max(error(each[name], wanted[name]) for each in nudged)
        assert error(got[name], wanted[name]) <= 4 * max(error(literal[name], wanted[name]), floor, 1e-7), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", ["reference", *ON_CPU])
def test_16_bit_weights_are_computed_in_float32(dtype, impl):
    W, C, G = problem(1009, 2, 16, dtype)
    options = dict(tau=1e-3, eps=0, max_iter=4)
    wanted, _ = run(W.double(), C.double(), G.double(), "reference", **options)
    got, _ = run(W, C, G, impl, **options)
    assert got["W_tilde"].dtype == got["dW"].dtype == dtype
    assert got["C"].dtype == torch.float32
    unit = torch.finfo(dtype).eps  # results are rounded once; what precedes is float32
    for name in ("W_tilde", "dW"):
        assert error(got[name], wanted[name]) <= unit / 2 + 1e-5
    assert error(got["C"], wanted["C"]) <= 1e-5


@pytest.mark.parametrize("impl", ["reference", *ON_CPU])
@pytest.mark.parametrize("metric", METRICS)
class TestDegenerate:
    @pytest.mark.parametrize(
        ("W", "k"),
        [
            (torch.zeros(20, 2), 4),
            (torch.full((20, 2), 0.3), 4),
            (torch.full((20, 1), 0.3), 256),
            (torch.randn(1, 3), 8),
            (torch.tensor([[0.1], [0.1], [0.2]]), 16),
        ],
        ids=["zeros", "identical", "identical-many", "one", "fewer-than-k"],
    )
    def test_stays_finite(self, W, k, metric, impl):
        got, _ = run(W, init_centroids(W, k), torch.ones_like(W), impl, tau=1e-4, metric=metric)
        assert all(value.isfinite().all() for value in got.values())

    @pytest.mark.parametrize("d", [1, 2])
    def test_centroid_without_mass_stays(self, d, metric, impl):
        W = torch.randn(50, d) * 0.01
        C = torch.cat([W[:2], torch.full((1, d), 100.0)])
        got, _ = run(W, C, torch.randn_like(W), impl, tau=1e-4, metric=metric, eps=0)
        torch.testing.assert_close(got["C"][2], C[2], rtol=0, atol=0)
        assert all(value.isfinite().all() for value in got.values())

    def test_tiny_tau_is_hard(self, metric, impl):
        W, C, G = problem(200, 2, 4, torch.float32)
        got, _ = run(W, C, G, impl, tau=1e-12, metric=metric, max_iter=1)
        torch.testing.assert_close(got["W_tilde"], C[assign(W, C)], rtol=0, atol=1e-6)


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("d", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("shape", [(5, 7), (3, 2, 3, 3), (11,), (1, 1)])
def test_any_shape_is_padded_at_the_tail(shape, d, impl):
    W = torch.randn(shape, dtype=torch.float64) * 0.05
    C = torch.randn(4, d, dtype=torch.float64) * 0.05
    got, _ = run(W, C, torch.ones_like(W), impl, tau=1e-3, eps=0)
    padded = torch.nn.functional.pad(W.reshape(-1), (0, -W.numel() % d)).view(-1, d)
    V_tilde = cluster(padded, C, tau=1e-3, eps=0, impl="reference").W_tilde
    torch.testing.assert_close(got["W_tilde"], V_tilde.reshape(-1)[: W.numel()].view(shape))
    # eps is above rounding: whether a centroid of one or two vectors moves by less does not matter
    assert_as_exact_as_possible(W, C, torch.randn_like(W), impl, tau=1e-3, eps=1e-9)


@pytest.mark.parametrize("impl", ON_CPU)
def test_non_contiguous_weights_and_gradients(impl):
    W, C, G = problem(60, 4, 8)
    wanted, _ = run(W, C, G, "reference", tau=1e-3)
    strided = torch.empty(4, 60, dtype=W.dtype).t()
    got, _ = run(strided.copy_(W), C, G.t().contiguous().t(), impl, tau=1e-3)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name])


@pytest.mark.parametrize("impl", ON_CPU)
def test_autocast_does_not_reach_the_arithmetic(impl):
    W, C, G = problem(300, 4, 16, torch.float32)
    wanted, _ = run(W, C, G, impl, tau=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = run(W, C, G, impl, tau=1e-4)
    assert torch.equal(got["W_tilde"], wanted["W_tilde"])
    assert torch.equal(got["dW"], wanted["dW"])


def test_compiles_without_graph_breaks():
    W, C, G = problem(101, 2, 4, torch.float32)
    wanted, _ = run(W, C, G, "blocked", tau=1e-3)
    compiled = torch.compile(lambda W, C: cluster(W, C, tau=1e-3), fullgraph=True, backend="aot_eager")
    W = W.requires_grad_()
    W_tilde, C_next, _ = compiled(W, C)
    torch.testing.assert_close(W_tilde, wanted["W_tilde"])
    torch.testing.assert_close(C_next, wanted["C"])
    torch.testing.assert_close(torch.autograd.grad(W_tilde, W, G)[0], wanted["dW"])


def test_compiles_with_a_learned_tau():
    W, C, G = problem(101, 2, 4, torch.float32)
    results = []
    for call in (cluster, torch.compile(cluster, fullgraph=True, backend="aot_eager")):
        tau = torch.tensor(1e-3, requires_grad=True)
        results.append(torch.autograd.grad(call(W, C, tau=tau, impl="blocked").W_tilde, tau, G)[0])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
def test_operator_is_registered_properly(impl):
    W, C, _ = problem(31, 2, 4)
    torch.library.opcheck(
        torch.ops.dkm.cluster.default,
        (
            W.reshape(-1).clone().requires_grad_(),
            C,
            torch.tensor(1e-3, dtype=W.dtype),
            1e-4,
            3,
            "sqeuclidean",
            "unrolled",
            impl,
        ),
    )


@pytest.mark.parametrize(("metric", "ours"), WAYS)
@pytest.mark.parametrize("gradient", ["unrolled", "last", "implicit"])
@pytest.mark.parametrize(("k", "d", "n"), [(4, 2, 50), (3, 1, 40), (8, 1, 60)])
def test_gradients_equal_the_reference(k, d, n, gradient, metric, ours):
    W, C, G = problem(n, d, k)
    tau = (W - C[assign(W, C)]).square().mean() * (2 if metric == "sqeuclidean" else 10)
    # to the fixed point for the gradient of it; k d <= 8, so that 8 passes solve its linear system
    iterations = dict(eps=1e-13, max_iter=20_000) if gradient == "implicit" else dict(eps=0.0, max_iter=4)
    results = []
    for impl in ("reference", ours):
        arguments = [x.clone().requires_grad_() for x in (W, C, tau)]
        W_tilde = cluster(arguments[0], arguments[1], tau=arguments[2], metric=metric, gradient=gradient, impl=impl,
                          **iterations).W_tilde  # fmt: skip
        results.append(torch.autograd.grad(W_tilde, arguments, G, materialize_grads=True))
    for wanted, got in zip(*results, strict=True):
        assert float((got - wanted).norm()) <= 1e-7 * float(wanted.norm() + G.norm() * 1e-3)


def test_last_takes_the_centroids_as_constants():
    W, C, G = problem(60, 2, 4)
    W.requires_grad_()
    three = cluster(W, C, tau=1e-3, eps=0, max_iter=3, gradient="last", impl="blocked")
    before = cluster(W, C, tau=1e-3, eps=0, max_iter=2, impl="blocked").C
    one = cluster(W, before, tau=1e-3, eps=0, max_iter=1, impl="blocked")
    torch.testing.assert_close(*(torch.autograd.grad(x.W_tilde, W, G)[0] for x in (three, one)), rtol=1e-12, atol=0)


def test_unknown_gradient():
    W, C, _ = problem(10, 1, 2)
    with pytest.raises(ValueError, match="gradient must be one of unrolled, last, implicit, got 'first'"):
        cluster(W, C, tau=1e-3, gradient="first")
