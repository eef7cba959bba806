"""ABC-Net by its definition."""

import pytest
import torch
from method_helpers import backward, close, make_gradient, make_weight
from torch import nn

from dkm.modelling.methods.abc_net import ABCNet


@pytest.mark.parametrize("bits", [1, 2, 3, 5])
def test_abc_net_is_the_least_squares_sum_of_its_bases(bits: int):
    weight = make_weight()
    abc = ABCNet(weight, bits)
    w = weight.detach().view(-1)
    shifts = [-1 + 2 * i / (bits - 1) for i in range(bits)] if bits > 1 else [0.0]
    bases = torch.stack([(w - w.mean() + u * w.std(correction=0)).sign() for u in shifts], dim=1)
    wanted = bases @ torch.linalg.lstsq(bases, w[:, None]).solution
    # 1e-6 of ridge regression, on matrices whose condition is below 100
    torch.testing.assert_close(abc(weight).detach().view(-1, 1), wanted, rtol=1e-3, atol=1e-4)


def test_its_codes_are_signs_and_its_centroids_their_sums():
    weight = make_weight()
    abc = ABCNet(weight, 3)
    C, codes = abc.codes(weight)
    assert C.shape == (8, 1)
    B, a = abc.bases(weight.detach().view(-1))
    assert torch.equal(torch.stack([codes >> i & 1 for i in range(3)], dim=1) * 2 - 1, B.long())
    for code in range(8):
        sum_ = sum(a[i] if code >> i & 1 else -a[i] for i in range(3))
        torch.testing.assert_close(C[code, 0].double(), sum_, rtol=2**-10, atol=1e-4)
    assert len(codes.unique()) == 4  # thresholds that grow: a basis more, a sign less


def test_its_gradient_passes_straight_through_each_basis():
    weight = make_weight()
    abc = ABCNet(weight, 3)
    a = abc.bases(weight.detach().view(-1))[1]
    close(backward(abc(weight), weight), make_gradient(weight) * a.sum() / weight.detach().std(correction=0))


@pytest.mark.parametrize("values", [torch.zeros(4, 3), torch.ones(4, 3), torch.tensor([[0.5]])])
def test_bases_that_are_equal(values: torch.Tensor):
    weight = nn.Parameter(values)
    abc = ABCNet(weight, 4)
    # the ridge of 1e-6 makes the sum too small by less than that
    torch.testing.assert_close(abc(weight).detach(), values, rtol=1e-5, atol=1e-6)
    assert backward(abc(weight), weight).isfinite().all()
