"""Deep k-Means (Wu et al., 2018): re-training and parameter sharing, with the objective of k-means in the loss."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...clustering.assign import assign
from ...clustering.cluster import Clustering
from ...clustering.options import MethodOptions, option
from .by_term import ByTerm, Term, TermOptions
from .by_vectors import means
from .registry import register

ASSIGNMENTS = ("clusters", "spectral")


@dataclass(frozen=True, kw_only=True)
class RPSOptions(TermOptions):
    """What Deep k-Means takes."""

    assignment: str = option(
        "clusters", "which vectors belong together: those of a cluster, or as singular vectors say", choices=ASSIGNMENTS
    )


@register("rps")
class RPS(ByTerm):
    """The network trains with its weights as they are, and k-means in the loss draws these into clusters.

        loss + strength / 2 (Tr W W^T - Tr F^T W W^T F),  W = the (n, d) vectors,  F = (n, k) with F^T F = 1

    F says which vectors belong together.  With a column for each cluster, 1 / sqrt(members) at its members, the term is
    half the squared distance of the vectors from the means of their clusters: the objective of k-means.

    Relaxed, with `assignment="spectral"`, F may be any orthonormal columns.  The least term then has the first k left
    singular vectors of W, and is half the sum of the other squared singular values.  It draws the vectors into a space
    of k dimensions.  Vectors of d <= k weights are in one anyway, so that it takes d > k.

    F follows the weights in every step.  Evaluation takes the nearest centroid.
    """

    Options: ClassVar[type[MethodOptions]] = RPSOptions
    paper: ClassVar[str] = "Wu 2018"
    options: RPSOptions

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options: Any):
        super().__init__(weight, bits, dim, **options)
        if self.options.assignment == "spectral" and dim <= 2**bits:
            raise ValueError(
                f'with assignment="spectral" the term of method="rps" is zero unless vectors have more weights than '
                f'there are centroids: give a dim above {2**bits}, or assignment="clusters"; got {self.spec.label}'
            )

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> Clustering:
        """`(n, d)` vectors -> the same, and the centroids after an iteration of k-means.  Changes nothing."""
        values = V.detach()
        return Clustering(V, means(values, assign(values, C), C), torch.ones_like(step))

    def term(self, V: Tensor, C: Tensor) -> Term:
        """What the vectors are away from k means, or from k dimensions."""
        if self.options.assignment == "clusters":
            codes = assign(V, C)
            away = V - means(V, codes, C)[codes]
        else:
            _, axes = torch.linalg.eigh((V.T @ V).nan_to_num())
            others = axes[:, : self.dim - 2**self.bits]  # those of the least singular values come first
            away = V @ others @ others.T
        return Term(away.square().sum() / 2, away)
