"""Entropy-constrained scalar quantisation (Choi et al., 2017): clusters that cost little error and few bits."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...clustering.kernels.blocked import BLOCK
from ...clustering.options import MethodOptions, option
from ...clustering.vectors import compute_dtype, to_vectors
from ...foundation.errors import NeedError
from ..clustered import squared_error
from ..needs import Needs
from .deep_compression import DeepCompression, DeepCompressionOptions
from .registry import register

LEAST = 0.01  # of the mean of h w^2: what a weight of mean size has at least, though no batch has shown that it matters
ROUNDS = 100  # at most
CONVERGED = 1e-4  # the part of the Lagrangian by which a round must lower it, for another one to follow


@dataclass(frozen=True, kw_only=True)
class ESCQOptions(DeepCompressionOptions):
    """What entropy-constrained quantisation takes."""

    lam: float = option(0.3, "what a bit of a code is worth, in the error that k-means makes per weight", least=0)


class Clusters(NamedTuple):
    """Vectors in clusters."""

    C: Tensor  # (k, d): the centroids
    codes: Tensor  # (n,) int64


@register("escq")
class ESCQ(DeepCompression):
    """Clusters that cost little in the loss and, entropy-coded, few bits; chosen once, then their centroids train.

        minimise  sum h (w - c)^2 - lam log2 p,   c = sum h w / sum h,   p = the part of all codes that the cluster has

    by turns: the cluster of each vector, then c and p.  h is the second derivative of the loss by the weight, as Gauss
    and Newton approximate it, from the gradients that `dkm.calibrate_` shows.  It is in a unit of all tensors together:
    the k-means that this starts from makes an error of 1 per weight in it, so that a bit is worth the same in each of
    them.  The clusters then train as those of Deep Compression do.

    One more buffer: `h`, shaped like the weight; 1 before the batches have come.
    """

    Options: ClassVar[type[MethodOptions]] = ESCQOptions
    needs: ClassVar[tuple[str, ...]] = ("batches",)
    sees_gradients: ClassVar[bool] = True
    paper: ClassVar[str] = "Choi 2017"
    options: ESCQOptions
    h: Tensor

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options: Any):
        super().__init__(weight, bits, dim, **options)
        self.squares: Tensor | None = None  # of the gradients that the batches have shown, summed up

    def initial_centroids(self, W: Tensor) -> Tensor:
        """`(n, d) -> (k, d)`: where the centroids start.  The first mean of clusters asks for h."""
        self.register_buffer("h", torch.ones(self.shape, device=W.device, dtype=compute_dtype(W.dtype)))
        return super().initial_centroids(W)

    def observe_gradient(self, gradient: Tensor) -> None:
        """A batch has come.  What is kept belongs to the scaled weight, by the chain rule."""
        squares = self.unscaled(gradient.detach().to(self.C.dtype)).square()
        self.squares = squares if self.squares is None else self.squares + squares

    @classmethod
    def calibrate_together(cls, shown: Sequence[tuple[Needs, Tensor, str]]) -> None:
        """All batches have come, for all weights of a model."""
        each = [(own, own.scaled(weight.detach()).to(own.C.dtype)) for own, weight, _ in shown if isinstance(own, cls)]
        found = [torch.zeros_like(own.h) if own.squares is None else own.squares for own, _ in each]
        numel = sum(W.numel() for _, W in each)
        worth = _total(squares * W.square() for (_, W), squares in zip(each, found, strict=True)) / numel
        if not 0 < worth < math.inf:
            raise NeedError(
                f'method="{cls.method}" has seen no gradient that is finite and not zero: give batches for which the '
                "model answers logits of several classes"
            )
        for (own, W), squares in zip(each, found, strict=True):
            own.h.copy_(squares + LEAST * worth / W.square().mean().clamp(min=1e-30))
            own.squares = None
        error = _total(own.errors(W) for own, W in each) / numel
        for own, W in each:
            own.h /= error
            own.choose(W)

    def errors(self, W: Tensor) -> Tensor:
        """`(n, d)`: what each scaled weight adds to the loss by being its centroid."""
        V, H = self._vectors(W)
        return H * (V - self.C[self.cluster_of.long()]).square()

    def choose(self, W: Tensor) -> None:
        """Cluster the scaled weight by h, once and for all."""
        V, H = self._vectors(W)
        found = clusters(V, H, Clusters(self.C, self.cluster_of.long()), self.options.lam)
        self.cluster_of.copy_(found.codes)
        self.C.copy_(found.C)
        self.start.copy_(found.C)
        self.unit.copy_(squared_error(V, found.C))

    def centroids(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """`(k, d)` twice: the sum and the mean of each cluster.

        The mean is weighted by h and has the gradient of the plain one: all weights of a cluster make the same step,
        and so does their mean, however they are weighted.
        """
        sums, plain = super().centroids(weight)
        V, H = self._vectors(weight.detach())
        C = weighted_means(V, H, Clusters(self.C, self.cluster_of.long()))
        return sums, C + (plain - plain.detach())

    def _vectors(self, W: Tensor) -> tuple[Tensor, Tensor]:
        """`(n, d)` twice: a scaled weight, and h, which is 0 where there is no more weight."""
        return to_vectors(W, self.dim).to(self.C.dtype), to_vectors(self.h, self.dim)


# --- the algorithm: V are `(n, d)` vectors, H is the h of each value, `(n, d)`


@torch.no_grad()
def clusters(V: Tensor, H: Tensor, found: Clusters, lam: float) -> Clusters:
    """Better clusters than the given ones, until they are as good as they get."""
    found = found._replace(C=weighted_means(V, H, found))
    before = lagrangian(V, H, found, lam)
    for _ in range(ROUNDS):
        found = improved(V, H, found, lam)
        now = lagrangian(V, H, found, lam)
        if not now < before - CONVERGED * abs(before):
            break
        before = now
    return found


def improved(V: Tensor, H: Tensor, found: Clusters, lam: float) -> Clusters:
    """A round: the best cluster of each vector, and then the best centroids of these.  The Lagrangian never rises."""
    prices = lam * bits_of(found.codes, len(found.C)) if lam else torch.zeros_like(found.C[:, 0])
    codes = []
    for v, h in zip(V.split(rows := max(1, BLOCK // len(found.C))), H.split(rows), strict=True):
        errors = sum(h[:, i, None] * (v[:, i, None] - found.C[:, i]).square() for i in range(V.shape[1]))
        codes.append((errors + prices.to(v.dtype)).argmin(1))
    found = Clusters(found.C, torch.cat(codes))
    return found._replace(C=weighted_means(V, H, found))


def weighted_means(V: Tensor, H: Tensor, found: Clusters) -> Tensor:
    """`(k, d)`: sum h w / sum h of each cluster; one without weight stays where it is."""
    nothing = torch.zeros_like(found.C)
    mass = nothing.index_add(0, found.codes, H)
    sums = nothing.index_add(0, found.codes, H * V)
    return torch.where(mass > 0, sums / torch.where(mass > 0, mass, 1), found.C)


def bits_of(codes: Tensor, k: int) -> Tensor:
    """`(k,)` float64: -log2 of the part of the codes that are each one; infinite where none is."""
    counts = torch.zeros(k, dtype=torch.int64, device=codes.device).index_add(0, codes, torch.ones_like(codes))
    return -(counts.double() / len(codes)).log2()


def lagrangian(V: Tensor, H: Tensor, found: Clusters, lam: float) -> float:
    """The error, and lam times the bits of all codes at their entropy."""
    error = float((H * (V - found.C[found.codes]).square()).double().sum())
    return error + lam * float(bits_of(found.codes, len(found.C))[found.codes].sum())


def _total(values: Iterable[Tensor]) -> float:
    return sum(float(each.double().sum()) for each in values)
