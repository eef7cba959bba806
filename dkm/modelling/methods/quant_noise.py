"""Quant-Noise (Fan et al., 2021): a random part of the vectors is snapped at each step."""

from dataclasses import dataclass
from numbers import Real
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

    p: float = option(0.1, "the fraction of the vectors that are snapped in each step")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.p, Real) or not 0 < self.p <= 1:
            raise ValueError(f"p is the fraction of the vectors that are snapped, above 0 and up to 1, got {self.p!r}")


@register("quant_noise")
class QuantNoise(ByVectors):
    """A random fraction `p` of the vectors is snapped, anew in every step.

        W~ = where(u < p, the nearest centroid of W, W),  dW = dW~

    The centroids follow the weights by k-means.  The draw is a function of the seed, the weight's first values
    and the step, so that reading the weight again and activation checkpointing give the same.

    One more buffer: `key`, () int64, which names the draws.
    """

    Options: ClassVar[type[StartOptions]] = QuantNoiseOptions
    options: QuantNoiseOptions
    loop: QuantNoiseOptions
    key: Tensor

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options: Any):
        super().__init__(weight, bits, dim, **options)
        self.register_buffer("key", draw_key(weight, self.options.seed))

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> Clustering:
        """`(n, d)` vectors and the centroids to start from -> their clustering.  Changes nothing."""
        values = V.detach()
        C, codes, iterations = k_means(values, C, self.loop)
        C = means(values, codes, C)
        noisy = uniform(mix(self.key + step), 0, len(V), V.dtype)[:, None] < self.options.p
        V_tilde = torch.where(noisy, C[assign(values, C)], values) + (V - values)  # + 0, and its gradient
        return Clustering(V_tilde, C, iterations)
