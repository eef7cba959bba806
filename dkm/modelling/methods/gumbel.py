"""GBS: DKM's loop with attention drawn from a Gumbel-softmax."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...clustering.cluster import Clustering
from ...clustering.kernels.blocked import BLOCK
from ...clustering.kernels.reference import distance, no_mass
from ...clustering.options import LoopOptions, MetricOptions, StartOptions, TemperedOptions
from ..tempered import Tempered
from .by_vectors import ByVectors, iterate
from .draws import draw_key, mix, uniform
from .registry import register


@dataclass(frozen=True, kw_only=True)
class GumbelOptions(TemperedOptions, LoopOptions, MetricOptions):
    """What the Gumbel-softmax takes."""


@register("gumbel")
class Gumbel(ByVectors, Tempered):
    """DKM's loop with its attention drawn from a Gumbel-softmax of the same logits, anew in every iteration.

        A = softmax(-f(W, C) / tau + g),  g = -log(-log(u)),  u uniform

    The draw is a function of the seed, the weight's first values, the step and the iteration, so that reading the
    weight again and activation checkpointing give the same.  The attention is recomputed in the backward pass.

    One more buffer: `key`, () int64, which names the draws.
    """

    Options: ClassVar[type[StartOptions]] = GumbelOptions
    paper: ClassVar[str] = "Cho 2022"
    options: GumbelOptions
    loop: GumbelOptions
    key: Tensor

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options: Any):
        super().__init__(weight, bits, dim, **options)
        self.register_buffer("key", draw_key(weight, self.options.seed))

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> Clustering:
        """`(n, d)` vectors and the centroids to start from -> their clustering.  Changes nothing."""
        tau, metric = self.temperature(step), self.options.metric
        tau = tau.to(V.dtype) if isinstance(tau, Tensor) else V.new_full((), tau)
        key = mix(self.key + step)

        def attend(C: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
            rows = max(1, BLOCK // (C.numel() if metric == "euclidean" else len(C)))
            recomputed = functools.partial(checkpoint, _attend, use_reentrant=False, preserve_rng_state=False)
            parts = [recomputed(block, C, tau, key + number, i * rows, metric) for i, block in enumerate(V.split(rows))]
            V_tilde, sums, masses = zip(*parts, strict=True)
            total, mass = sum(sums), sum(masses)[:, None]
            empty = mass <= no_mass(V.dtype)
            return torch.cat(V_tilde), torch.where(empty, C, total / torch.where(empty, 1.0, mass))

        C, iterations = iterate(lambda C, number: attend(C, number)[1], C, self.loop)
        return Clustering(*attend(C, iterations), iterations)


def _attend(V: Tensor, C: Tensor, tau: Tensor, key: Tensor, first: int, metric: str) -> tuple[Tensor, Tensor, Tensor]:
    """A C, A^T V and A^T 1 of some of the vectors, the first of which is number `first`."""
    noise = -(-uniform(key, first * len(C), len(V) * len(C), V.dtype).log()).log()
    # |v|^2 cancels in the softmax
    nearness = 2 * V @ C.T - C.square().sum(1) if metric == "sqeuclidean" else -distance(V, C, metric)
    A = torch.softmax(nearness / tau + noise.view(len(V), len(C)), dim=1)
    return A @ C, A.T @ V, A.sum(0)
