"""The methods to compare with: each is its mathematics, and all else is Clustered's."""

import copy
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dkm
from dkm import Clustered
from dkm.clustering.kernels.reference import distance
from dkm.clustering.vectors import from_vectors, to_vectors
from dkm.modelling.methods import METHODS
from dkm.modelling.methods import draws as draws_module
from dkm.modelling.methods import gumbel as gumbel_module
from dkm.modelling.methods.deep_compression import DeepCompression
from dkm.modelling.methods.draws import uniform
from dkm.modelling.methods.gumbel import Gumbel
from dkm.modelling.methods.hard import Hard
from dkm.modelling.methods.quant_noise import QuantNoise

OTHERS = tuple(METHODS)[1:]
CONFIGURATIONS = [(3, 1), (2, 3), (4, 2)]  # 85 weights: 3 does not divide them, 2 neither


def make_weight(dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn(5, 17, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype))


def make_gradient(weight: Tensor) -> Tensor:
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(weight.dtype)


def backward(W_tilde: Tensor, weight: Tensor) -> Tensor:
    return torch.autograd.grad(W_tilde, weight, make_gradient(weight))[0]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def moved(method: Clustered) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of `cluster`: centroids that are not yet those of the weight, at some step."""
    C = method.C + 0.3 * torch.randn(method.C.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return C, torch.tensor(7)


# --- the mathematics -----------------------------------------------------------------------------


def literal(V: Tensor, C: Tensor, eps: float, max_iter: int, attention):
    """The loop of the paper, with an attention of one's own: A, C, C_next and the number of iterations."""
    for iteration in range(1, max_iter + 1):
        A = attention(V, C, iteration)
        mass = A.sum(0)[:, None]
        C_next = torch.where(mass > 0, A.T @ V / mass.clamp(min=1e-300), C)
        if iteration == max_iter or (C_next - C).abs().max() <= eps:
            return A, C, C_next, iteration
        C = C_next


@pytest.mark.parametrize(("bits", "dim"), CONFIGURATIONS)
@pytest.mark.parametrize("max_iter", [1, 3, 50])
def test_hard(bits: int, dim: int, max_iter: int):
    weight = make_weight()
    hard = Hard(weight, bits, dim, max_iter=max_iter)
    start, step = moved(hard)
    found = hard.cluster(weight, start, step)

    def nearest(V: Tensor, C: Tensor, iteration: int) -> Tensor:
        return F.one_hot(distance(V, C, "sqeuclidean").argmin(1), len(C)).to(V.dtype)

    V = to_vectors(weight, dim)
    A, _, C_next, iterations = literal(V, start, hard.options.eps, max_iter, nearest)
    W_tilde = from_vectors(A @ C_next, weight.shape)
    close(found.W_tilde, W_tilde)
    close(found.C, C_next.detach())
    assert int(found.iterations) == iterations
    assert max_iter < 50 or iterations < 50  # it stops both ways
    close(backward(found.W_tilde, weight), backward(W_tilde, weight))


def test_hard_gives_each_weight_the_mean_gradient_of_its_cluster():
    weight = make_weight()
    hard = Hard(weight, 2)
    G = make_gradient(weight)
    gradient, codes = backward(hard(weight), weight), hard.codes(weight)[1].view(weight.shape)
    for j in range(4):
        close(gradient[codes == j], G[codes == j].mean().expand(int((codes == j).sum())))


def test_an_empty_cluster_stays_where_it_is():
    weight = make_weight()
    hard = Hard(weight, 2)
    hard.C = torch.tensor([[-1.0], [0.0], [1.0], [99.0]], dtype=torch.float64)
    found = hard.cluster(weight, hard.C, hard.step)
    assert found.C[3] == 99
    assert found.W_tilde.isfinite().all()


