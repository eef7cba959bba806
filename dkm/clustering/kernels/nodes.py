"""Single weights (d = 1) through a few places between them, where functions of a weight are computed instead.

With d = 1 all that an iteration computes for a weight is a smooth function of that one number.  So the range of the
weights is cut into bins, and a function is computed at a few places of each bin, the Chebyshev nodes.  In between, the
polynomial through these stands for it.  Then

* a sum of a function over all weights is a weighted sum over the nodes.  The weights of the nodes depend on W alone,
  and are added up once, in one pass over W, for all iterations.
* a function of every weight, such as W_tilde, is one pass over W, whatever the number of centroids.

The bins are so narrow that the polynomial is off by 1e-8 of what it stands for, less than float32 rounds.  How narrow
that is follows from how far the functions can be continued into the complex plane, which is up to the zeros of the
denominator of the softmax.  For two centroids these are at a distance of `pi tau / (2 |c1 - c2|)`; wide sums of many
close centroids have them at a distance of about half a `sqrt(tau)` or more.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..options import ClusterOptions

ACCURACY = 1e-8
ORDERS = (4, 6, 8)  # nodes per bin: the first with which there are few nodes per weight, because it costs least
FEW, MOST = 1 / 16, 1 / 4  # nodes per weight that are few, and more than that do not pay
PIECE = 1 << 15  # weights at a time, which fit a cache
SPARE = 1.5  # so many times the present gap between centroids is prepared for, because it may grow


class Nodes:
    """The bins between the smallest and the largest weight, and their nodes `x` `(bins * order,)`, in float64."""

    def __init__(self, low: float, high: float, bins: int, order: int, gap: float):
        self.low, self.bins, self.order, self.gap = low, bins, order, gap
        self.scale = bins / (high - low) * (1 - 1e-12)  # the largest weight belongs to the last bin
        u = -torch.cos((2 * torch.arange(order, dtype=torch.float64) + 1) * (math.pi / (2 * order)))
        self.inverse = torch.linalg.inv(torch.vander(u, increasing=True))  # from values at nodes to coefficients
        middles = torch.arange(bins, dtype=torch.float64) + 0.5
        self.x = ((middles[:, None] + u / 2) / self.scale + low).reshape(-1)

    def resolve(self, C: Tensor) -> bool:
        """Whether the bins are narrow enough for these centroids."""
        return _gap(C) <= self.gap

    def _pieces(self, W: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """For some weights at a time their bins, and where in their bin they are, from -1 to 1, in float64."""
        for first in range(0, W.numel(), PIECE):
            at = slice(first, first + PIECE)
            place = W[at].double().sub_(self.low).mul_(self.scale)
            yield at, place.long(), place.frac_().mul_(2).sub_(1)

    def gather(self, W: Tensor, *factors: Tensor | None) -> list[Tensor]:
        """For each factor `(N,)`, where None is 1: the `(nodes,)` that make a weighted sum over nodes of a function the
        sum over the weights of factor times function."""
        moments = [torch.zeros(self.order, self.bins, dtype=torch.float64) for _ in factors]
        for at, bins, u in self._pieces(W):
            for factor, sums in zip(factors, moments, strict=True):
                power = torch.ones_like(u) if factor is None else factor[at].double()
                for moment in range(self.order):
                    sums[moment].scatter_add_(0, bins, power)
                    power = power * u if factor is None or moment == 0 else power.mul_(u)
        return [(sums.t() @ self.inverse).reshape(-1) for sums in moments]

    def evaluate(self, W: Tensor, *values: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """For some weights at a time, functions of them in float32, from their values at the nodes `(nodes,)`."""
        tables = [(self.inverse @ value.view(self.bins, self.order).t()).float() for value in values]
        for at, bins, u in self._pieces(W):
            close, found = u.float(), []
            for table in tables:
                sums = table[-1].index_select(0, bins)
                for row in reversed(table[:-1].unbind()):
                    sums = torch.addcmul(row.index_select(0, bins), sums, close)
                found.append(sums)
            yield at, found


def nodes_for(W: Tensor, C: Tensor, tau: float, options: ClusterOptions) -> Nodes | None:
    """The nodes for W `(N,)` and centroids, those of several iterations perhaps `(..., k, 1)`; None where they are not
    exact enough or do not pay."""
    k = C.shape[-2]
    if W.device.type != "cpu" or W.dtype == torch.float64 or options.metric != "sqeuclidean" or k < 3:
        return None
    low, high = (float(value) for value in W.aminmax())
    gap = SPARE * _gap(C)
    if not (math.isfinite(high - low) and low < high and 0 < gap < math.inf):
        return None
    reach = math.pi * tau / (2 * max(gap, 3 * math.sqrt(tau)))
    for order in ORDERS:
        ratio = (2 / ACCURACY) ** (1 / order)
        bins = (high - low) * (ratio - 1 / ratio) / (4 * reach)
        if bins * order <= (MOST if order == ORDERS[-1] else FEW) * W.numel():
            return Nodes(low, high, math.ceil(bins), order, gap)
    return None


def _gap(C: Tensor) -> float:
    """The largest distance between neighbouring centroids, `(..., k, 1)`."""
    return float(C[..., 0].sort().values.diff().amax())
