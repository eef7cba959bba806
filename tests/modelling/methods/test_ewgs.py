"""Element-wise gradient scaling by its definition."""

import copy

import pytest
import torch
from method_helpers import backward, close, make_gradient, make_weight
from torch import nn

import dkm
from dkm.modelling.methods.ewgs import EWGS


def quantised(weight: torch.Tensor, low, high, scale, k: int):
    x = ((weight - low) / (high - low)).clamp(0, 1)
    q = (x * (k - 1)).round() / (k - 1)
    return x, q, scale * (2 * q - 1)


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("delta", [0.0, 0.5])
def test_ewgs(bits: int, delta: float):
    weight = make_weight()
    with torch.no_grad():
        weight[0, 0] = 20.0  # outside of the range
    ewgs = EWGS(weight, bits, delta=delta)
    low, high, scale = ewgs.first
    close(high, 3 * weight.detach().std(correction=0))
    x, q, W_tilde = quantised(weight.detach(), low, high, scale, 2**bits)
    close(ewgs(weight).detach(), W_tilde)
    dq = 2 * scale * make_gradient(weight)
    dx = dq * (1 + delta * dq.sign() * (x - q))
    inside = (weight.detach() >= low) & (weight.detach() <= high)
    assert not inside.all()
    close(backward(ewgs(weight), weight), dx * inside / (high - low))
    C, codes = ewgs.codes(weight)
    torch.testing.assert_close(C.double()[codes].view(weight.shape), W_tilde, rtol=2**-10, atol=0)


def test_the_first_scale_has_the_least_error():
    weight = make_weight()
    ewgs = EWGS(weight, 2)
    error = (ewgs(weight) - weight).detach()
    values = ewgs(weight).detach()
    close((error * values).sum(), torch.zeros((), dtype=torch.float64))


def test_a_step_of_sgd_on_the_scale_is_the_step_of_the_weights_projected_to_it():
    """Along W~ itself, W~ - lr G moves by lr <G, W~> / |W~|^2 of W~."""
    weight, G = make_weight(), make_gradient(make_weight())
    ewgs = EWGS(weight, 2)
    W_tilde = ewgs(weight)
    W_tilde.backward(G)
    values = W_tilde.detach()
    close(ewgs.log_ratios.grad[2], (G * values).sum() / values.square().sum())


def test_the_range_learns():
    torch.manual_seed(0)
    layer = nn.Linear(30, 20)
    dkm.compress_(layer, "weight:2", method="ewgs")
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    before = layer.parametrizations.weight[0].log_ratios.detach().clone()
    layer(torch.randn(8, 30)).square().sum().backward()
    optimizer.step()
    assert (layer.parametrizations.weight[0].log_ratios != before).all()
    soft = layer.weight.detach()
    torch.testing.assert_close(layer.eval().weight, soft, rtol=2**-10, atol=0)


def test_delta_follows_the_hessian():
    """It is the mean second derivative by the places over three deviations of their gradient."""
    weight = make_weight()
    ewgs = EWGS(weight, 2, scaling="hessian")
    shown = [make_gradient(weight), 2 * make_gradient(weight)]
    for gradient in shown:
        ewgs.observe_gradient(gradient)
    ewgs.calibrate(weight, "weight")
    ewgs.give("batches")
    low, high, scale = ewgs.first
    x, q, _ = quantised(weight.detach(), low, high, scale, 4)
    dq = 2 * scale * make_gradient(weight)
    by_place = torch.stack([2 * scale * gradient for gradient in shown]).square().mean()
    dx = dq * (1 + by_place / (3 * dq.std(correction=0)) * dq.sign() * (x - q))
    inside = (weight.detach() >= low) & (weight.detach() <= high)
    close(backward(ewgs(weight), weight), dx * inside / (high - low))


def test_the_hessian_needs_batches_and_a_checkpoint_has_it():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 4)), torch.randn(32, 6)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        dkm.compress_(each, "0:2, 2:2", method="ewgs", scaling="hessian")
        with pytest.raises(dkm.NeedError, match="calibrate_"):
            each.train()(x)
    dkm.calibrate_(model, [x])
    twin.load_state_dict(model.state_dict())
    outputs = [each.train()(x) for each in (model, twin)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    gradients = [each[0].parametrizations.weight.original.grad for each in (model, twin)]
    assert torch.equal(*gradients)
    with pytest.raises(dkm.NeedError, match=r"no gradient at 0.weight that is finite and not zero"):
        dkm.calibrate_(model, [torch.full((4, 6), torch.nan)])
    plain = nn.Linear(6, 4)
    dkm.compress_(plain, "weight:2", method="ewgs")
    plain.train()(x)  # a fixed delta needs nothing
