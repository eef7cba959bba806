"""What the methods share whose term of the loss draws the weights into clusters."""

import pytest
import torch
from method_helpers import make_weight
from torch import Tensor, nn

from dkm.modelling.methods import METHODS

TERMS = ["soft-sharing", "rps"]


def pull(method: str, weight: Tensor, *, scaled: bool) -> Tensor:
    """The gradient of the term."""
    parameter = nn.Parameter(weight)
    return torch.autograd.grad(METHODS[method](parameter, 3, first=1, scaled=scaled).loss_term(parameter), parameter)[0]


@pytest.mark.parametrize("method", TERMS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("scale", [2.0**-40, 2.0**-5, 2.0**40])
def test_a_step_of_sgd_takes_weights_the_same_part_of_the_way_at_every_scale(method: str, scaled: bool, scale: float):
    weight = make_weight().detach()
    gradient, gradient_there = (pull(method, each, scaled=scaled) for each in (weight, weight * scale))
    torch.testing.assert_close(gradient_there / scale, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", TERMS)
def test_rows_that_have_scales_go_the_same_part_of_the_way(method: str):
    """Powers of two, which change no digit of the weights divided by the scales of their rows."""
    weight, sizes = make_weight().detach(), 2.0 ** torch.arange(-4.0, 1, dtype=torch.float64)[:, None]
    gradient, gradient_there = (pull(method, each, scaled=True) for each in (weight, weight * sizes))
    torch.testing.assert_close(gradient_there / sizes, gradient, rtol=1e-9, atol=1e-12)
