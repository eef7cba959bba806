"""LR-Net by its definition: the moments of what a layer outputs, against every outcome of its weights."""

import itertools
from pathlib import Path

import pytest
import torch
from method_helpers import PLAN, close, make_weight, network, within
from torch import Tensor, nn
from torch.nn import functional as F

import dkm
from dkm.modelling.methods import lr_net as module_of_lr_net
from dkm.modelling.methods.lr_net import LRNet


def probabilities(lr: LRNet, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`(k,)` values and `(k, *shape)` probabilities, literally; without sharpness."""
    scales = 1.0 if lr.scales is None else lr.scales.view(-1, *(1,) * (weight.ndim - 1))
    s, a = lr.first[0], lr.first[1] * lr.log_ratio.exp()
    u = weight.detach() / scales / s
    if lr.bits == 1:
        return a * torch.tensor([-1.0, 1.0]).double(), torch.stack([torch.sigmoid(-2 * u), torch.sigmoid(2 * u)])
    zero = torch.sigmoid(lr.Z / s)
    up = torch.sigmoid(2 * u / (1 - zero))
    each = torch.stack([(1 - zero) * (1 - up), zero, (1 - zero) * up])
    return a * torch.tensor([-1.0, 0.0, 1.0]).double(), each


def clustered(layer: nn.Module, bits: int, scaled: bool = False, **options) -> tuple[LRNet, nn.Parameter]:
    dkm.compress_(layer, f"weight:{bits}{' scaled' * scaled}", method="lr-net", **(dict(sharpness=1) | options))
    chain = layer.parametrizations.weight
    return chain[0], chain.original


def changed(lr: LRNet) -> None:
    """Parameters that are not the first ones."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in lr.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


@pytest.fixture
def one_noise(monkeypatch: pytest.MonkeyPatch):
    """The noise is 1: what a layer outputs is then the mean and a standard deviation."""
    monkeypatch.setattr(module_of_lr_net, "normal", lambda key, count, dtype: torch.ones(count, dtype=dtype))


@pytest.mark.usefixtures("one_noise")
@pytest.mark.parametrize(("bits", "scaled"), [(1, False), (2, False), (1, True), (2, True)])
def test_the_moments_of_an_output_are_those_of_all_outcomes(bits: int, scaled: bool):
    """All 2^6 or 3^6 weights that a row can become, each with its probability."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 3).double()
    lr, weight = clustered(layer, bits, scaled)
    changed(lr)
    x = torch.randn(5, 6, dtype=torch.float64)
    values, p = probabilities(lr, weight)
    y = layer(x)
    for row in range(3):
        mean, square = torch.zeros(5).double(), torch.zeros(5).double()
        for outcome in itertools.product(range(len(values)), repeat=6):
            chance = torch.stack([p[outcome[i], row, i] for i in range(6)]).prod()
            given = x @ values[list(outcome)] * (1 if lr.scales is None else lr.scales[row]) + layer.bias[row]
            mean, square = mean + chance * given, square + chance * given.square()
        torch.testing.assert_close(y[:, row], mean + (square - mean.square()).sqrt(), rtol=1e-9, atol=1e-9)


LAYERS = {
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 9)),
    "conv2d": (nn.Conv2d(3, 5, (3, 2), dilation=(1, 2), padding="valid"), (2, 3, 6, 6)),
    "circular": (nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular"), (2, 3, 6, 6)),
    "conv3d": (nn.Conv3d(2, 3, 2, bias=False), (2, 2, 3, 3, 3)),
    "one image": (nn.Conv2d(3, 5, 3), (3, 6, 6)),
    "one vector": (nn.Linear(7, 5), (7,)),
    "sequences": (nn.Linear(7, 5), (2, 3, 7)),
}


@pytest.mark.usefixtures("one_noise")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("scaled", [True, False])
def test_every_kind_of_layer(kind: str, scaled: bool):
    """The variance is linear: that of each weight alone, times the square of the input that it meets."""
    torch.manual_seed(0)
    layer, shape = LAYERS[kind]
    layer = type(layer)(**arguments(layer)).double()
    x = torch.randn(shape, dtype=torch.float64)
    plain = type(layer)(**arguments(layer) | dict(bias=False)).double()
    lr, weight = clustered(layer, 2, scaled)
    values, p = probabilities(lr, weight)
    rows = 1.0 if lr.scales is None else lr.scales.view(-1, *(1,) * (weight.ndim - 1))
    values = values.view(-1, *(1,) * weight.ndim) * rows
    mean = (p * values).sum(0)
    variance = (p * values.square()).sum(0) - mean.square()

    def computed(weight: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            plain.weight.copy_(weight)
            return plain(x)

    bias = 0.0 if layer.bias is None else layer.bias.detach()
    if layer.bias is not None and isinstance(layer, nn.modules.conv._ConvNd):
        bias = bias.view(-1, *(1,) * len(layer.kernel_size))
    wanted = computed(mean, x) + bias + computed(variance, x.square()).sqrt()
    torch.testing.assert_close(layer(x).detach(), wanted, rtol=1e-9, atol=1e-9)


def arguments(layer: nn.Module) -> dict:
    if isinstance(layer, nn.Linear):
        return dict(in_features=layer.in_features, out_features=layer.out_features)
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    return {name: getattr(layer, name) for name in names} | dict(bias=layer.bias is not None)


@pytest.mark.parametrize("bits", [1, 2])
def test_the_mean_is_about_the_weight_at_first(bits: int):
    weight = make_weight()
    lr = LRNet(weight, bits, sharpness=1)
    values, p = probabilities(lr, weight)
    mean = (p * values.view(-1, 1, 1)).sum(0).detach()
    close(lr(weight).detach(), mean)
    error = (mean - weight).detach()
    assert float((error * mean).sum().abs()) < 1e-12  # no other a is nearer
    assert float(error.square().mean()) < 0.1 * float(weight.detach().square().mean())
    close(p.sum(0), torch.ones_like(weight))


def test_its_first_probabilities_of_zero_are_the_papers():
    weight = make_weight()
    lr = LRNet(weight, 2, sharpness=1)
    u = weight.detach() / weight.detach().std(correction=0)
    wanted = (0.95 - 0.9 * u.abs()).clamp(min=0.05)
    close(torch.sigmoid(lr.Z / lr.first[0]).detach(), wanted)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("scaled", [True, False])
def test_evaluation_takes_the_most_probable_values(bits: int, scaled: bool, tmp_path: Path):
    torch.manual_seed(0)
    layer = nn.Linear(30, 20).double()
    lr, weight = clustered(layer, bits, scaled)
    changed(lr)
    values, p = probabilities(lr, weight)
    wanted = values[p.argmax(0)] * (1 if lr.scales is None else lr.scales[:, None])
    torch.testing.assert_close(layer.eval().weight, wanted, rtol=2**-9, atol=1e-8)  # two roundings to 16 bits
    assert len(lr.codes(weight)[1].unique()) == bits + 1
    dkm.save(layer, tmp_path / "layer.dkm", dtype=torch.float32)
    assert torch.equal(dkm.load(tmp_path / "layer.dkm")["weight"], layer.weight.float())


def test_probabilities_sharpen_to_their_most_probable_values():
    weight = make_weight()
    for bits in (1, 2):
        lr = LRNet(weight, bits, steps=10, sharpness=1e6)
        begin, end = (lr.moments(weight, lr.steepness(torch.tensor(step))) for step in (0, 10))
        assert begin.variance.mean() > 0.1
        assert end.variance.max() < 1e-3
        lr.step.fill_(10)
        values, codes = lr.coded(weight.detach().view(-1))
        # zero has a probability of 1 - 1e-6 at most
        torch.testing.assert_close((lr.scale() * end.mean).detach(), values[codes].view(5, 17), rtol=0, atol=1e-5)


def test_the_noise_is_normal_and_changes_with_the_step_only():
    torch.manual_seed(0)
    layer = nn.Linear(40, 500)
    lr, weight = clustered(layer, 2)
    x = torch.randn(64, 40)
    y = layer(x)
    assert torch.equal(layer(x), y)
    mean = F.linear(x, layer.weight, layer.bias)
    moments = lr.moments(weight, lr.steepness(lr.step))
    deviation = lr.scale() * F.linear(x.square(), moments.variance).sqrt()
    noise = ((y - mean) / deviation).detach()  # 32,000 draws: their mean has a deviation of 0.006
    assert abs(float(noise.mean())) < 0.03
    assert abs(float(noise.var()) - 1) < 0.05
    assert abs(float(noise.pow(4).mean()) - 3) < 0.3
    with torch.no_grad():
        weight.mul_(1 + 2**-20)
    assert (layer(x) - y).abs().mean() > 0.5 * deviation.mean()
    layer.eval()
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def test_an_input_of_zeros_has_a_gradient():
    layer = nn.Linear(6, 3)
    clustered(layer, 2)
    x = torch.zeros(2, 6, requires_grad=True)
    layer(input=x).square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
        self.b.weight = self.a.weight


class Own(nn.Linear):
    """A layer that may compute something else."""


@pytest.mark.parametrize(
    ("model", "plan", "sentence"),
    [
        (nn.Sequential(nn.Embedding(9, 4)), "0:2", "but 0.weight belongs to the class Embedding: name it with"),
        (nn.Sequential(nn.LSTM(9, 4)), "0:2", "but 0.weight_ih_l0 belongs to the class LSTM: name it with"),
        (nn.Sequential(nn.ConvTranspose2d(2, 4, 3)), "0:2", "but 0.weight belongs to the class ConvTranspose2d: name"),
        (nn.Sequential(Own(9, 4)), "0:2", "but 0.weight belongs to the class Own: name it with"),
        (nn.MultiheadAttention(8, 2), "out_proj:2", "belongs to the class NonDynamicallyQuantizableLinear: name it"),
        (Tied(), "a:2", "a.weight and b.weight are one tensor of several layers: name it with"),
    ],
)
def test_layers_that_it_does_not_know(model: nn.Module, plan: str, sentence: str):
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=f'method="lr-net" changes what a layer computes, .*{sentence}'):
        dkm.compress_(model, plan, method="lr-net", sharpness=1)
    assert list(model.state_dict()) == before


def test_one_layer_by_cluster_weight():
    with pytest.raises(ValueError, match="belongs to the class Embedding"):
        dkm.cluster_weight(nn.Embedding(9, 4), bits=2, method="lr-net", sharpness=1)
    layer = dkm.cluster_weight(nn.Linear(9, 4), bits=2, method="lr-net", sharpness=1)
    x = torch.randn(3, 9)
    assert not torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias))


def test_nothing_is_left_on_a_layer_that_is_plain_again():
    model = network()
    dkm.compress_(model, within("lr-net", PLAN), method="lr-net", steps=3)
    assert sum(name.rsplit(".")[-1] in ("Z", "log_ratio") for name, _ in model.named_parameters()) == 4
    dkm.snap_(model)
    plain = network()
    for ours, theirs in zip(model, plain, strict=True):
        assert type(ours) is type(theirs)
        assert ours._forward_hooks == theirs._forward_hooks
        assert ours._forward_hooks_with_kwargs == theirs._forward_hooks_with_kwargs


def test_frozen_layers_have_no_noise():
    layer = nn.Linear(9, 4).requires_grad_(False)
    clustered(layer, 2)
    x = torch.randn(3, 9)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_options():
    with pytest.raises(ValueError, match=r"sharpen by sharpness=10 over the training: say .*; or give sharpness=1"):
        dkm.compress_(network(), within("lr-net", PLAN), method="lr-net")
    with pytest.raises(ValueError, match='"lr-net" has 2 bits per weight at most: name the tensor with 2 or "keep"'):
        dkm.compress_(network(), "0:3", method="lr-net", steps=3)
