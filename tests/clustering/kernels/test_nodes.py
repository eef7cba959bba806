"""Single weights through the nodes of bins: as exact as float32, against the literal implementation in float64."""

import pytest
import torch
from torch import Tensor

import dkm
from dkm import assign, cluster, init_centroids
from dkm.clustering.kernels import blocked
from dkm.clustering.kernels.nodes import Nodes, nodes_for
from dkm.clustering.options import ClusterOptions

N = 30_000


def weights(mean: float = 0.0, tails: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(N, generator=generator, dtype=torch.float64) + mean
    return (W.pow(3) if tails else W).mul(0.05).float()


def temperature(W: Tensor, C: Tensor, multiple: float) -> float:
    return multiple * float((W[:, None] - C[assign(W[:, None], C)]).square().mean())


def gradients(W: Tensor, C: Tensor, tau: float, impl: str, dtype: torch.dtype, **options) -> dict[str, Tensor]:
    G = torch.randn(N, generator=torch.Generator().manual_seed(1)).to(dtype)
    inputs = dict(
        W=W.to(dtype).requires_grad_(),
        C=C.to(dtype).requires_grad_(),
        tau=torch.tensor(tau, dtype=dtype, requires_grad=True),
    )
    found = cluster(**inputs, impl=impl, **options)
    wanted = torch.autograd.grad(found.W_tilde, list(inputs.values()), G, materialize_grads=True)
    return dict(W_tilde=found.W_tilde.detach(), C=found.C) | {
        f"d{name}": g for name, g in zip(inputs, wanted, strict=True)
    }


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-300))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Nodes | None]:
    """The nodes that the loop asks for."""
    found: list[Nodes | None] = []

    def remember(*arguments) -> Nodes | None:
        found.append(nodes_for(*arguments))
        return found[-1]

    monkeypatch.setattr(blocked, "nodes_for", remember)
    return found


@pytest.mark.parametrize("mean", [0.0, 1.0, 100.0])  # in standard deviations
@pytest.mark.parametrize(("k", "multiple"), [(3, 100.0), (4, 2.0), (4, 0.3), (8, 0.7), (16, 3.0), (40, 100.0)])
@pytest.mark.parametrize("gradient", ["unrolled", "last"])
def test_as_accurate_as_the_reference(k: int, multiple: float, mean: float, gradient: str, used: list[Nodes | None]):
    """Against float64 on the same float32 inputs; ours may have twice the error of float32."""
    W = weights(mean)
    C = init_centroids(W[:, None], k)
    tau = temperature(W, C, multiple)
    options = dict(eps=0, max_iter=4, gradient=gradient)
    exact = gradients(W, C, tau, "reference", torch.double, **options)
    literal = gradients(W, C, tau, "reference", torch.float, **options)
    ours = gradients(W, C, tau, "blocked", torch.float, **options)
    assert used
    assert None not in used
    errors = {name: error(literal[name], exact[name]) for name in exact}
    errors["dtau"] = max(errors["dtau"], errors["dW"])  # one number may be right by chance
    for name in exact:
        assert error(ours[name], exact[name]) <= 2 * errors[name] + 1e-6, name


def test_centroids_that_move_apart_get_narrower_bins(used: list[Nodes | None]):
    W = weights()
    C = torch.linspace(0.0, 0.02, 4)[:, None]  # k-means is at -0.08 to 0.08
    options = dict(eps=0, max_iter=30)
    exact = gradients(W, C, 2e-4, "reference", torch.double, **options)
    ours = gradients(W, C, 2e-4, "blocked", torch.float, **options)
    assert len({nodes.bins for nodes in used if nodes is not None}) >= 2
    assert error(ours["W_tilde"], exact["W_tilde"]) < 1e-5
    assert error(ours["dW"], exact["dW"]) < 1e-4


def test_the_iterations_end_where_the_reference_ends(used: list[Nodes | None]):
    W = weights()
    C = init_centroids(W[:, None], 4) + 0.01
    stops = set()
    for eps in (1e-4, 1e-3, 1e-2):
        ours, wanted = (cluster(W, C, tau=1e-3, eps=eps, max_iter=9, impl=way) for way in ("blocked", "reference"))
        assert ours.iterations == wanted.iterations
        stops.add(int(ours.iterations))
    assert len(stops) == 3
    assert None not in used


