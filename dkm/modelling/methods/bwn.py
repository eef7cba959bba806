"""Binary weight networks (Rastegari et al., 2016): the sign of each weight, and a scale."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...clustering.cluster import Clustering
from ...clustering.options import MethodOptions, option
from ...clustering.vectors import compute_dtype
from .by_codes import ByCodes, Coded
from .registry import register


@dataclass(frozen=True, kw_only=True)
class BWNOptions(MethodOptions):
    """What binary weights take."""

    clip: float = option(1.0, "a centred weight beyond it gets no gradient that pushes it further", least=0)


class Binary(NamedTuple):
    """Rows of weights as signs: `scales * signs` is the nearest to `centred` of all such products."""

    centred: Tensor  # (rows, weights)
    signs: Tensor  # the same: -1 or 1
    scales: Tensor  # (rows, 1)


@register("bwn")
class BWN(ByCodes):
    """The sign of each weight, times the mean absolute value of its filter.

        W~ = a sign(W - m),  m = the mean of the filter,  a = mean |W - m|

    which is the nearest to W - m of all such products.  A plan that says `1 scaled` gives each filter, an index of the
    first axis, an m and an a of its own, as in the paper; with `1` the tensor is one filter.  The scales follow from
    the weight: what a file holds as the scale of a row is its a.

    The gradient of a weight is (1 / n + 1) dW~, n weights in a filter, and 1 / n dW~ where it would push a weight
    beyond `clip`.  In the paper it is (1 / n + a) dW~, of a weight in units of 1 instead of a; a is about 0.02, and
    SGD would hardly move.
    """

    Options: ClassVar[type[MethodOptions]] = BWNOptions
    most_bits: ClassVar[int] = 1
    paper: ClassVar[str] = "Rastegari 2016"
    options: BWNOptions

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> Clustering:
        """`(n, 1)` scaled weights -> W~ and the values of the two codes.  Changes nothing."""
        W = self._filters(V)
        binary = self._binary(W.detach())
        at_the_end = binary.centred.abs() >= self.options.clip
        W_tilde = _Binarize.apply(W, binary.scales, binary.signs, at_the_end)
        return Clustering(W_tilde.reshape(-1, 1), self._values(binary), torch.zeros_like(self.step))

    def coded(self, w: Tensor) -> Coded:
        """`(n,)` scaled weights -> their signs as codes."""
        binary = self._binary(self._filters(w))
        return Coded(self._values(binary), (binary.signs > 0).long().view(-1))

    def stored_scales(self, weight: Tensor) -> Tensor | None:
        """The scales of the rows as the file holds them: those of the weights, times those of the signs."""
        if self.scales is None:
            return None
        w = self.scaled(weight.detach()).reshape(-1).to(compute_dtype(weight.dtype))
        scales = self._binary(self._filters(w)).scales[:, 0] * self.scales
        limits = torch.finfo(torch.float16)  # a row of zeros has a scale too
        return scales.clamp(limits.smallest_normal * limits.eps, limits.max).half()

    def _filters(self, w: Tensor) -> Tensor:
        return w.reshape(len(self.scales) if self.scales is not None else 1, -1)

    def _binary(self, W: Tensor) -> Binary:
        centred = W - W.mean(1, keepdim=True)
        return Binary(centred, torch.where(centred >= 0, 1.0, -1.0).to(W.dtype), centred.abs().mean(1, keepdim=True))

    def _values(self, binary: Binary) -> Tensor:
        """`(2, 1)`: of the codes 0 and 1, for weights that are divided by `stored_scales` where there are any."""
        a = binary.scales[0] if self.scales is None else torch.ones_like(binary.scales[0])
        return torch.stack([-a, a])


class _Binarize(torch.autograd.Function):
    """Binary values, with the gradient of a weight that is clamped."""

    @staticmethod
    def forward(W: Tensor, scales: Tensor, signs: Tensor, at_the_end: Tensor) -> Tensor:
        """Weights `(rows, n)`, their scales `(rows, 1)`, their signs, and whether they have reached the clip."""
        return scales * signs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Which weights may not move on, and where to."""
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor | None, ...]:
        """A step goes against the gradient: one of the other sign pushes a weight away from zero."""
        signs, at_the_end = ctx.saved_tensors
        stopped = at_the_end & (G * signs < 0)
        return G * (1 / G.shape[1] + (~stopped).to(G.dtype)), None, None, None
