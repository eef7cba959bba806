"""Quant-Noise (Fan et al., 2021): a random part of the vectors is snapped at each step."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...clustering.assign import assign
from ...clustering.cluster import Clustering
from ...clustering.options import StartOptions, option
from .by_vectors import ByVectors, means
from .draws import draw_key, mix, uniform
from .hard import HardOptions, k_means
from .registry import register


@dataclass(frozen=True, kw_only=True)
class QuantNoiseOptions(HardOptions):
    """What Quant-Noise takes."""

    p: float = option(0.1, "the fraction of the vectors that are snapped in the first step")
    p_end: float = option(1.0, "the fraction at the end; equal to p, it stays the same")
    last: float = option(0.25, "the part of the training, at its end, that has the fraction p_end")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, what in (("p", "is the fraction of the vectors that are snapped"), ("p_end", "is that at the end")):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value <= 1:
                raise ValueError(f"{name} {what}, above 0 and up to 1, got {value!r}")
        if not isinstance(self.last, int | float) or not 0 <= self.last <= 1:
            raise ValueError(f"last is a part of the training, from 0 to 1, got {self.last!r}")
        if self.steps is None and self.p_end != self.p:
            raise ValueError(
                f"the fraction of snapped vectors goes from p={self.p} to p_end={self.p_end} over the training: say "
                "how many optimizer steps you will train, steps=<an integer of at least 1>, got steps=None; or give "
                "p_end the value of p"
            )


@register("quant_noise")
class QuantNoise(ByVectors):
    """A random fraction of the vectors is snapped, anew in every step.

        W~ = where(u < p, the nearest centroid of W, W),  dW = dW~

    The fraction grows from `p` to `p_end` and stays there for the last part of the training, where with the default of
    1 the network trains as it will be evaluated: with all vectors snapped.

    The centroids follow the weights by k-means.  The draw is a function of the seed, the weight's first values
    and the step, so that reading the weight again and activation checkpointing give the same.

    One more buffer: `key`, () int64, which names the draws.
    """

    Options: ClassVar[type[StartOptions]] = QuantNoiseOptions
    paper: ClassVar[str] = "Fan 2021"
    options: QuantNoiseOptions
    loop: QuantNoiseOptions
    key: Tensor

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options: Any):
        super().__init__(weight, bits, dim, **options)
        self.steps = self.options.steps
        self.register_buffer("key", draw_key(weight, self.options.seed))

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> Clustering:
        """`(n, d)` vectors and the centroids to start from -> their clustering.  Changes nothing."""
        values = V.detach()
        C, codes, iterations = k_means(values, C, self.loop)
        C = means(values, codes, C)
        noisy = uniform(mix(self.key + step), 0, len(V), V.dtype)[:, None] < self.fraction(step)
        V_tilde = torch.where(noisy, C[assign(values, C)], values) + (V - values)  # + 0, and its gradient
        return Clustering(V_tilde, C, iterations)

    def fraction(self, step: Tensor) -> Tensor | float:
        """Of the vectors that are snapped, after `step` steps."""
        p, p_end, last = self.options.p, self.options.p_end, self.options.last
        if not self.anneals or self.steps is None or last == 1:
            return p_end
        return p + (p_end - p) * (step / (self.steps * (1 - last))).clamp(max=1)

    @property
    def anneals(self) -> bool:
        """Whether the fraction changes over `steps`."""
        return self.options.p_end != self.options.p

    def set_steps(self, steps: int) -> None:
        """The fraction is at its end after so many optimizer steps."""
        self.steps = steps
