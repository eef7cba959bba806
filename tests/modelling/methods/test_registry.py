"""Methods by name, and which options each of them takes."""

import re
from dataclasses import dataclass

import pytest
import torch
from method_helpers import PLAN, network
from torch import Tensor, nn

import dkm
from dkm import Clustered, Clustering
from dkm.clustering.options import StartOptions, option
from dkm.clustering.vectors import from_vectors, to_vectors
from dkm.modelling.methods import METHODS, named


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
        ("bwn", dict(init="random"), "init"),
        ("abc-net", dict(init="random"), "init"),
        ("ewgs", dict(init="random"), "init"),
        ("profit", dict(init="random"), "init"),
        ("gobo", dict(init="random"), "init"),
    ],
)
def test_an_option_that_means_nothing(method: str, options: dict, named: str):
    with pytest.raises(ValueError, match=f'method="{method}" takes no {named}, it would change nothing'):
        dkm.compress_(network(), PLAN, method=method, steps=3, **options)


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(ValueError, match=r"one of dkm, hard, gumbel, dc, quant_noise, .*'quantnoise'; did you mean"):
        dkm.compress_(network(), PLAN, method="quantnoise")


ALL = "steps, seed, init, tau, metric, eps, max_iter, gradient, impl"


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("dkm", dict(p=0.1), f'method="dkm" takes no p, it takes {ALL}; method="quant_noise" takes p'),
        ("dkm", dict(gradients="last"), f'method="dkm" takes no gradients, it takes {ALL}; did you mean gradient?'),
        ("hard", dict(p=1), 'method="hard" takes no p, it takes steps, seed, init, eps, max_iter; method='),
        (
            "quant_noise",
            dict(q=1),
            'method="quant_noise" takes no q, it takes steps, seed, init, eps, max_iter, p, p_end, last',
        ),
    ],
)
def test_an_option_of_another_method_or_of_none_leaves_the_model_alone(method: str, options: dict, sentence: str):
    model = network()
    with pytest.raises(TypeError, match=re.escape(sentence)):
        dkm.compress_(model, PLAN, steps=3, method=method, **options)
    with pytest.raises(TypeError, match=re.escape(sentence)):
        dkm.cluster_weight(model[0], bits=2, method=method, **options)
    assert type(model[0]) is nn.Linear


# --- a method of one's own -----------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Clustered]]:
    """What a test registers is forgotten after it."""
    for name in ("nearest", "soft"):
        monkeypatch.setitem(METHODS, name, Clustered)  # so that its absence is what is restored
        del METHODS[name]
    return METHODS


def make_nearest(name: str = "nearest") -> type[Clustered]:
    @dataclass(frozen=True, kw_only=True)
    class NearestOptions(StartOptions):
        nearness: float = option(1.0, "how far a weight moves to its centroid", least=0)

    @dkm.register_method(name)
    class Nearest(Clustered):
        """Moves every weight a part of the way to its nearest centroid."""

        Options = NearestOptions

        def cluster(self, weight: Tensor, start: Tensor, step: Tensor) -> Clustering:
            nearest = start[dkm.assign(to_vectors(weight.detach(), self.dim), start)]
            moved = weight + self.options.nearness * (from_vectors(nearest, weight.shape) - weight).detach()
            return Clustering(moved, start, torch.zeros_like(step))

    return Nearest


def test_a_class_of_ones_own_joins_by_its_name(registry, tmp_path):
    kind = make_nearest()
    assert registry["nearest"] is kind
    assert kind.method == "nearest"
    model = network()
    dkm.compress_(model, PLAN, method="nearest", nearness=0.5)
    assert {type(module) for module in model.modules() if isinstance(module, Clustered)} == {kind}
    model(torch.randn(4, 12)).sum().backward()
    assert model[0].parametrizations.weight.original.grad.abs().sum() > 0
    dkm.save(model, tmp_path / "model.dkm")
    assert torch.equal(dkm.load(tmp_path / "model.dkm")["0.weight"], model.eval()[0].weight)


def test_its_options_are_checked_and_named(registry):
    make_nearest()
    with pytest.raises(ValueError, match="nearness must be a number >= 0, got -1"):
        dkm.compress_(network(), PLAN, method="nearest", nearness=-1)
    with pytest.raises(TypeError, match=r'method="hard" takes no nearness.*; method="nearest" takes nearness'):
        dkm.compress_(network(), PLAN, method="hard", nearness=1)
    with pytest.raises(TypeError, match=r'method="nearest" takes no nearnes.*did you mean nearness'):
        dkm.compress_(network(), PLAN, method="nearest", nearnes=1)
    with pytest.raises(ValueError, match='method="nearest" takes no tau, it has no temperature'):
        dkm.compress_(network(), PLAN, method="nearest", tau=1e-3)


def test_an_unknown_method_may_mean_ones_own(registry):
    make_nearest()
    with pytest.raises(ValueError, match="got 'nearst'; did you mean 'nearest'"):
        dkm.compress_(network(), PLAN, method="nearst")


def test_a_name_belongs_to_one_class(registry):
    make_nearest()
    with pytest.raises(ValueError, match="there is a method 'hard' already, Hard: choose another name"):
        make_nearest("hard")
    assert registry["hard"].__name__ == "Hard"
    assert make_nearest() is registry["nearest"]  # the same class again, as where a module is reloaded


def test_named_returns_the_class_and_what_it_takes():
    kind, taken = named("hard", dict(steps=3, seed=1, tau="auto", metric="sqeuclidean"))
    assert kind is METHODS["hard"]
    assert taken == dict(steps=3, seed=1)  # DKM's defaults say nothing to another method


def test_a_method_must_say_how_it_clusters(registry):
    @dkm.register_method("soft")
    class Soft(Clustered):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Soft(torch.randn(4, 4), 2)
