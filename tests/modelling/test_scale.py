"""The clustering does not depend on the scale of the weights, from 1e-30 to 1e30."""

import copy
from pathlib import Path

import pytest
import torch
from method_helpers import within
from torch import Tensor, nn

import dkm
from dkm.clustering.precision import PLAIN_EXPONENTS
from dkm.modelling.methods import METHODS
from dkm.modelling.parameters import clusterings

EXPONENTS = [-100, -66, -40, -20, -17, -13, 18, 20, 40, 66, 100]  # 2^100 is about 1e30
PLANS = ["weight:2", "weight:5", "weight:3/2", "weight:4/4", "weight:3/5"]


def clustered_layer(exponent: int, plan: str, **options) -> nn.Linear:
    """A layer of random weights times 2^exponent: the products are exact."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(24, 30, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(30, 24, generator=generator) * 2.0 ** (exponent - 5))
    dkm.compress_(layer, plan, **({"steps": 4} | options))
    dkm.method_loss(layer)  # for those methods that would miss it
    # of a scale for which the answers are those of the weight itself
    return dkm.calibrate_(layer, [torch.randn(40, 24, generator=generator) * 2.0**-exponent])


def trained(exponent: int, plan: str, **options) -> tuple[list[Tensor], Tensor, list[int]]:
    """W~ and the snapped weight in units of 2^exponent, and the iterations, while the weights move a little."""
    layer = clustered_layer(exponent, plan, **options)
    weight, clustering = layer.parametrizations.weight.original, clusterings(layer)[0]
    generator = torch.Generator().manual_seed(1)
    soft, iterations = [], []
    for _ in range(4):
        soft.append(layer.weight.detach().double() * 2.0**-exponent)
        iterations.append(int(clustering.iterations))
        with torch.no_grad():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.002 * 2.0**exponent)
    return soft, layer.eval().weight.double() * 2.0**-exponent, iterations


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_scaled_weight_is_clustered_as_the_weight_itself(exponent: int, plan: str):
    """A power of two changes no digit, so the results are the same numbers: sums are rounded alike."""
    soft, snapped, iterations = trained(exponent, plan)
    wanted_soft, wanted, wanted_iterations = trained(0, plan)
    assert iterations == wanted_iterations
    for got, expected in zip(soft, wanted_soft, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(snapped, wanted, rtol=2**-10, atol=1e-6)  # centroids in float16


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("exponent", [-100, -20, 20, 100])
def test_every_method(method: str, exponent: int):
    plan = within(method, "weight:3/2")
    soft, snapped, _ = trained(exponent, plan, method=method)
    assert all(values.isfinite().all() for values in soft)
    outliers = 2 if method == "gobo" else 0
    assert len(snapped.view(-1, int(plan[-1])).unique(dim=0)) <= 8 + outliers
    error = (snapped - trained(0, plan, method=method)[1]).abs().max()
    assert error < 0.2 if method in ("gumbel", "quant_noise") else error < 1e-3  # those two draw by the weight's bits


@pytest.mark.parametrize("exponent", [-100, -20, 20, 100])
def test_the_gradient_scales_as_it_should(exponent: int):
    gradients = []
    for e in (0, exponent):
        layer = clustered_layer(e, "weight:3/2")
        G = torch.randn(30, 24, generator=torch.Generator().manual_seed(2)) * 2.0**-e  # of a loss that undoes the scale
        (gradient,) = torch.autograd.grad(layer.weight, layer.parametrizations.weight.original, G)
        gradients.append(gradient * 2.0**e)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exponent", [-100, -20, -5, 20, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_evaluation_snap_and_file_agree(exponent: int, dtype: torch.dtype, tmp_path: Path):
    layer = clustered_layer(exponent, "weight:3/2").to(dtype).eval()
    dkm.save(layer, tmp_path / "layer.dkm")
    loaded = dkm.load(tmp_path / "layer.dkm", into=nn.Linear(24, 30, bias=False, dtype=dtype))
    assert torch.equal(loaded.weight, layer.weight)
    assert torch.equal(dkm.snap_(copy.deepcopy(layer)).weight, layer.weight)
    assert loaded.weight.any()


@pytest.mark.parametrize("exponent", [-20, 0, 20])
def test_a_checkpoint_brings_its_scale_along(exponent: int):
    source, target = clustered_layer(exponent, "weight:3/2"), clustered_layer(2, "weight:3/2")
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight, source.weight)
    assert torch.equal(target.eval().weight, source.eval().weight)
    assert clusterings(target)[0].loop == clusterings(source)[0].loop


@pytest.mark.parametrize("fresh", [0, 40])
def test_a_checkpoint_without_exponents(fresh: int):
    source, target = clustered_layer(0, "weight:3/2"), clustered_layer(fresh, "weight:3/2")
    state = source.state_dict()
    del state["parametrizations.weight.0.exponent"]
    target.load_state_dict(state)
    assert torch.equal(target.weight, source.weight)


def test_ordinary_weights_are_not_scaled():
    assert all(clusterings(clustered_layer(e, "weight:2"))[0].shift == 0 for e in (-5, 0, 5))
    assert -12 in PLAIN_EXPONENTS


def test_eps_is_the_papers_but_for_extreme_weights_with_a_relative_temperature():
    fixed, annealed = (clusterings(clustered_layer(30, "weight:2", tau=tau))[0] for tau in (1e-3, "auto"))
    assert fixed.loop.eps == pytest.approx(1e-4 * 2.0**-fixed.shift)  # of the divided weight
    assert annealed.loop.eps == pytest.approx(1e-4 * 2.0**5)
    assert clusterings(clustered_layer(3, "weight:2"))[0].loop.eps == 1e-4


@pytest.mark.parametrize("value", [0.0, 1e-30, -1e30])
def test_weights_that_are_all_equal(value: float, tmp_path: Path):
    layer = nn.Linear(8, 8, bias=False)
    nn.init.constant_(layer.weight, value)
    dkm.compress_(layer, "weight:2", steps=4)
    assert layer.weight.isfinite().all()
    torch.testing.assert_close(layer.eval().weight, torch.full((8, 8), value), rtol=2**-10, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e-6, 1e-5, 1.0, 1e5, 1e30])
@pytest.mark.parametrize("plan", ["0:2, 2:2", "0:3/2, 2:3/2"])
def test_a_network_with_a_scaled_layer_computes_the_same(scale: float, plan: str):
    """The next layer undoes the scale, as batch norm or a layer scale would."""
    exponent = round(torch.log2(torch.tensor(scale)).item())
    x, outputs = torch.randn(32, 12), []
    for e in (0, exponent):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(12, 40, bias=False), nn.ReLU(), nn.Linear(40, 4, bias=False))
        with torch.no_grad():
            model[0].weight.mul_(2.0**e)
            model[2].weight.mul_(2.0**-e)
        dkm.compress_(model, plan, steps=10)
        outputs.append((model(x).detach(), model.eval()(x)))
    for got, wanted in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("value", [1e-36, 1e36])
def test_beyond_float32_is_refused(value: float):
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, value)
    with pytest.raises(ValueError, match=r"weight holds values up to 1e[-+]36.*scale or keep it"):
        dkm.compress_(layer, "weight:2", steps=1)
