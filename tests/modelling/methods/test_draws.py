"""Random numbers as a function of their place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_helpers import make_weight
from torch import nn

from dkm import Clustered
from dkm.modelling.methods import draws as draws_module
from dkm.modelling.methods.draws import normal, uniform
from dkm.modelling.methods.gumbel import Gumbel
from dkm.modelling.methods.quant_noise import QuantNoise


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


def test_normal_draws_are_normal_and_independent():
    a, b = (normal(torch.tensor(key), 200_001, torch.float64) for key in (5, 6))
    assert len(a) == 200_001
    places = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0], dtype=torch.float64)
    below = (a[:, None] < places).double().mean(0)
    wanted = 0.5 * (1 + torch.erf(places / 2**0.5))
    assert (below - wanted).abs().max() < 0.005
    for x, y in ((a, b), (a[1:], a[:-1]), (a[: len(a) // 2], a[len(a) // 2 + 1 :])):
        assert abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) < 0.015
        assert abs(float(torch.corrcoef(torch.stack([x.abs(), y.abs()]))[0, 1])) < 0.015
