"""The options of a clustering: their defaults, their checks, and where they are shown."""

import dataclasses
import inspect
import math
from dataclasses import dataclass, fields

import pytest
import torch

import dkm
from dkm.clustering.options import (
    GRADIENTS,
    IMPLEMENTATIONS,
    INITS,
    METRICS,
    ClusterOptions,
    DKMOptions,
    LoopOptions,
    MethodOptions,
    MetricOptions,
    Options,
    StartOptions,
    TemperedOptions,
    option,
    shows_options,
)

DEFAULTS = dict(
    eps=1e-4, max_iter=5, metric="sqeuclidean", gradient="unrolled", impl="auto",
    steps=None, init="kmeans", seed=0, tau="auto",
)  # fmt: skip


def test_defaults():
    assert {field.name: field.default for field in fields(DKMOptions)} == DEFAULTS
    assert dataclasses.asdict(DKMOptions(steps=1)) == DEFAULTS | {"steps": 1}


@pytest.mark.parametrize("kind", [LoopOptions, MetricOptions, ClusterOptions, MethodOptions, StartOptions])
def test_the_defaults_are_valid(kind: type[Options]):
    kind()


def test_every_option_explains_itself():
    assert all(field.metadata["help"] for field in fields(DKMOptions))


@pytest.mark.parametrize(
    ("name", "choices"),
    [("metric", METRICS), ("gradient", GRADIENTS), ("impl", IMPLEMENTATIONS), ("init", INITS)],
)
def test_choices(name: str, choices: tuple[str, ...]):
    for choice in choices:
        assert getattr(DKMOptions(steps=1, **{name: choice}), name) == choice
    for wrong in (choices[0].upper(), "", None, 1):
        with pytest.raises(ValueError, match=f"{name} must be one of {', '.join(choices)}, got {wrong!r}"):
            DKMOptions(steps=1, **{name: wrong})


@pytest.mark.parametrize("name", ["max_iter", "steps"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "3", True, math.nan])
def test_integers_of_at_least_one(name: str, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, got {value!r}"):
        DKMOptions(**{"steps": 1, name: value})


@pytest.mark.parametrize("value", [1.5, "0", None, False])
def test_a_seed_is_any_integer(value):
    assert StartOptions(seed=-3).seed == -3
    with pytest.raises(ValueError, match=f"seed must be an integer, got {value!r}"):
        StartOptions(seed=value)


@pytest.mark.parametrize("value", [-1e-9, math.nan, "0", None, True])
def test_eps_is_a_number_from_zero(value):
    assert LoopOptions(eps=0).eps == 0
    with pytest.raises(ValueError, match=f"eps must be a number >= 0, got {value!r}"):
        LoopOptions(eps=value)


def test_no_steps_are_no_steps():
    assert StartOptions(steps=None).steps is None


class TestTau:
    @pytest.mark.parametrize("tau", [1e-4, 3, "learn"])
    def test_needs_no_steps(self, tau):
        assert TemperedOptions(tau=tau).tau == tau

    @pytest.mark.parametrize("tau", ["auto", dkm.temperature.geometric(2, 0.1), lambda progress: 1.0])
    def test_anneals_and_needs_steps(self, tau):
        assert TemperedOptions(tau=tau, steps=3).tau == tau
        with pytest.raises(ValueError, match=r"anneals over the training: say how many optimizer steps"):
            TemperedOptions(tau=tau)

    @pytest.mark.parametrize("tau", [0, -1.0, math.nan, math.inf])
    def test_a_number_is_positive_and_finite(self, tau):
        with pytest.raises(ValueError, match="tau must be a finite number"):
            TemperedOptions(tau=tau)

    @pytest.mark.parametrize("tau", ["hot", None, torch.ones(2)])
    def test_anything_else_is_refused(self, tau):
        with pytest.raises(ValueError, match='tau must be "auto", "learn", a positive number, or a schedule'):
            TemperedOptions(tau=tau, steps=3)


def test_options_cannot_be_changed_or_given_by_position():
    options = LoopOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.eps = 1.0
    with pytest.raises(TypeError):
        LoopOptions(1e-4)
    with pytest.raises(TypeError, match="nonsense"):
        LoopOptions(nonsense=1)


class TestCombination:
    def test_inheritance_combines_the_fields(self):
        both = {field.name for kind in (LoopOptions, MetricOptions) for field in fields(kind)}
        assert both | {"gradient", "impl"} == {field.name for field in fields(ClusterOptions)}
        assert {field.name for kind in (ClusterOptions, TemperedOptions) for field in fields(kind)} == set(DEFAULTS)

    def test_a_new_set_is_checked_like_the_parts(self):
        @dataclass(frozen=True, kw_only=True)
        class Mine(LoopOptions, StartOptions):
            strength: float = option(1.0, "how strong", least=0.5)

        assert Mine(strength=2, eps=0).strength == 2
        for wrong, message in (
            (dict(strength=0.1), "strength must be a number >= 0.5"),
            (dict(max_iter=0), "max_iter must be an integer >= 1"),
            (dict(init="best"), "init must be one of kmeans, random"),
        ):
            with pytest.raises(ValueError, match=message):
                Mine(**wrong)


class TestShowsOptions:
    def test_the_fields_stand_where_the_function_says_options(self):
        @shows_options(LoopOptions)
        def function(x: int, **options) -> dict:
            return options

        parameters = inspect.signature(function).parameters
        assert list(parameters) == ["x", "eps", "max_iter"]
        assert parameters["eps"].default == 1e-4
        assert parameters["eps"].kind is inspect.Parameter.KEYWORD_ONLY
        assert function(1, eps=2) == {"eps": 2}  # what it is called with is its own affair

    @pytest.mark.parametrize("function", [dkm.compress_, dkm.cluster_weight], ids=lambda f: f.__name__)
    def test_the_public_functions_show_dkms(self, function):
        parameters = inspect.signature(function).parameters
        assert {name: parameters[name].default for name in DEFAULTS} == DEFAULTS
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def test_cluster_shows_its_own(self):
        names = set(inspect.signature(dkm.cluster).parameters)
        assert {field.name for field in fields(ClusterOptions)} <= names
        assert "steps" not in names
