"""Deep k-Means (Wu et al., 2018): re-training and parameter sharing, with the objective of k-means in the loss."""

from typing import ClassVar

import torch
from torch import Tensor

from ...clustering.assign import assign
from ...clustering.cluster import Clustering
from .by_term import ByTerm, Term
from .by_vectors import means
from .registry import register


@register("rps")
class RPS(ByTerm):
    """The network trains with its weights as they are, and k-means in the loss draws these into clusters.

        loss + strength / 2 (Tr W W^T - Tr F^T W W^T F),  W = the (n, d) vectors,  F = (n, k) with F^T F = 1

    F says which vectors belong together.  With one column per cluster, 1 / sqrt(members) at its members, the term is
    half the squared distance of the vectors from the means of their clusters, and its gradient the way from the mean.
    Relaxed, F may be any orthonormal columns; the least term has the first k singular vectors of W, and is half the
    sum of the other squared singular values.

    The relaxed term says something about vectors of more weights than there are centroids, d > k, and is used for
    these.  All others span d <= k dimensions anyway: it would be zero, and F is that of the clusters.

    F follows the weights in every step.  Evaluation takes the nearest centroid.
    """

    paper: ClassVar[str] = "Wu 2018"

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> Clustering:
        """`(n, d)` vectors -> the same, and the centroids after an iteration of k-means.  Changes nothing."""
        values = V.detach()
        return Clustering(V, means(values, assign(values, C), C), torch.ones_like(step))

    def term(self, V: Tensor, C: Tensor) -> Term:
        """What the vectors are away from k clusters, or from k dimensions."""
        if self.dim > 2**self.bits:
            _, axes = torch.linalg.eigh((V.T @ V).nan_to_num())
            others = axes[:, : self.dim - 2**self.bits]  # those of the least singular values come first
            away = V @ others @ others.T
        else:
            codes = assign(V, C)
            away = V - means(V, codes, C)[codes]
        return Term(away.square().sum() / 2, away)
