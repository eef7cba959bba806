"""The options of a clustering, declared once.

`cluster`, the layer `dkm.DKM`, every method of `compress_` and the command's flags take their names, defaults, limits
and explanations from these classes.  Creating one checks every value, so a wrong option is found before any work.
"""

import inspect
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from numbers import Real
from typing import Any, TypeVar

from .backends import BACKENDS
from .temperature import check_tau, needs_steps

METRICS = ("sqeuclidean", "euclidean")
GRADIENTS = ("unrolled", "last", "implicit")
IMPLEMENTATIONS = ("auto", "reference", *BACKENDS)
INITS = ("kmeans", "random")

Function = TypeVar("Function", bound=Callable[..., Any])


def option(default: Any, help: str, *, choices: tuple[str, ...] = (), least: float | None = None) -> Any:
    """A dataclass field with what a user may write there: one of `choices`, or a number of at least `least`."""
    return field(default=default, metadata={"help": help, "choices": choices, "least": least})


@dataclass(frozen=True, kw_only=True)
class Options:
    """A set of options.  Subclasses declare fields; combining them by inheritance combines their fields."""

    def __post_init__(self) -> None:
        for declared in fields(self):
            check_option(declared, getattr(self, declared.name))


@dataclass(frozen=True, kw_only=True)
class LoopOptions(Options):
    """When the iterations of a clustering end."""

    eps: float = option(1e-4, "iterations end when no centroid moves farther than this", least=0)
    max_iter: int = option(5, "iterations of one clustering, at most", least=1)


@dataclass(frozen=True, kw_only=True)
class MetricOptions(Options):
    """The distance between a vector and a centroid."""

    metric: str = option("sqeuclidean", "the squared Euclidean distance, or the plain one", choices=METRICS)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(LoopOptions, MetricOptions):
    """What `cluster` takes besides W, C and tau."""

    gradient: str = option(
        "unrolled",
        "the backward pass goes through every iteration, the last one, or the fixed point",
        choices=GRADIENTS,
    )
    impl: str = option("auto", "how it is computed; see `cluster`", choices=IMPLEMENTATIONS)


@dataclass(frozen=True, kw_only=True)
class MethodOptions(Options):
    """What every method takes, whether or not it has anything random or annealed."""

    steps: int | None = option(None, "how many optimizer steps you will train", least=1)
    seed: int = option(0, "of everything random")


@dataclass(frozen=True, kw_only=True)
class StartOptions(MethodOptions):
    """What methods take whose centroids start from vectors of the weight."""

    init: str = option("kmeans", "k-means of the weights, or k randomly selected vectors", choices=INITS)


@dataclass(frozen=True, kw_only=True)
class TemperedOptions(StartOptions):
    """What methods with a temperature take."""

    tau: Any = option("auto", "auto, learn, a number, or a schedule such as geometric:2:0.1")  # noqa: RUF009

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.tau, Real):
            check_tau(float(self.tau) if not isinstance(self.tau, bool) else self.tau)
        elif not callable(self.tau) and self.tau not in ("auto", "learn"):
            raise ValueError(
                f'tau must be "auto", "learn", a positive number, or a schedule such as '
                f"dkm.temperature.geometric(2, 0.1), got {self.tau!r}"
            )
        if self.steps is None and needs_steps(self.tau):
            name = f'tau="{self.tau}"' if isinstance(self.tau, str) else "a schedule of tau"
            raise ValueError(
                f"{name} anneals over the training: say how many optimizer steps you will train, "
                f"steps=<an integer of at least 1>, got steps=None; or give tau as a number"
            )


@dataclass(frozen=True, kw_only=True)
class DKMOptions(ClusterOptions, TemperedOptions):
    """What DKM itself takes."""


def check_option(declared: Field, value: Any) -> None:
    """Raise ValueError unless the value is one that the declared option may have."""
    name, choices, least = declared.name, declared.metadata["choices"], declared.metadata["least"]
    if choices and value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    if value is None and declared.default is None:
        return
    if declared.type in (int, int | None):
        limit = "" if least is None else f" >= {least}"
        if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
            raise ValueError(f"{name} must be an integer{limit}, got {value!r}")
    elif least is not None and (not isinstance(value, Real) or isinstance(value, bool) or not value >= least):
        raise ValueError(f"{name} must be a number >= {least}, got {value!r}")


def shows_options(kind: type[Options]) -> Callable[[Function], Function]:
    """A decorator: `help()` shows the fields of `kind` where the function itself says `**options`."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shown = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for f in fields(kind)
        ]
        function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        return function

    return decorate
