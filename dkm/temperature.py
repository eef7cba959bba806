"""The temperature over the training: schedules, and what `tau` may be.

A schedule is a function `progress -> multiple`.  `progress` is a () tensor that goes from 0 to 1 over `steps`
optimizer steps and stays there; the multiple, a () tensor or a number, times the tensor's own unit m (the mean
squared error per weight of its first clustering) is tau.  It runs for every tensor at every step: it must not
read values (`float(progress)`, `if progress > ...`), or the GPU is waited for; `torch.where` does not.

The schedules here are values: they compare, print, and can be sent to another process.
"""

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from .functional import check_tau

Schedule = Callable[[Tensor], Tensor | float]


@dataclass(frozen=True)
class _Schedule:
    def __post_init__(self):
        for value in astuple(self):
            if not isinstance(value, Real) or not 0 < value < math.inf:
                raise ValueError(f"{self} is not a schedule: multiples of the unit are positive finite numbers")


@dataclass(frozen=True)
class geometric(_Schedule):
    """From `hot` to `cold`, by the same factor at every step."""

    hot: float
    cold: float

    def __call__(self, progress: Tensor) -> Tensor:
        return self.hot * (self.cold / self.hot) ** progress


@dataclass(frozen=True)
class linear(_Schedule):
    """From `hot` to `cold`, by the same difference at every step."""

    hot: float
    cold: float

    def __call__(self, progress: Tensor) -> Tensor:
        return self.hot + (self.cold - self.hot) * progress


@dataclass(frozen=True)
class cosine(_Schedule):
    """From `hot` to `cold` along half a cosine: slow, fast, slow."""

    hot: float
    cold: float

    def __call__(self, progress: Tensor) -> Tensor:
        return (self.hot + self.cold) / 2 + (self.hot - self.cold) / 2 * torch.cos(math.pi * progress)


@dataclass(frozen=True)
class constant(_Schedule):
    """The same multiple of each tensor's own unit, all the time."""

    multiple: float

    def __call__(self, progress: Tensor) -> float:
        return self.multiple


HOT = 2.0  # tau = 2m is the maximum-likelihood temperature of the paper's mixture, whose variance is tau/2
AUTO = geometric(HOT, 0.1)  # tau="auto"

_NAMED = {schedule.__name__: schedule for schedule in (geometric, linear, cosine, constant)}


class Law(NamedTuple):
    """tau = hot unit^relative 2^(decay progress): what a kernel can compute by itself."""

    hot: float
    decay: float
    relative: bool


def law(tau: float | str | Schedule) -> Law | None:
    """The law that `tau` is, if it is one."""
    match tau:
        case Real():
            return Law(tau, 0.0, False)
        case "auto":
            return law(AUTO)
        case geometric(hot, cold):
            return Law(hot, math.log2(cold / hot), True)
        case constant(multiple):
            return Law(multiple, 0.0, True)
    return None


def parse(text: str) -> float | str | Schedule:
    """Text, as on a command line, -> what `tau` takes: "auto", "learn", "1e-4", "geometric:3:0.05", "constant:1"."""
    name, *numbers = text.split(":")
    try:
        if name in _NAMED:
            return _NAMED[name](*map(float, numbers))
        if text in ("auto", "learn"):
            return text
        check_tau(tau := float(text))
        return tau
    except (ValueError, TypeError):
        raise ValueError(
            f"tau must be auto, learn, a positive number, geometric:HOT:COLD, linear:HOT:COLD, cosine:HOT:COLD "
            f"or constant:MULTIPLE, got {text!r}"
        ) from None


def check_temperature(tau: float | str | Schedule, steps: int | None, device: torch.device) -> None:
    """Raise unless these are a `tau` and the `steps` it needs.  A schedule is tried out, on `device`."""
    if isinstance(tau, Real):
        check_tau(tau)
    if isinstance(tau, Real) or (isinstance(tau, str) and tau == "learn"):
        return
    if not callable(tau) and not (isinstance(tau, str) and tau == "auto"):
        raise ValueError(
            f'tau must be "auto", "learn", a positive number, or a schedule such as '
            f"dkm.temperature.geometric(2, 0.1), got {tau!r}"
        )
    if not isinstance(steps, int) or steps is True or steps < 1:
        name = f'tau="{tau}"' if isinstance(tau, str) else "a schedule of tau"
        raise ValueError(
            f"{name} anneals over the training: say how many optimizer steps you will train, "
            f"steps=<an integer of at least 1>, got steps={steps!r}; or give tau as a number"
        )
    for progress in (0.0, 0.5, 1.0) if callable(tau) else ():
        value = tau(torch.full((), progress, device=device))
        single = isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0)
        if not single or not 0 < float(value) < math.inf:
            raise ValueError(
                f"the schedule {tau!r} gives {value!r} at progress {progress}: "
                f"it must give a positive finite number or () tensor, the multiple of the unit"
            )
