"""Methods by name, and which options each of them takes."""

import re

import pytest
from method_helpers import (
    PLAN,
    network,
)
from torch import nn

import dkm


@pytest.mark.parametrize("method", ["hard", "dc", "quant_noise"])
@pytest.mark.parametrize("tau", [1e-3, "learn", dkm.temperature.geometric(2, 0.1)])
def test_a_temperature_where_there_is_none(method: str, tau):
    with pytest.raises(ValueError, match=f'method="{method}" takes no tau, it has no temperature: leave it out'):
        dkm.compress_(network(), PLAN, method=method, tau=tau, steps=3)


@pytest.mark.parametrize(
    ("method", "options", "named"),
    [
        ("hard", dict(metric="euclidean"), "metric"),
        ("gumbel", dict(gradient="last"), "gradient"),
        ("gumbel", dict(impl="blocked"), "impl"),
        ("dc", dict(max_iter=3), "max_iter"),
    ],
)
def test_an_option_that_means_nothing(method: str, options: dict, named: str):
    with pytest.raises(ValueError, match=f'method="{method}" takes no {named}, it would change nothing'):
        dkm.compress_(network(), PLAN, method=method, steps=3, **options)


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(ValueError, match="one of dkm, hard, gumbel, dc, quant_noise, got 'quantnoise'; did you mean"):
        dkm.compress_(network(), PLAN, method="quantnoise")


ALL = "steps, init, seed, tau, metric, eps, max_iter, gradient, impl"


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("dkm", dict(p=0.1), f'method="dkm" takes no p, it takes {ALL}; method="quant_noise" takes p'),
        ("dkm", dict(gradients="last"), f'method="dkm" takes no gradients, it takes {ALL}; did you mean gradient?'),
        ("hard", dict(p=1), 'method="hard" takes no p, it takes steps, init, seed, eps, max_iter; method='),
        ("quant_noise", dict(q=1), 'method="quant_noise" takes no q, it takes steps, init, seed, eps, max_iter, p'),
    ],
)
def test_an_option_of_another_method_or_of_none_leaves_the_model_alone(method: str, options: dict, sentence: str):
    model = network()
    with pytest.raises(TypeError, match=re.escape(sentence)):
        dkm.compress_(model, PLAN, steps=3, method=method, **options)
    with pytest.raises(TypeError, match=re.escape(sentence)):
        dkm.cluster_weight(model[0], bits=2, method=method, **options)
    assert type(model[0]) is nn.Linear
