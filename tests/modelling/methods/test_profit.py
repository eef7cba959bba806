"""PROFIT by its definition."""

import copy
import math

import pytest
import torch
from method_helpers import PLAN, backward, close, make_gradient, make_weight, network
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

import dkm
from dkm.modelling.methods.profit import Profit, rank

X = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))


def made(weight: nn.Parameter, bits: int, **options) -> Profit:
    profit = Profit(weight, bits, **{"steps": 100} | options)
    profit.give("batches")
    return profit


def rounded(x: Tensor, levels: int) -> Tensor:
    values = torch.linspace(-1, 1, levels + 1, dtype=x.dtype)
    return values[(x[..., None] - values).abs().argmin(-1)]


# --- the quantiser -------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_profit(bits: int):
    weight = make_weight()
    with torch.no_grad():
        weight[0, 0] = 20.0  # outside of the range
    profit = made(weight, bits, lowering=0)
    with torch.no_grad():
        profit.offsets.copy_(torch.tensor([-0.2, 0.3]))
    levels, clip, scale = profit.ladder[-1]
    assert float(levels) == 2**bits - 1
    one = math.log(math.e - 1)
    clip, scale = (
        clip * F.softplus(profit.offsets[0].detach() + one),
        scale * F.softplus(profit.offsets[1].detach() + one),
    )
    W_tilde = profit(weight)
    wanted = scale * rounded((weight.detach() / clip).clamp(-1, 1), 2**bits - 1)
    close(W_tilde.detach(), wanted)
    inside = weight.detach().abs() <= clip
    assert not inside.all()
    close(backward(W_tilde, weight), make_gradient(weight) * inside * scale / clip)
    C, codes = profit.codes(weight)
    torch.testing.assert_close(C.double()[codes].view(weight.shape), wanted, rtol=2**-10, atol=0)
    assert len(C) == 2**bits == len(C.unique())


def test_the_first_range_has_the_least_error_of_many():
    weight = make_weight()
    W = weight.detach()
    for levels, clip, scale in made(weight, 2).ladder:

        def error(clip: Tensor, scale: Tensor | None = None, levels=int(levels)) -> Tensor:
            q = rounded((W / clip).clamp(-1, 1), levels)
            return (W - ((W * q).sum() / q.square().sum() if scale is None else scale) * q).square().sum()

        widths = W.abs().max() * torch.linspace(0.05, 1, 200, dtype=torch.float64)
        assert error(clip, scale) <= 1.1 * min(error(width) for width in widths)
        close(error(clip, scale), error(clip))  # the scale is the best one for its clip


def test_a_step_of_sgd_on_the_scale_is_a_part_of_the_step_of_the_weights_projected_to_it():
    """Along W~ itself, W~ - lr G moves by lr <G, W~> / |W~|^2 of W~; softplus has the slope 1 - 1 / e where it is 1."""
    weight, G = make_weight(), make_gradient(make_weight())
    profit = made(weight, 2, lowering=0)
    W_tilde = profit(weight)
    W_tilde.backward(G)
    values = W_tilde.detach()
    close(profit.offsets.grad[1], (1 - 1 / math.e) * (G * values).sum() / values.square().sum())


# --- the phases ----------------------------------------------------------------------------------


def test_the_bits_fall_to_those_of_the_plan():
    weight = nn.Parameter(torch.randn(100, 100, generator=torch.Generator().manual_seed(0)))
    profit = made(weight, 2, lowering=0.4)

    def values(step: int) -> int:
        return len(profit.cluster(weight, profit.C, torch.tensor(step)).W_tilde.unique())

    for step, bits in ((0, 8), (9, 8), (10, 5), (20, 4), (30, 3), (39, 3), (40, 2), (99, 2), (500, 2)):
        assert 2 ** (bits - 1) < values(step) <= 2**bits
    assert [len(made(weight, bits).ladder) for bits in (1, 4, 5, 8)] == [6, 3, 2, 1]


@pytest.mark.parametrize(("third", "frozen_from"), [(0, 60), (1, 80), (2, 100 - 1)])
def test_each_third_is_frozen_at_its_time(third: int, frozen_from: int):
    profit = made(make_weight(), 2, lowering=0.4, last=0.01)
    profit.third.fill_(third)
    frozen = [bool(profit.frozen(torch.tensor(step))) for step in range(100)]
    first = round(100 * (0.4 + 0.59 * (third + 1) / 3))
    assert frozen == [step >= first for step in range(100)]
    assert abs(first - frozen_from) <= 1


