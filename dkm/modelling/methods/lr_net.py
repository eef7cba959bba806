"""LR-Net (Shayer et al., 2018): a distribution over two or three values per weight, and noise in layers' outputs."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...clustering.cluster import Clustering
from ...clustering.options import MethodOptions, option
from ...clustering.vectors import compute_dtype
from .by_codes import ByCodes, Coded
from .draws import draw_key, mix, normal
from .registry import register

LIKELY, UNLIKELY = 0.95, 0.05  # the probabilities of zero, of weights of 0 and of a standard deviation
TINY = 1e-30  # the least variance of an output whose root has a gradient


@dataclass(frozen=True, kw_only=True)
class LRNetOptions(MethodOptions):
    """What LR-Net takes."""

    sharpness: float = option(10.0, "the factor that all logits have got at the end; 1: none, as in the paper", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None and self.sharpness != 1:
            raise ValueError(
                f"the probabilities sharpen by sharpness={self.sharpness:g} over the training: say how many optimizer "
                "steps you will train, steps=<an integer of at least 1>, got steps=None; or give sharpness=1"
            )


class Moments(NamedTuple):
    """Of the values that weights may have, in units of the scale; tensors of one shape."""

    mean: Tensor
    variance: Tensor


@register("lr-net")
class LRNet(ByCodes):
    """A probability for each of two or three values, and a layer that samples what it outputs, not its weights.

        1 bit:   a {-1, 1},     p(1) = sigmoid(2 r W / s)
        2 bits:  a {-1, 0, 1},  p(0) = sigmoid(r Z / s) = 1 - q,  p(1) = q sigmoid(2 r W / (q s))

        y = E[W~] x + b + sqrt(Var[W~] x^2) noise

    with s the standard deviation of the first weight, and a sharpness r that grows from 1 over the training.  The mean
    is a tanh(W / s) at first, or a q tanh(W / (q s)): about the weight, so a learning rate that suits the weights suits
    their probabilities.  A sum of many independent values is nearly normal, so the noise of an output stands for that
    of all its weights.  It is a function of the seed, the weight's first values and the step.  Evaluation takes the
    most probable value.

    Two more buffers, and up to two more parameters.  Build the optimizer afterwards:
        key        ()    int64, which names the draws
        first      (2,)  s, and a at the start, where the means are nearest to the weights
        log_ratio  (1,)  the logarithm of a over that; its gradient is divided by |E[W~]|^2, as that of ewgs is
        Z          like the weight; 2 bits only
    """

    Options: ClassVar[type[MethodOptions]] = LRNetOptions
    layers: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    most_bits: ClassVar[int] = 2
    paper: ClassVar[str] = "Shayer 2018"
    options: LRNetOptions
    key: Tensor
    first: Tensor

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options: Any):
        super().__init__(weight, bits, dim, **options)
        self.steps = self.options.steps
        self.register_buffer("key", draw_key(weight, self.options.seed))
        self.requires_grad_(weight.requires_grad)

    @torch.no_grad()
    def initial_centroids(self, W: Tensor) -> Tensor:
        """`(n, 1) -> (k, 1)`: the values of the first distribution, which is chosen here."""
        w = W[:, 0].to(compute_dtype(W.dtype))
        s = w.std(correction=0).clamp(min=1e-30)
        self.register_buffer("first", torch.stack([s, s]))
        if self.bits == 2:
            zero = LIKELY - (LIKELY - UNLIKELY) * (w / s).abs().clamp(max=1)
            self.Z = nn.Parameter((s * zero.logit()).view(self.shape))
        mean = self.moments(w, 1 / s).mean
        self.first[1] = ((w * mean).sum() / mean.square().sum().clamp(min=1e-30)).clamp(min=1e-30)
        self.log_ratio = nn.Parameter(torch.zeros_like(self.first[:1]))
        return self._values(self.scale())

    def moments(self, w: Tensor, steepness: Tensor) -> Moments:
        """Of scaled weights, in at least float32, of the shape of the weight or flat."""
        u = w * steepness
        if self.bits == 1:
            mean = torch.tanh(u)
            return Moments(mean, 1 - mean * mean)
        z = self.Z.view(w.shape) * steepness
        zero, q = torch.sigmoid(z), torch.sigmoid(-z).clamp(min=1e-6)
        t = torch.tanh(u / q)
        return Moments(q * t, q * (zero + q * (1 - t * t)))  # q - (q t)^2, without its cancellation

    def steepness(self, step: Tensor) -> Tensor:
        """`()`: r / s after `step` steps: a logit is that many times a weight."""
        if not self.anneals or self.steps is None:
            return 1 / self.first[0]
        return self.options.sharpness ** (step / self.steps).clamp(max=1).to(self.first.dtype) / self.first[0]

    @property
    def anneals(self) -> bool:
        """Whether the probabilities sharpen over `steps`."""
        return self.options.sharpness != 1

    def set_steps(self, steps: int) -> None:
        """The probabilities are as sharp as they get after so many optimizer steps."""
        self.steps = steps

    def scale(self, slope: Tensor | float = 1.0) -> Tensor:
        """`()`: a; the gradient of its logarithm is multiplied by the slope."""
        log = self.log_ratio[0]
        return self.first[1] * (log.detach() + slope * (log - log.detach())).exp()

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> Clustering:
        """`(n, 1)` scaled weights -> the means, and the values of the codes.  Changes nothing."""
        mean = self.moments(V[:, 0], self.steepness(step)).mean[:, None]
        a = self.scale(self._slope(mean))
        return Clustering(a * mean, self._values(a.detach()), torch.zeros_like(self.step))

    def compute(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The outputs y of a layer for its inputs x, with noise."""
        weight: Any = module.parametrizations.weight.original  # type: ignore[union-attr]
        with torch.autocast(weight.device.type, enabled=False):
            dtype = torch.promote_types(compute_dtype(weight.dtype), x.dtype)
            moments = self.moments(self.scaled(weight).to(dtype), self.steepness(self.step))
            squares = x.to(dtype).square()
            if isinstance(module, nn.Linear):
                variance, channels = F.linear(squares, moments.variance), -1
            else:
                variance = module._conv_forward(squares, moments.variance, None)  # type: ignore[operator]
                channels = -len(module.kernel_size) - 1  # type: ignore[arg-type]
            deviation = self._stands_for(self.scale(self._slope(moments.mean)), y.ndim, channels)
            noise = normal(mix(self.key + self.step), variance.numel(), dtype).view(variance.shape)
            return y + (deviation * variance.clamp(min=TINY).sqrt() * noise).to(y.dtype)

    @torch.no_grad()
    def coded(self, w: Tensor) -> Coded:
        """`(n,)` scaled weights -> the codes of their most probable values."""
        values = self._values(self.scale())
        if self.bits == 1:
            return Coded(values, (w >= 0).long())
        steepness = self.steepness(self.step)
        z = self.Z.view(-1) * steepness
        q = torch.sigmoid(-z).clamp(min=1e-6)
        nonzero = q * torch.sigmoid(2 * (w * steepness).abs() / q) > torch.sigmoid(z)
        return Coded(values, 1 + nonzero * torch.where(w > 0, 1, -1))

    def _values(self, a: Tensor) -> Tensor:
        """`(k, 1)`: of the codes.  With 2 bits the last one is not used."""
        codes = torch.arange(2**self.bits, device=a.device)[:, None]
        return a * (2 * codes - 1 if self.bits == 1 else torch.where(codes < 3, codes - 1, 0))

    def _slope(self, mean: Tensor) -> Tensor:
        return 1 / (self.scale() * mean).detach().square().sum().clamp(min=1e-30)

    def _stands_for(self, a: Tensor, ndim: int, channels: int) -> Tensor:
        """The scale of the weight itself, of the dimensions of an output with its channels there."""
        rows = self.unscaled(a.expand(len(self.scales), 1) if self.scales is not None else a.view(1, 1))
        shape = [1] * ndim
        shape[channels] = len(rows)
        return rows.view(shape)
