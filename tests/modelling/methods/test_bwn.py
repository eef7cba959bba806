"""Binary weight networks by their definition."""

import itertools
from pathlib import Path

import pytest
import torch
from method_helpers import close, make_gradient, make_weight
from torch import Tensor, nn

import dkm
from dkm.modelling.methods.bwn import BWN


def filters(bwn: BWN, weight: Tensor) -> Tensor:
    """The weights that have a scale in common, as rows."""
    rows = weight.detach().reshape(len(weight) if bwn.scales is not None else 1, -1)
    return rows - rows.mean(1, keepdim=True)


def test_no_signs_and_no_scale_are_nearer():
    """All signs of a filter of 8 weights, each with its own best scale."""
    weight = nn.Parameter(make_weight().detach()[:, :8].clone())
    bwn = BWN(weight, 1, scaled=True)
    W_tilde, W = bwn(weight).detach(), filters(bwn, weight)
    all_signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=8)), dtype=torch.float64)
    scales = W @ all_signs.T / 8  # least squares
    errors = (W[:, None] - scales[..., None] * all_signs).square().sum(2)
    close((W - W_tilde).square().sum(1), errors.amin(1))


@pytest.mark.parametrize("scaled", [True, False])
def test_bwn(scaled: bool):
    weight = make_weight()
    bwn = BWN(weight, 1, scaled=scaled)
    for _ in range(2):
        W = filters(bwn, weight)
        close(bwn(weight).detach(), (W.abs().mean(1, keepdim=True) * W.sign()).view(weight.shape))
        with torch.no_grad():
            weight.mul_(1.7).sub_(0.3)  # the scales follow


@pytest.mark.parametrize("scaled", [True, False])
def test_the_gradient_of_a_weight_that_is_clamped(scaled: bool):
    weight = make_weight()
    bwn = BWN(weight, 1, scaled=scaled, clip=0.5)
    G = make_gradient(weight)
    bwn(weight).backward(G)
    units = 1.0 if bwn.scales is None else bwn.scales[:, None]  # a clip is meant for the scaled weight
    centred = (filters(bwn, weight).view(weight.shape)) / units
    outwards = (centred.abs() >= 0.5) & (-G * centred > 0)  # the step goes against the gradient
    assert outwards.any()
    n = 17 if scaled else 85
    close(weight.grad, G / n + G * ~outwards)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_file_holds_the_scales_of_the_present_weight(kind: type, tmp_path: Path):
    torch.manual_seed(0)
    model = kind(8, 6, 3)
    dkm.compress_(model, "weight:1 scaled", method="bwn")
    with torch.no_grad():
        model.parametrizations.weight.original.mul_(torch.linspace(0.1, 3, len(model.weight)).view(-1, 1, 1, 1))
    soft = model.weight.detach()
    model.eval()
    torch.testing.assert_close(model.weight, soft, rtol=2**-10, atol=0)  # scales of 16 bits
    assert dkm.size(model).bytes == dkm.plan(kind(8, 6, 3), "weight:1 scaled").bytes
    dkm.save(model, tmp_path / "model.dkm")
    assert torch.equal(dkm.load(tmp_path / "model.dkm")["weight"], model.weight)


def test_filters_of_zeros():
    weight = nn.Parameter(torch.zeros(3, 4))
    bwn = BWN(weight, 1, scaled=True)
    assert bwn(weight).abs().max() < 1e-7
    assert bwn.snapped(weight).abs().max() < 1e-7


def test_more_bits_name_all_tensors_that_have_them():
    model = nn.Sequential(nn.Linear(120, 120), nn.Linear(120, 90), nn.Linear(5, 5), nn.Linear(5, 4))
    with pytest.raises(ValueError, match=r'"bwn" has 1 bit per weight at most.*2.weight:8/1; the same.* 3.weight$'):
        dkm.compress_(model, "all:1", method="bwn")
    with pytest.raises(
        dkm.MethodError, match=r'"bwn" clusters single weights: give dim 1, as in 1/1, got 0.weight:4/4'
    ):
        dkm.compress_(model, "0:4/4", method="bwn")
    with pytest.raises(ValueError, match='"bwn" has 1 bit'):
        dkm.cluster_weight(model[0], bits=2, method="bwn")