def model_of_three() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 5))
    dkm.compress_(model, "all:2", method="profit", steps=20, lowering=0.2, last=0.2)
    return dkm.calibrate_(model, [X])


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model.train()(X), X[:, :5].argmax(1)).backward()
    optimizer.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_frozen_stays_whatever_the_optimizer_does(optimizer: str):
    model = model_of_three()
    by = OPTIMIZERS[optimizer](model.parameters())
    order = sorted((0, 2, 4), key=lambda i: int(model[i].parametrizations.weight[0].third))
    read: dict[int, list[Tensor]] = {i: [] for i in order}
    biases = []
    for number in range(24):
        step(model, by)
        for i in order:
            plain = model[i].parametrizations.weight.original
            assert bool((plain.grad == 0).all()) == (number >= {order[0]: 8, order[1]: 12, order[2]: 16}[i])
            with torch.no_grad():
                read[i].append(model[i].weight)
        biases.append(model[0].bias.detach().clone())
    for i, first in zip(order, (8, 12, 16), strict=True):
        # read after step `number`, it is what step `number + 1` computes with
        for number in range(23):
            assert torch.equal(read[i][number], read[i][number + 1]) == (number >= first - 1)
        snapped = model.eval()[i].weight
        torch.testing.assert_close(snapped, read[i][-1], rtol=2**-10, atol=0)
    assert not torch.equal(biases[-2], biases[-1])  # what is not clustered trains on


def test_a_run_that_is_resumed_within_the_phases_is_the_same():
    model = model_of_three()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    for _ in range(10):
        step(model, optimizer)
    other = network_without_state()
    resumed = OPTIMIZERS["adam"](other.parameters())
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(12):
        step(model, optimizer)
        step(other, resumed)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def network_without_state() -> nn.Sequential:
    """As `model_of_three`, but never calibrated, and from other weights."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 5))
    dkm.compress_(model, "all:2", method="profit", steps=20, lowering=0.2, last=0.2)
    return model


# --- the order -----------------------------------------------------------------------------------


def divergence(moved: Tensor, before: Tensor) -> Tensor:
    """`(n, channels)` twice: the mean over the channels of the divergence of a Gaussian for each."""
    gaussians = [Normal(x.mean(0), x.std(0, correction=0)) for x in (moved.double(), before.double())]
    return kl_divergence(*gaussians).mean()


LAYERS = {  # made in the test, which has a seed
    "linear": lambda: (nn.Linear(6, 10), torch.randn(40, 6), lambda out: out),
    "sequence": lambda: (nn.Linear(6, 10), torch.randn(8, 5, 6), lambda out: out.flatten(0, 1)),
    "conv2d": lambda: (nn.Conv2d(3, 8, 3), torch.randn(4, 3, 7, 7), lambda out: out.movedim(1, -1).flatten(0, 2)),
    "transposed": lambda: (
        nn.ConvTranspose1d(3, 8, 3),
        torch.randn(4, 3, 7),
        lambda out: out.movedim(1, -1).flatten(0, 1),
    ),
    "embedding": lambda: (nn.Embedding(200, 6), torch.arange(200), lambda out: out),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_tensor_is_as_unstable_as_quantisation_moves_the_outputs_of_its_layer(kind: str):
    layer, x, by_channel = LAYERS[kind]()
    batches = x.chunk(2)
    before = [by_channel(layer(batch)) for batch in batches]
    dkm.compress_(layer, "weight:1", method="profit", steps=3)
    dkm.calibrate_(layer, batches)
    moved = [by_channel(layer.eval()(batch)) for batch in batches]
    wanted = torch.stack([divergence(a, b) for a, b in zip(moved, before, strict=True)]).mean()
    assert layer.parametrizations.weight[0].instability == pytest.approx(float(wanted.detach()), rel=1e-4)


@pytest.mark.parametrize("count", range(1, 8))
def test_the_least_stable_third_is_the_first(count: int):
    clusterings = [made(make_weight(), 2) for _ in range(count)]
    for number, clustered in enumerate(clusterings):
        clustered.instability = float(number)
    rank(clusterings)
    thirds = [int(clustered.third) for clustered in reversed(clusterings)]
    assert thirds == [0] * (count // 3) + [1] * (2 * count // 3 - count // 3) + [2] * (count - 2 * count // 3)


def test_frozen_parameters_take_nobodys_place():
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(6)))
    for i in (1, 3, 5):
        model[i].weight.requires_grad_(False)
    dkm.compress_(model, "all:2", method="profit", steps=3)
    dkm.calibrate_(model, [X])
    assert sorted(int(model[i].parametrizations.weight[0].third) for i in (0, 2, 4)) == [0, 1, 2]


def test_a_recurrent_layer_counts_as_stable():
    model = nn.LSTM(12, 8)
    dkm.compress_(model, "all:2", method="profit", steps=3)
    dkm.calibrate_(model, [X])
    model.train()(X)
    assert {chain[0].instability for chain in model.parametrizations.values()} == {0.0}


def test_outputs_that_are_not_finite():
    layer = nn.Linear(12, 5)
    dkm.compress_(layer, "weight:2", method="profit", steps=3)
    with pytest.raises(dkm.NeedError, match="outputs that are not finite, of the layer with weight: give other"):
        dkm.calibrate_(layer, [X * math.nan])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(steps=3, lowering=0.8, last=0.3), "lowering and last are parts of one training, at most 1 together"),
        (dict(steps=3, last=-1), "last must be a number >= 0"),
        (dict(), "profit lowers the bits and freezes layers over the training: say how many"),
    ],
)
def test_options(options: dict, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        dkm.compress_(network(), PLAN.replace("/3", ""), method="profit", **options)
