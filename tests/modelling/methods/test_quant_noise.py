"""Quant-Noise by its definition."""

import math

import pytest
import torch
from method_helpers import PLAN, backward, close, make_gradient, make_weight, network
from torch import nn

import dkm
from dkm.clustering.vectors import to_vectors
from dkm.modelling.methods.quant_noise import QuantNoise


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_quant_noise(dim: int, p: float):
    weight = nn.Parameter(torch.randn(100, 60, dtype=torch.float64))
    noise = QuantNoise(weight, 3, dim, p=p, p_end=p)
    W_tilde = noise(weight)
    V, V_tilde = to_vectors(weight.detach(), dim), to_vectors(W_tilde.detach(), dim)
    snapped = noise.C[dkm.assign(V, noise.C)]
    noisy = (V_tilde == snapped).all(1)
    assert torch.equal(V_tilde[~noisy], V[~noisy])
    assert abs(float(noisy.double().mean()) - p) < 4 * math.sqrt(p * (1 - p) / len(V)) + 1e-9
    close(backward(W_tilde, weight), make_gradient(weight))  # straight through


def test_quant_noise_draws_anew_in_every_step():
    weight = make_weight()
    noise = QuantNoise(weight, 2, p=0.5, p_end=0.5)
    first = noise(weight) == weight
    with torch.no_grad():
        weight.mul_(1.001)
    assert not torch.equal(first, noise(weight) == weight)


def test_the_fraction_grows_until_all_vectors_are_snapped():
    weight = nn.Parameter(torch.randn(200, 50, dtype=torch.float64))
    noise = QuantNoise(weight, 2, p=0.1, steps=40, last=0.25)
    for step, wanted in ((0, 0.1), (15, 0.55), (30, 1.0), (40, 1.0)):
        W_tilde, C, _ = noise.cluster(weight, noise.C, torch.tensor(step))
        share = float((W_tilde == C[dkm.assign(weight.detach().view(-1, 1), C)].view(weight.shape)).double().mean())
        assert abs(share - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / weight.numel()) + 1e-9
    noise.set_steps(4)
    assert float(noise.fraction(torch.tensor(3))) == 1


def test_without_steps_it_cannot_grow():
    with pytest.raises(ValueError, match=r"p=0.1 to p_end=1.0 over the training: say how many .* steps=<an integer"):
        dkm.compress_(network(), PLAN, method="quant_noise")


def test_one_tensor():
    layer = dkm.cluster_weight(nn.Linear(12, 40), bits=3, method="quant_noise", p=0.3, steps=5)
    assert layer.parametrizations.weight[0].options.p == 0.3


@pytest.mark.parametrize("p", [0, -0.1, 1.1, "some"])
def test_a_fraction_that_is_none(p):
    with pytest.raises(ValueError, match="p is the fraction"):
        dkm.compress_(network(), PLAN, method="quant_noise", p=p, steps=3)


@pytest.mark.parametrize(
    ("options", "sentence"), [(dict(p_end=2), "p_end is that at the end"), (dict(last=-1), "last")]
)
def test_an_end_that_is_none(options: dict, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        dkm.compress_(network(), PLAN, method="quant_noise", steps=3, **options)
