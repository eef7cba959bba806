"""Element-wise gradient scaling (Lee et al., 2021): a uniform quantiser with a learned range."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...clustering.cluster import Clustering
from ...clustering.options import MethodOptions, option
from ...clustering.vectors import compute_dtype
from ...foundation.errors import NeedError
from ..dtensors import whole
from .by_codes import ByCodes, Coded
from .registry import register

SPREADS = 3  # standard deviations, that the range has at the start in both directions


@dataclass(frozen=True, kw_only=True)
class EWGSOptions(MethodOptions):
    """What element-wise gradient scaling takes."""

    delta: float = option(1e-3, "how much the rounding error scales a gradient; 0: straight through", least=0)
    scaling: str = option(
        "fixed",
        "delta as it is given, or from the trace of the Hessian, which needs batches",
        choices=("fixed", "hessian"),
    )


class Range(NamedTuple):
    """Three () tensors."""

    low: Tensor
    high: Tensor
    scale: Tensor


@register("ewgs")
class EWGS(ByCodes):
    """Evenly spaced values on a learned range, with the gradient scaled by the rounding error.

        x = clip((W - l) / (u - l), 0, 1);  q = round((k - 1) x) / (k - 1);  W~ = a (2 q - 1)
        dx = dq (1 + delta sign(dq) (x - q))

    One more buffer and one more parameter:
        first       (3,)  l, u and a at the start: -3 and 3 standard deviations, and the a with the least squared error
        log_ratios  (3,)  the logarithms of their present values over those.  Build the optimizer afterwards.

    With scaling="hessian", delta is the mean second derivative of the loss by the places q, over 3 standard deviations
    of dq, as in the paper.  The second derivatives are those of Gauss and Newton, from the gradients that
    `dkm.calibrate_` shows; their mean by the scaled weights is in one more buffer, `curvature`, ().

    The gradient of a logarithm is divided by |W~|^2, so that a step of SGD moves W~ about as far along it as it would
    move W~ itself: a sum over all weights would be too much for a learning rate that suits the model.
    """

    Options: ClassVar[type[MethodOptions]] = EWGSOptions
    paper: ClassVar[str] = "Lee 2021"
    options: EWGSOptions
    first: Tensor
    curvature: Tensor

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options: Any):
        super().__init__(weight, bits, dim, **options)
        self.log_ratios = nn.Parameter(torch.zeros_like(self.first), requires_grad=weight.requires_grad)

    def begin_needs(self, device: torch.device) -> None:
        """Nothing was given yet; with a fixed delta, nothing has to be."""
        if self.options.scaling == "hessian":
            self.needs, self.sees_gradients = ("batches",), True  # type: ignore[misc]  # of this instance
            self.register_buffer("curvature", torch.zeros((), device=device, dtype=self.C.dtype))
            self.shown: list[Tensor] = []
        super().begin_needs(device)

    def observe_gradient(self, gradient: Tensor) -> None:
        """A batch has come.  What is kept belongs to the scaled weight, by the chain rule."""
        self.shown.append(self.unscaled(gradient.detach().to(self.C.dtype)).square().mean())

    def calibrate(self, weight: Tensor, name: str) -> None:
        """All batches have come: the mean over the weight of the second derivatives, which is their trace over n."""
        self.curvature.copy_(torch.stack(self.shown or [self.curvature.new_zeros(())]).mean())
        self.shown = []
        if not 0 < float(self.curvature) < math.inf:
            raise NeedError(
                f'method="{self.method}" has seen no gradient at {name} that is finite and not zero: give other '
                'batches, or scaling="fixed"'
            )

    def initial_centroids(self, W: Tensor) -> Tensor:
        """`(n, 1) -> (k, 1)`: the values of the first range, which is chosen here."""
        w = W[:, 0].to(compute_dtype(W.dtype))
        high = SPREADS * w.std(correction=0).clamp(min=1e-30)
        values = 2 * self._nearest(_places(w, -high, high)).to(w.dtype) / (2**self.bits - 1) - 1
        scale = ((w * values).sum() / values.square().sum()).clamp(min=1e-30)
        self.register_buffer("first", torch.stack([-high, high, scale]))
        return self._values(scale)

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> Clustering:
        """`(n, 1)` scaled weights -> W~ and the values of the codes.  Changes nothing."""
        quantised = self.coded(V.detach()[:, 0])
        norm = quantised.C[quantised.codes].square().sum().clamp(min=1e-30)
        low, high, scale = self._range(1 / norm)
        # by the chain rule, W~ = a (2 q - 1)
        by_place = (2 * scale.detach()).square() * self.curvature if self.options.scaling == "hessian" else None
        q = _Round.apply(_places(V, low, high), 2**self.bits - 1, self.options.delta, by_place)
        return Clustering(scale * (2 * q - 1), quantised.C, torch.zeros_like(self.step))

    @torch.no_grad()
    def coded(self, w: Tensor) -> Coded:
        """`(n,)` scaled weights -> the codes of the nearest places in the range."""
        low, high, scale = self._range()
        return Coded(self._values(scale), self._nearest(_places(w, low, high)))

    def _range(self, slope: Tensor | float = 1.0) -> Range:
        """The present range; the gradients of its logarithms are multiplied by the slope."""
        logs = whole(self.log_ratios)
        return Range(*(self.first * (logs.detach() + slope * (logs - logs.detach())).exp()))

    def _values(self, scale: Tensor) -> Tensor:
        """`(k, 1)`: of the codes."""
        return scale * torch.linspace(-1, 1, 2**self.bits, device=scale.device, dtype=scale.dtype)[:, None]

    def _nearest(self, places: Tensor) -> Tensor:
        """The codes of places from 0 to 1; of NaN 0, as a code must be one."""
        return (places.nan_to_num(0.0) * (2**self.bits - 1)).round().long()


def _places(w: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Where the weights lie in the range: from 0 to 1."""
    return ((w - low) / (high - low)).clamp(0, 1)


class _Round(torch.autograd.Function):
    """Places rounded to multiples of 1 / steps."""

    @staticmethod
    def forward(x: Tensor, steps: int, delta: float, by_place: Tensor | None) -> Tensor:
        """Places from 0 to 1 -> the nearest multiples."""
        return (x * steps).round() / steps

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """The rounding error, and what makes delta."""
        x, _, ctx.delta, by_place = inputs
        ctx.save_for_backward(x - output, by_place)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of the rounded place, scaled where the error has or has not its sign."""
        error, by_place = ctx.saved_tensors
        delta = ctx.delta if by_place is None else by_place / (3 * G.std(correction=0)).clamp(min=1e-30)
        return G * (1 + delta * G.sign() * error), None, None, None
