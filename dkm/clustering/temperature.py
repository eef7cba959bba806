"""The temperature over the training: schedules, and what `tau` may be.

A schedule is a function `progress -> multiple`.  `progress` is a () tensor that goes from 0 to 1 over `steps`
optimizer steps and then stays 1.  The multiple, a () tensor or a number, times the weight's own unit m (the mean
squared error per weight of its first clustering) is tau.  A schedule runs for every tensor at every step, so it must
not read values (`float(progress)`, `if progress > ...`): that would wait for the GPU.  `torch.where` does not wait.

The schedules here are values: they compare, print, and can be sent to another process.
"""

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

Schedule = Callable[[Tensor], Tensor | float]


@dataclass(frozen=True)
class _Schedule:
    """What all schedules here share: their numbers are checked when they are made."""

    def __post_init__(self) -> None:
        for value in astuple(self):
            if not isinstance(value, int | float) or not 0 < value < math.inf:
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
# tau="auto".  A schedule of another class works, but is not a `Law`: on a GPU each step then takes several launches
# instead of one, unless `law` below and `_temperature` in kernels/triton/device/forward.py learn it.
AUTO = geometric(HOT, 0.1)

_NAMED: dict[str, Callable[..., Schedule]] = {
    "geometric": geometric,
    "linear": linear,
    "cosine": cosine,
    "constant": constant,
}


class Law(NamedTuple):
    """A temperature that a kernel can compute by itself: tau = hot * 2^(decay * progress), times the unit if relative.

    The progress is step / steps, and 1 after the last step.
    """

    hot: float
    decay: float
    relative: bool  # whether tau is a multiple of the weight's unit
    steps: int


def law(tau: float | str | Schedule, steps: int | None) -> Law | None:
    """The law that `tau` follows, or None where there is none: a learned tau, or a schedule of another form."""
    match tau:
        case Real():
            return Law(float(tau), 0.0, False, 1)
        case "auto":
            return law(AUTO, steps)
        case geometric(hot, cold):
            return Law(hot, math.log2(cold / hot), True, steps or 1)
        case constant(multiple):
            return Law(multiple, 0.0, True, 1)
    return None


def parse(text: str) -> float | str | Schedule:
    """Text from a command line -> a value for `tau`: "auto", "learn", "1e-4", "geometric:3:0.05", "constant:1"."""
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


def needs_steps(tau: float | str | Schedule) -> bool:
    """Whether this temperature changes over the training, so that its length must be known."""
    return callable(tau) or tau == "auto"


def check_tau(tau: float | Tensor) -> None:
    """Raise ValueError unless tau is a number that float32 can divide by.  Tensors are not read: a GPU would stall."""
    if isinstance(tau, Tensor):
        return
    if not isinstance(tau, Real) or isinstance(tau, bool) or not 1e-37 <= tau < math.inf:
        raise ValueError(f"tau must be a finite number of at least 1e-37, got {tau!r}; the paper's are 5e-6 to 4e-4")


def check_schedule(schedule: Schedule, device: torch.device) -> None:
    """Raise ValueError unless the schedule gives positive finite multiples at the start, the middle and the end."""
    for progress in (0.0, 0.5, 1.0):
        value = schedule(torch.full((), progress, device=device))
        single = isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0)
        if not single or not 0 < float(value) < math.inf:
            raise ValueError(
                f"the schedule {schedule!r} gives {value!r} at progress {progress}: "
                f"it must give a positive finite number or () tensor, the multiple of the unit"
            )
