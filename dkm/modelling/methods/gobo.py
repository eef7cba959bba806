"""GOBO (Zadeh et al., 2020): outliers stay as they are, and all other weights are clustered by their absolute error."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...clustering.cluster import Clustering
from ...clustering.decode import Outliers
from ...clustering.initialize import sorted_values
from ...clustering.options import MethodOptions, option
from ...clustering.vectors import compute_dtype
from ..clustered import TYPICAL_EXPONENT, squared_error
from ..dtensors import whole
from .deep_compression import DeepCompression, SharingOptions
from .registry import register

ROUNDS = 1000  # at most


@dataclass(frozen=True, kw_only=True)
class GOBOOptions(SharingOptions):
    """What GOBO takes."""

    threshold: float = option(-4.0, "a weight is an outlier where the logarithm of its density is below this")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.threshold, Real) or isinstance(self.threshold, bool) or math.isnan(self.threshold):
            raise ValueError(f"threshold is the logarithm of a density, a number such as -4, got {self.threshold!r}")


class Bins(NamedTuple):
    """Sorted values in clusters."""

    bounds: np.ndarray  # (k + 1,): where each cluster begins among the values, and their number
    C: np.ndarray  # (k,): the means
    error: float  # the sum of |w - c|


@register("gobo")
class GOBO(DeepCompression):
    """Outliers stay as they are; the other weights are clustered once, and then the means of the clusters train.

        log N(w; m, s) < threshold,  m and s the mean and the standard deviation of the tensor: an outlier

    The others start in bins of equally many weights.  By turns, each goes to its nearest mean, and the means are
    computed anew, for as long as that lowers the sum of |w - c|; of more than a million weights, a sample decides.
    They then train as Deep Compression does, and outliers train freely.  Which ones these are is decided at the start.

    One more buffer: `is_outlier`, bool, shaped like the weight.  The file has the positions and the values of outliers.
    """

    Options: ClassVar[type[MethodOptions]] = GOBOOptions
    only_scalars: ClassVar[bool] = True
    paper: ClassVar[str] = "Zadeh 2020"
    options: GOBOOptions  # type: ignore[assignment]  # it has its own way to start, and no `init`
    is_outlier: Tensor

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options: Any):
        super().__init__(weight, bits, dim, **options)
        # a density has a unit: a weight of an extreme scale is one of typical scale, times a power of two
        unit = 2.0 ** (TYPICAL_EXPONENT - self.shift) if self.shift else 1.0
        self.is_outlier.copy_(outliers_of(weight.detach().double() * unit, self.options.threshold))
        if bool(self.is_outlier.all()):
            raise ValueError(
                f"every weight would be an outlier: their density is below e^{self.options.threshold:g} everywhere; "
                "give a lower threshold"
            )
        V = self.scaled(weight.detach()).reshape(-1).to(self.C.dtype)
        others = V[~self.is_outlier.view(-1)]
        values = sorted_values(others, torch.Generator().manual_seed(self.options.seed))
        found = best_bins(values, 2**bits)
        first = np.append(values, np.inf)[found.bounds[1:-1]]  # of each cluster but the lowest; none has infinity
        self.cluster_of.copy_(torch.searchsorted(torch.from_numpy(first).to(V), V, right=True))
        self.C.copy_(torch.from_numpy(found.C)[:, None])
        self.C.copy_(self.centroids(self.scaled(weight.detach()))[1])
        self.start.copy_(self.C)
        self.unit.copy_(squared_error(others[:, None], self.C))

    def initial_centroids(self, W: Tensor) -> Tensor:
        """`(n, 1) -> (k, 1)`: where the centroids start; which weights are outliers is decided after that."""
        self.register_buffer("is_outlier", torch.zeros(self.shape, dtype=torch.bool, device=W.device))
        return W.new_zeros(2**self.bits, 1, dtype=compute_dtype(W.dtype))

    def cluster(self, weight: Tensor, start: Tensor, step: Tensor) -> Clustering:
        """W~ = c[cluster], and an outlier as it is.  Changes nothing."""
        found = super().cluster(weight, start, step)
        return found._replace(W_tilde=torch.where(self.is_outlier, weight, found.W_tilde))

    def centroids(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """`(k, 1)` twice: the sum and the mean of each cluster, without outliers."""
        codes, nothing = self.cluster_of.long(), torch.zeros_like(self.C)
        inside = ~self.is_outlier.view(-1, 1)
        values = torch.where(inside, weight.reshape(-1, 1), 0.0).to(self.C.dtype)
        sums = nothing.index_add(0, codes, values)
        count = nothing.index_add(0, codes, inside.to(self.C.dtype))
        return sums, torch.where(count > 0, sums / count.clamp(min=1), self.C)

    @torch.no_grad()
    def outliers(self, weight: Tensor) -> Outliers | None:
        """The weights that are no centroid but stay as they are."""
        positions = self.is_outlier.view(-1).nonzero()[:, 0]
        if not len(positions):
            return None
        return Outliers(positions, whole(weight).detach().reshape(-1)[positions])

    @torch.no_grad()
    def snapped(self, weight: Tensor) -> Tensor:
        """The weight with every value but outliers replaced by its centroid."""
        return torch.where(self.is_outlier, whole(weight), super().snapped(weight))


def outliers_of(weight: Tensor, threshold: float) -> Tensor:
    """Which weights are less dense than e^threshold in the Gaussian that fits all of them, in float64."""
    w = weight.double()
    spread = w.std(correction=0).clamp(min=1e-300)
    return -0.5 * ((w - w.mean()) / spread).square() - spread.log() - 0.5 * math.log(2 * math.pi) < threshold


# --- the algorithm, on values in ascending order


def best_bins(values: np.ndarray, k: int) -> Bins:
    """The clusters of least absolute error, from bins of equally many values until a round does not lower it."""
    found = equal_bins(values, k)
    for _ in range(ROUNDS):
        after = improved(values, found)
        if not after.error < found.error:
            break
        found = after
    return found


def equal_bins(values: np.ndarray, k: int) -> Bins:
    """Bins of equally many values, up to one."""
    return _with_means(values, np.arange(k + 1) * len(values) // k, values[np.arange(k) * len(values) // k])


def improved(values: np.ndarray, found: Bins) -> Bins:
    """A round: each value goes to the nearest mean, and the means are computed anew."""
    edges = (found.C[1:] + found.C[:-1]) / 2
    inner = np.searchsorted(values, edges)
    return _with_means(values, np.concatenate([[0], inner, [len(values)]]), found.C)


def _with_means(values: np.ndarray, bounds: np.ndarray, C: np.ndarray) -> Bins:
    """The bins with these bounds; an empty one keeps its value of C."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    count, total = np.diff(bounds), np.diff(sums[bounds])
    C = np.where(count > 0, total / np.maximum(count, 1), C)
    middle = np.clip(np.searchsorted(values, C), bounds[:-1], bounds[1:])  # those below the mean come before it
    below = C * (middle - bounds[:-1]) - (sums[middle] - sums[bounds[:-1]])
    above = sums[bounds[1:]] - sums[middle] - C * (bounds[1:] - middle)
    return Bins(bounds, C, float((below + above).sum()))