@pytest.mark.parametrize(("bits", "dim"), CONFIGURATIONS)
@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean"])
@pytest.mark.parametrize("block", [64, 1 << 20])
def test_gumbel(bits: int, dim: int, metric: str, block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gumbel_module, "BLOCK", block)
    weight, tau = make_weight(), 0.2
    gumbel = Gumbel(weight, bits, dim, tau=tau, max_iter=3, metric=metric)
    start, step = moved(gumbel)
    found = gumbel.cluster(weight, start, step)

    def drawn(V: Tensor, C: Tensor, iteration: int) -> Tensor:
        key = draws_module.mix(gumbel.key + step) + iteration
        u = uniform(key, 0, len(V) * len(C), V.dtype).view(len(V), len(C))
        return torch.softmax(-distance(V, C, metric) / tau - torch.log(-torch.log(u)), 1)

    A, C, C_next, iterations = literal(to_vectors(weight, dim), start, gumbel.options.eps, 3, drawn)
    W_tilde = from_vectors(A @ C, weight.shape)
    close(found.W_tilde, W_tilde)
    close(found.C, C_next.detach())
    assert int(found.iterations) == iterations
    close(backward(found.W_tilde, weight), backward(W_tilde, weight))


def test_gumbel_is_unbiased_in_the_assignment():
    """The largest of the noisy logits is a draw from the softmax of the logits: what Gumbel noise is for."""
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(100_000, 3)
    u = uniform(torch.tensor(1), 0, logits.numel(), torch.float32).view(logits.shape)
    share = torch.bincount((logits - (-u.log()).log()).argmax(1)) / len(logits)
    torch.testing.assert_close(share, logits[0].softmax(0), rtol=0, atol=0.006)


def test_gumbel_learns_a_temperature():
    weight = make_weight()
    gumbel = Gumbel(weight, 2, tau="learn")
    gumbel(weight).square().sum().backward()
    assert gumbel.log_multiple.grad.abs() > 0


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize(("bits", "dim"), CONFIGURATIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_dc_trains_as_if_the_centroids_were_the_parameters(bits: int, dim: int, optimizer: str):
    weight = make_weight()
    dc = DeepCompression(weight, bits, dim)
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
def test_dc_gives_each_weight_the_sum_of_the_gradients_of_its_cluster(dim: int):
    weight = make_weight()
    dc = DeepCompression(weight, 2, dim)
    C = dc.C.clone().requires_grad_()
    wanted = torch.autograd.grad(from_vectors(C[dc.cluster_of.long()], weight.shape), C, make_gradient(weight))[0]
    close(backward(dc(weight), weight), from_vectors(wanted[dc.cluster_of.long()], weight.shape))


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


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_quant_noise(dim: int, p: float):
    weight = nn.Parameter(torch.randn(100, 60, dtype=torch.float64))
    noise = QuantNoise(weight, 3, dim, p=p)
    W_tilde = noise(weight)
    V, V_tilde = to_vectors(weight.detach(), dim), to_vectors(W_tilde.detach(), dim)
    snapped = noise.C[dkm.assign(V, noise.C)]
    noisy = (V_tilde == snapped).all(1)
    assert torch.equal(V_tilde[~noisy], V[~noisy])
    assert abs(float(noisy.double().mean()) - p) < 4 * math.sqrt(p * (1 - p) / len(V)) + 1e-9
    close(backward(W_tilde, weight), make_gradient(weight))  # straight through


def test_quant_noise_draws_anew_in_every_step():
    weight = make_weight()
    noise = QuantNoise(weight, 2, p=0.5)
    first = noise(weight) == weight
    with torch.no_grad():
        weight.mul_(1.001)
    assert not torch.equal(first, noise(weight) == weight)


# --- the draws -----------------------------------------------------------------------------------


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(1, 50), st.integers(0, 50))
def test_a_draw_is_a_function_of_key_and_place(key: int, first: int, count: int, at: int):
    key = torch.tensor(key)
    drawn = uniform(key, first, count + at, torch.float32)
    assert torch.equal(drawn[at:], uniform(key, first + at, count, torch.float32))
    assert (drawn > 0).all()
    assert (drawn < 1).all()


def test_the_greatest_draw_is_below_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draws_module, "mix", lambda x: torch.full_like(x, -1))  # all bits set
    drawn = uniform(torch.tensor(0), 0, 1, torch.float32)
    assert (-(-drawn.log()).log()).isfinite()


