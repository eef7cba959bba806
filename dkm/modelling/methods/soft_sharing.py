"""Soft weight sharing (Ullrich et al., 2017): a mixture of Gaussians as a prior of the weights."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...clustering.assign import assign
from ...clustering.cluster import Clustering
from ...clustering.kernels.blocked import BLOCK
from ...clustering.options import MethodOptions, option
from .by_term import ByTerm, Term, TermOptions
from .by_vectors import means
from .registry import register

SHARPEST = 1e-6  # the least variance, of that of the first clustering


@dataclass(frozen=True, kw_only=True)
class SoftSharingOptions(TermOptions):
    """What soft weight sharing takes."""

    zero: float = option(0.0, "the fixed share of a component that stays at zero; 0: all components are free", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.zero < 1:
            raise ValueError(f"zero is a share, from 0 to less than 1, got {self.zero!r}")


class Mixture(NamedTuple):
    """Gaussians of d dimensions."""

    C: Tensor  # (k, d): the means
    variances: Tensor  # (k,)
    shares: Tensor  # (k,)
    variance: Tensor  # (): over all of them


@register("soft-sharing")
class SoftSharing(ByTerm):
    """The network trains with its weights as they are, and a term of the loss draws these into clusters.

        loss + strength s^2 sum -log p(v),  p = sum_j pi_j N(c_j, s_j^2),  s^2 = the mean squared error of the mixture

    The gradient of the term is about the way of a weight to its component, times the strength, which grows over the
    training.

    The mixture is not trained but fitted to the weights, by a round of expectation and maximisation in each step.  Its
    variances have a Gamma prior as strong as all weights together, of mode s^2: that keeps them from zero, and within a
    factor of two of s^2.
    """

    Options: ClassVar[type[MethodOptions]] = SoftSharingOptions
    paper: ClassVar[str] = "Ullrich 2017"
    options: SoftSharingOptions

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> Clustering:
        """`(n, d)` vectors -> the same, and the means of the mixture.  Changes nothing."""
        return Clustering(V, self.mixture(V.detach(), C).C, torch.ones_like(step))

    @torch.no_grad()
    def mixture(self, V: Tensor, C: Tensor) -> Mixture:
        """`(n, d), (k, d)`: the mixture of the vectors, from these means."""
        codes = assign(V, C)
        C = means(V, codes, C)
        return self._maximised(V, self._fitted(C, *_sums(V, C, codes)))

    def _maximised(self, V: Tensor, mixture: Mixture) -> Mixture:
        masses, sums, squares = (torch.zeros_like(x) for x in (mixture.shares, mixture.C, mixture.shares))
        for block in self._blocks(V):
            R = _log_densities(block, mixture).softmax(1)
            masses += R.sum(0)
            sums += R.T @ block
            squares += (R * _squares(block, mixture.C)).sum(0)
        C = torch.where(masses[:, None] > 1e-6, sums / masses.clamp(min=1e-6)[:, None], mixture.C)
        squares = (squares - masses * (C - mixture.C).square().sum(1)).clamp(min=0)  # to the new means
        return self._fitted(C, masses, squares)

    def _fitted(self, C: Tensor, masses: Tensor, squares: Tensor) -> Mixture:
        """The mixture of these means, masses `(k,)` and squared distances to the means `(k,)`."""
        n, d = masses.sum(), C.shape[1]
        variance = torch.maximum(squares.sum() / (n * d), SHARPEST * self.unit)
        variances = (squares / d + n * variance) / (masses + n)
        shares = (masses + 1) / (n + len(C))  # one more each: a component without vectors may get some again
        if self.options.zero:
            at_zero = torch.arange(len(C), device=C.device) == C.square().sum(1).argmin()
            others = torch.where(at_zero, 0.0, shares)
            C = torch.where(at_zero[:, None], 0.0, C)
            shares = torch.where(at_zero, self.options.zero, (1 - self.options.zero) * others / others.sum())
        return Mixture(C, variances, shares, variance)

    def term(self, V: Tensor, C: Tensor) -> Term:
        """The negative logarithm of the prior, in units of the variance."""
        mixture = self.mixture(V, C)
        total, G = self._prior(V, mixture)
        return Term(mixture.variance * total, mixture.variance * G)

    @torch.no_grad()
    def _prior(self, V: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
        """`()` and `(n, d)`: the sum of -log p, and its gradient."""
        total, gradients = V.new_zeros(()), []
        for block in self._blocks(V):
            logs = _log_densities(block, mixture)
            total = total - logs.logsumexp(1).sum()
            pull = logs.softmax(1) / mixture.variances
            gradients.append(pull.sum(1, keepdim=True) * block - pull @ mixture.C)
        return total, torch.cat(gradients)

    def _blocks(self, V: Tensor) -> tuple[Tensor, ...]:
        return V.split(max(1, BLOCK // 2**self.bits))


def _sums(V: Tensor, C: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """`(k,)` twice: how many vectors have each code, and their squared distances to its centroid."""
    nothing = torch.zeros(len(C), dtype=V.dtype, device=V.device)
    squares = (V - C[codes]).square().sum(1)
    return nothing.index_add(0, codes, torch.ones_like(squares)), nothing.index_add(0, codes, squares)


def _log_densities(V: Tensor, mixture: Mixture) -> Tensor:
    """`(n, k)`: log(share times density) of each component at each vector."""
    C, variances, shares, _ = mixture
    return shares.log() - 0.5 * (V.shape[1] * (2 * math.pi * variances).log() + _squares(V, C) / variances)


def _squares(V: Tensor, C: Tensor) -> Tensor:
    """`(n, k)`: squared distances, from differences: near a centroid products would leave nothing but rounding."""
    return sum((V[:, i, None] - C[:, i]).square() for i in range(V.shape[1]))  # type: ignore[return-value]
