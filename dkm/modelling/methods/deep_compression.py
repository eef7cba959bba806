"""Deep Compression (Han et al., 2016): k-means once, then only the centroids train."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...clustering.assign import assign
from ...clustering.cluster import Clustering
from ...clustering.initialize import lloyd_1d, sorted_values
from ...clustering.options import MethodOptions, StartOptions, option
from ...clustering.vectors import compute_dtype, from_vectors, to_vectors
from ..clustered import Clustered, squared_error
from .registry import register


@dataclass(frozen=True, kw_only=True)
class SharingOptions(MethodOptions):
    """What a method takes whose clusters are frozen and whose centroids train."""

    gradient_scale: str = option(
        "mean", "each weight gets its cluster's mean gradient, or the sum, as in the paper", choices=("mean", "sum")
    )


@dataclass(frozen=True, kw_only=True)
class DeepCompressionOptions(StartOptions, SharingOptions):
    """What Deep Compression takes."""


@register("dc")
class DeepCompression(Clustered):
    """k-means once, the clusters frozen; only their centroids train.

        c_j = the mean of the weights of cluster j;  W~ = c[cluster]

    A weight's gradient is the mean of its cluster's.  So a step of SGD is the step on W~ itself, projected to the
    weights that share values, and a learning rate that suits the model suits its clusters, however large they are.
    With `gradient_scale="sum"` it is the sum: all weights of a cluster take the same step, and c_j the step that an
    optimizer would make with the gradient of c_j, which for SGD grows with the cluster.

    For dim 1 k-means starts from centroids evenly between the least and the greatest weight, as in the paper; for more
    dimensions from k-means++.

    One more buffer: `cluster_of`, (n,) uint8, or int16 above 8 bits.
    """

    Options: ClassVar[type[MethodOptions]] = DeepCompressionOptions
    paper: ClassVar[str] = "Han 2016"
    options: DeepCompressionOptions
    cluster_of: Tensor

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options: Any):
        super().__init__(weight, bits, dim, **options)
        V = to_vectors(self.scaled(weight.detach()), dim)
        codes = assign(V, self.C)
        self.register_buffer("cluster_of", codes.to(torch.uint8 if bits <= 8 else torch.int16))
        self.C = self.centroids(self.scaled(weight.detach()))[1]
        self.start, self.unit = self.C.clone(), squared_error(V, self.C)

    def initial_centroids(self, W: Tensor) -> Tensor:
        """`(n, d) -> (k, d)`: where the centroids start."""
        if self.dim > 1 or self.options.init != "kmeans":
            return super().initial_centroids(W)
        values = sorted_values(W[:, 0], torch.Generator().manual_seed(self.options.seed))
        C = lloyd_1d(values, np.linspace(values[0], values[-1], 2**self.bits))
        return torch.from_numpy(C)[:, None].to(W.device, compute_dtype(W.dtype))

    def cluster(self, weight: Tensor, start: Tensor, step: Tensor) -> Clustering:
        """W~ = c[cluster].  Changes nothing."""
        sums, C = self.centroids(weight)
        # the value of a mean, with the gradient of a sum where the options say so
        moving = C if self.options.gradient_scale == "mean" else C.detach() + (sums - sums.detach())
        W_tilde = from_vectors(moving[self.cluster_of.long()].to(weight.dtype), weight.shape)
        return Clustering(W_tilde, C.detach(), torch.zeros_like(self.step))

    def centroids(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """`(k, d)` twice: the sum and the mean of each cluster.  The zeros that fill up the tail do not count."""
        codes, nothing = self.cluster_of.long(), torch.zeros_like(self.C)
        sums = nothing.index_add(0, codes, to_vectors(weight, self.dim).to(self.C.dtype))
        count = nothing.index_add(0, codes, to_vectors(torch.ones_like(weight), self.dim).to(self.C.dtype))
        return sums, torch.where(count > 0, sums / count.clamp(min=1), self.C)

    @torch.no_grad()
    def codes(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The centroids in the precision of the file, `(k, dim)`, and each vector's frozen cluster, `(n,)` int64."""
        return self.stored(self.centroids(self.scaled(weight))[1], weight.dtype), self.cluster_of.long()