def test_an_empty_centroid_stays(used: list[Nodes | None]):
    W = weights()
    C = torch.tensor([[-0.05], [0.0], [0.05], [0.9]])
    found = cluster(W, C, tau=2e-3, max_iter=3, impl="blocked")
    assert None not in used
    assert float(found.C[3]) == float(C[3])
    assert found.W_tilde.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights(dtype: torch.dtype, used: list[Nodes | None]):
    W = weights().to(dtype)
    C = init_centroids(W[:, None], 4)
    exact = gradients(W, C, 5e-4, "reference", torch.double, max_iter=3)
    W.requires_grad_()
    W_tilde = cluster(W, C, tau=5e-4, max_iter=3, impl="blocked").W_tilde
    (dW,) = torch.autograd.grad(W_tilde, W, torch.ones_like(W))
    assert W_tilde.dtype == dW.dtype == dtype
    assert error(W_tilde.detach(), exact["W_tilde"]) <= torch.finfo(dtype).eps  # of the result's rounding
    assert used
    assert None not in used


@pytest.mark.parametrize(
    ("W", "tau", "reason"),
    [
        (weights().double(), 1e-3, "float64 is more exact than polynomials"),
        (weights()[:100], 1e-3, "too few weights"),
        (weights(), 1e-9, "too cold"),
        (torch.cat([weights(), torch.tensor([1e4])]), 1e-3, "too wide"),
        (torch.cat([weights(), torch.tensor([torch.nan])]), 1e-3, "not finite"),
        (torch.cat([weights(), torch.tensor([torch.inf])]), 1e-3, "not finite"),
        (torch.full((N,), 0.3), 1e-3, "all equal"),
    ],
)
def test_where_there_are_none(W: Tensor, tau: float, reason: str):
    C = torch.linspace(-0.1, 0.1, 4, dtype=torch.promote_types(W.dtype, torch.float32))[:, None]
    assert nodes_for(W, C, tau, ClusterOptions()) is None, reason


def test_none_for_a_distance_with_kinks():
    C = torch.linspace(-0.1, 0.1, 4)[:, None]
    assert nodes_for(weights(), C, 1e-2, ClusterOptions(metric="euclidean")) is None


def test_sums_and_functions_of_polynomials_are_exact():
    W, nodes = weights(), Nodes(-0.3, 0.3, bins=7, order=4, gap=1.0)
    G = torch.randn(N, generator=torch.Generator().manual_seed(1))
    W = W.clamp(-0.3, 0.3)
    cubic = lambda x: 1 + x - 20 * x**2 + 300 * x**3  # noqa: E731
    counts, pulls = nodes.gather(W, None, G)
    exact = cubic(W.double())
    torch.testing.assert_close((counts * cubic(nodes.x)).sum(), exact.sum(), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close((pulls * cubic(nodes.x)).sum(), (exact * G).sum(), rtol=1e-12, atol=1e-9)
    found = torch.cat([values for _, (values,) in nodes.evaluate(W, cubic(nodes.x))])
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)


def test_shards_add_up(used: list[Nodes | None]):
    """Two processes with half of the weights each make the centroids of all."""
    W = weights()
    C = init_centroids(W[:, None], 4)
    tau, options = torch.tensor(5e-4), ClusterOptions(max_iter=1)
    _, whole = blocked.forward(W, C, tau, options)
    sums: list[Tensor] = []
    for half in W.split(N // 2):
        blocked.forward(half.contiguous(), C, tau, options, reduce=lambda X: sums.append(X) or X)
    assert {X.dtype for X in sums} == {torch.float32}
    added = sums[0] + sums[1]
    torch.testing.assert_close(added[:, :1] / added[:, 1:], whole.trail[-1, :, :1], rtol=1e-5, atol=1e-7)


def test_a_training_step_of_a_layer(used: list[Nodes | None]):
    torch.manual_seed(0)
    layer = torch.nn.Linear(128, 128, bias=False)
    dkm.compress_(layer, "weight:2/1", steps=10, impl="blocked")
    layer(torch.randn(4, 128)).square().mean().backward()
    assert layer.parametrizations.weight.original.grad.isfinite().all()
    assert used
    assert None not in used
