"""Clustered weights with a temperature: fixed, annealed over the training, or learned."""

import math
from typing import Any, ClassVar

from torch import Tensor, nn

from ..clustering.options import StartOptions, TemperedOptions
from ..clustering.temperature import AUTO, HOT, Schedule, check_schedule
from .clustered import Clustered
from .dtensors import whole


class Tempered(Clustered):
    """Adds tau to a clustered weight.  Its options include `tau`, `steps` and `metric`.

    One more parameter, with tau="learn" only:
        log_multiple  (1,)  the logarithm of tau / unit.  Relative, so that weight decay pulls tau to the unit, a
                            sensible temperature, and not to 1; not a scalar, because FSDP refuses those
    """

    Options: ClassVar[type[StartOptions]] = TemperedOptions
    options: TemperedOptions

    @property
    def tau_power(self) -> int:
        """With which power of the weight's scale tau scales: 2, or 1 for the plain distance."""
        return 1 if getattr(self.options, "metric", None) == "euclidean" else 2

    @property
    def relative_eps(self) -> bool:
        """The paper's fixed tau comes with the paper's eps; a tau in units of the weight with an eps in those units."""
        return not isinstance(self.options.tau, int | float)

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options: Any):
        super().__init__(weight, bits, dim, **options)
        tau = self.options.tau
        self.steps = self.options.steps
        self.schedule: Schedule | None = AUTO if tau == "auto" else tau if callable(tau) else None
        if self.schedule is not None:
            check_schedule(self.schedule, weight.device)
        if self.tau_power == 1:
            # The squared distance is r^2 where the plain one is r, so it changes 2 r times as fast, and r^2 is about
            # dim * unit.  A temperature for the plain distance is therefore smaller by 2 r, and one per weight by dim.
            self.unit = (self.unit / dim).sqrt() / 2
        if tau == "learn":
            hot = self.unit.new_full((1,), math.log(HOT))
            self.log_multiple = nn.Parameter(hot, requires_grad=weight.requires_grad)

    def temperature(self, step: Tensor) -> Tensor | float:
        """tau after `step` steps, for the scaled weight: a number, or a tensor of the shape of the unit."""
        if self.schedule is not None:
            assert self.steps is not None
            return self.unit * self.schedule((step / self.steps).clamp(max=1))
        if self.options.tau == "learn":
            return (self.unit * whole(self.log_multiple).exp()).view(self.unit.shape)
        assert isinstance(self.options.tau, int | float)
        tau = self.options.tau * 2.0 ** (-self.shift * self.tau_power)
        return min(max(tau, 1e-37), 1e37)  # what float32 can divide by

    @property
    def anneals(self) -> bool:
        """Whether tau follows a schedule over `steps`."""
        return self.schedule is not None

    def set_steps(self, steps: int) -> None:
        """The schedule ends after so many optimizer steps."""
        self.steps = steps

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{super().extra_repr()}, tau={self.options.tau}"
