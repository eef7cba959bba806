"""Hard k-means: DKM's loop without attention."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...clustering.assign import assign
from ...clustering.cluster import Clustering
from ...clustering.options import LoopOptions, StartOptions
from .by_vectors import ByVectors, iterate, means
from .registry import register


@dataclass(frozen=True, kw_only=True)
class HardOptions(StartOptions, LoopOptions):
    """What k-means takes."""


@register("hard")
class Hard(ByVectors):
    """DKM's loop with each vector wholly in its nearest cluster, and no gradient through that choice.

        A = one-hot of the nearest centroid;  C_next = (A^T W) / (A^T 1);  W~ = A C_next

    A weight's gradient is the mean of its cluster's.
    """

    Options: ClassVar[type[StartOptions]] = HardOptions
    paper: ClassVar[str] = "Cho 2022"
    options: HardOptions
    loop: HardOptions

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> Clustering:
        """`(n, d)` vectors and the centroids to start from -> their clustering.  Changes nothing."""
        C, codes, iterations = k_means(V, C, self.loop)
        C = means(V, codes, C)
        return Clustering(C[codes], C, iterations)


@torch.no_grad()
def k_means(V: Tensor, C: Tensor, options: LoopOptions) -> tuple[Tensor, Tensor, Tensor]:
    """The centroids that the last iteration starts from, each vector's code, and how many iterations were used."""
    C, number = iterate(lambda C, number: means(V, assign(V, C), C), C, options)
    return C, assign(V, C), number