def test_draws_are_uniform_and_independent():
    a, b = (uniform(torch.tensor(key), 0, 200_000, torch.float64) for key in (5, 6))
    counts = torch.histc(a, 20, 0, 1) / len(a)
    assert (counts - 0.05).abs().max() < 0.003
    for x, y in ((a, b), (a[1:], a[:-1]), (a[7:], a[:-7])):
        assert abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) < 0.01


@pytest.mark.parametrize("method", [Gumbel, QuantNoise])
def test_seeds_and_weights_have_draws_of_their_own(method: type[Clustered]):
    a, b = make_weight(), nn.Parameter(make_weight().detach() * 2)
    keys = [int(method(weight, 2, steps=1, seed=seed).key) for weight in (a, b) for seed in (0, 1)]
    assert len(set(keys)) == 4


# --- all else is Clustered's ---------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 30), nn.Linear(30, 5))


PLAN = "0:3, 3:4/3"


def compressed(method: str, **options) -> nn.Sequential:
    model = network()
    dkm.compress_(model, PLAN, method=method, steps=30, **options)
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(64, 12, generator=generator)
    return x, (x[:, :5] * 2 + x[:, 5:10]).argmax(1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    x, y = batch()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model.train()(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("method", METHODS)
def test_it_trains_and_the_file_holds_what_was_evaluated(method: str, tmp_path: Path):
    model = compressed(method)
    x, y = batch()
    before = F.cross_entropy(model.eval()(x), y).item()
    train(model, torch.optim.Adam(model.parameters(), 1e-2), 40)
    dkm.recalibrate_(model, [x])
    evaluated = model.eval()(x)
    assert F.cross_entropy(evaluated, y).item() < 0.5 * before
    assert len(model[0].weight.unique()) <= 8
    assert len(model[3].weight.reshape(-1, 3).unique(dim=0)) <= 16
    dkm.save(model, tmp_path / "model.dkm", dtype=torch.float32)
    loaded = dkm.load(tmp_path / "model.dkm", into=network()).eval()
    torch.testing.assert_close(loaded(x), evaluated)
    assert dkm.size(model).megabytes == dkm.plan(network(), PLAN).megabytes
    assert torch.equal(dkm.snap_(model, dtype=torch.float32).eval()(x), evaluated)


@pytest.mark.parametrize("method", OTHERS)
def test_reading_again_changes_nothing(method: str):
    model = compressed(method)
    train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    first = model[3].weight
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert torch.equal(model[3].weight, first)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("method", OTHERS)
def test_activation_checkpointing_gives_the_same_gradient(method: str):
    gradients = []
    for run in (lambda model, x: model(x), lambda model, x: checkpoint(model, x, use_reentrant=False)):
        model, x = compressed(method), batch()[0]
        train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
        model.zero_grad()
        run(model[2:], model[:2](x)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("method", OTHERS)
def test_resuming_is_exact(method: str):
    model = compressed(method)
    train(model, optimizer := torch.optim.SGD(model.parameters(), 0.1), 3)
    other = network()
    with torch.no_grad():
        other[0].weight.normal_()  # a model that was trained elsewhere
        other[3].weight.normal_()
    dkm.compress_(other, PLAN, method=method, steps=30, init="random", seed=5)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert train(other, torch.optim.SGD(other.parameters(), 0.1), 3) == train(model, optimizer, 3)


@pytest.mark.parametrize("method", OTHERS)
def test_the_monitor_watches(method: str):
    model = compressed(method)
    record = dkm.monitor(model).record(0)
    assert (record["tensors"]["0.weight"]["tau"] is None) == (method != "gumbel")
    assert 0 <= record["total"]["gap"] < 1


@pytest.mark.parametrize("method", OTHERS)
def test_frozen_weights_are_snapped(method: str):
    model = network()
    model[0].requires_grad_(False)
    dkm.compress_(model, PLAN, method=method, steps=30)
    assert len(model.train()[0].weight.unique()) == 8


@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits(method: str, dtype: torch.dtype):
    weight = make_weight(dtype)
    clustered = METHODS[method](weight, 3, 2, steps=10)
    W_tilde = clustered(weight)
    assert W_tilde.dtype == dtype
    assert clustered.C.dtype == torch.float32
    assert backward(W_tilde, weight).isfinite().all()


@pytest.mark.parametrize("method", OTHERS)
def test_autocast_does_not_touch_the_clustering(method: str):
    weight = make_weight(torch.float32)
    plain, mixed = (METHODS[method](weight, 3, 2, steps=10) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        W_tilde = mixed(weight)
    assert torch.equal(W_tilde, plain(weight))


def test_one_tensor():
    layer = dkm.cluster_weight(nn.Linear(12, 40), bits=3, method="quant_noise", p=0.3)
    assert layer.parametrizations.weight[0].options.p == 0.3


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["hard", "dc", "quant_noise"])
@pytest.mark.parametrize("tau", [1e-3, "learn", dkm.temperature.geometric(2, 0.1)])
def test_a_temperature_where_there_is_none(method: str, tau):
    with pytest.raises(ValueError, match=f'method="{method}" takes no tau, it has no temperature: leave it out'):
        dkm.compress_(network(), PLAN, method=method, tau=tau, steps=3)


@pytest.mark.parametrize(
    ("method", "options", "named"),
    [
        ("hard", dict(metric="euclidean"), "metric"),
        ("gumbel", dict(gradient="last"), "gradient"),
        ("gumbel", dict(impl="blocked"), "impl"),
        ("dc", dict(max_iter=3), "max_iter"),
    ],
)
def test_an_option_that_means_nothing(method: str, options: dict, named: str):
    with pytest.raises(ValueError, match=f'method="{method}" takes no {named}, it would change nothing'):
        dkm.compress_(network(), PLAN, method=method, steps=3, **options)


@pytest.mark.parametrize("p", [0, -0.1, 1.1, "some"])
def test_a_fraction_that_is_none(p):
    with pytest.raises(ValueError, match="p is the fraction"):
        dkm.compress_(network(), PLAN, method="quant_noise", p=p)


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(ValueError, match="one of dkm, hard, gumbel, dc, quant_noise, got 'quantnoise'; did you mean"):
        dkm.compress_(network(), PLAN, method="quantnoise")


ALL = "steps, init, seed, tau, metric, eps, max_iter, gradient, impl"


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("dkm", dict(p=0.1), f'method="dkm" takes no p, it takes {ALL}; method="quant_noise" takes p'),
        ("dkm", dict(gradients="last"), f'method="dkm" takes no gradients, it takes {ALL}; did you mean gradient?'),
        ("hard", dict(p=1), 'method="hard" takes no p, it takes steps, init, seed, eps, max_iter; method='),
        ("quant_noise", dict(q=1), 'method="quant_noise" takes no q, it takes steps, init, seed, eps, max_iter, p'),
    ],
)
def test_an_option_of_another_method_or_of_none_leaves_the_model_alone(method: str, options: dict, sentence: str):
    model = network()
    with pytest.raises(TypeError, match=re.escape(sentence)):
        dkm.compress_(model, PLAN, steps=3, method=method, **options)
    with pytest.raises(TypeError, match=re.escape(sentence)):
        dkm.cluster_weight(model[0], bits=2, method=method, **options)
    assert type(model[0]) is nn.Linear


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_fully_shard_is_refused():
    model = compressed("hard")
    with pytest.raises(NotImplementedError, match='method="hard" cannot be sharded'):
        fully_shard(model)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("method", OTHERS)
def test_data_parallel(method: str):
    plain, parallel = compressed(method), compressed(method)
    wrapped = nn.parallel.DistributedDataParallel(parallel)
    losses = [train(model, torch.optim.SGD(model.parameters(), 0.1), 3) for model in (plain, wrapped)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("method", OTHERS)
def test_it_compiles_without_a_break(method: str):
    plain, other = network(), network()
    for model in (plain, other):
        dkm.compress_(model, "0:3", method=method, steps=30)
    whole = torch.compile(other, backend="aot_eager", fullgraph=True)
    losses = [train(model, torch.optim.SGD(model.parameters(), 0.1), 3) for model in (plain, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
