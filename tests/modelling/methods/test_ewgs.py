"""Element-wise gradient scaling by its definition."""

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
