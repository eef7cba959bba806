"""The ways to cluster a tensor that a plan for a size chooses from, and how close each of them comes to the weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..clustering.precision import rounded
from ..clustering.snapping import kmeans_groups, row_scales, snapped_values
from ..clustering.spec import Spec
from .language import parse_spec
from .rows import Row

# Rates from 8 bits per weight down to 1/2, close to one another between 1 and 3, where most budgets lead.  Several
# candidates have the same rate: the one with the larger dim is closer to the weights but has a larger table, and which
# of them is better depends on how many weights share that table.  Scales help where rows differ in size; k-means of
# their candidates makes planning a tenth to a fifth slower.
CANDIDATES: tuple["AsCandidate", ...] = (
    *((bits, 1) for bits in (1, 2, 3, 4, 5, 6, 8)),
    *((bits, 2) for bits in (2, 3, 4, 5, 6, 8)),
    *((bits, 4) for bits in (2, 3, 4, 5, 6, 8)),
    *((bits, 8) for bits in (4, 5, 6, 8)),
    *(Spec(bits, scaled=True) for bits in (1, 2, 3, 4)),
)
SAMPLE = 1 << 16  # weights of a tensor that say how close its candidates are

AsCandidate = tuple[int, int] | str | Spec


@dataclass(frozen=True, eq=False)
class Original:
    """A tensor that is to be clustered: what it holds, and the rows of it that stand for all of them."""

    weight: Tensor  # a copy
    seed: int  # of the k-means
    rows: Tensor | None = None  # (rows,) indices of the first axis, of a large tensor; None: all of it

    @classmethod
    def of(cls, weight: Tensor, seed: int) -> "Original":
        """The weight, with rows that are evenly spaced and have `SAMPLE` weights or a few more."""
        weight = weight.detach().clone()
        if weight.numel() <= SAMPLE or weight.ndim < 2:
            return cls(weight, seed)
        count = -(-SAMPLE * len(weight) // weight.numel())
        return cls(weight, seed, torch.linspace(0, len(weight) - 1, count).round().long().to(weight.device))

    def sampled(self, values: Tensor) -> Tensor:
        """Of something of the weight's shape, the rows that stand for all of them."""
        return values if self.rows is None else values.index_select(0, self.rows)

    @property
    def share(self) -> float:
        """How many times more weights there are than in the sample."""
        return 1.0 if self.rows is None else len(self.weight) / len(self.rows)


@dataclass(eq=False)
class Candidate:
    """A tensor clustered in one way; `row` says in which, and what it takes."""

    row: Row
    tested: Original
    error: float = 0.0  # the sum of squares of what snapping changes; of a large tensor estimated from its sample
    cost: float | None = None  # by how much the loss rises, where that was measured
    centroids: dict[bool, Tensor] = field(default_factory=dict, repr=False)  # of all of the weight, of the sample

    def values(self) -> Tensor:
        """What the file would hold of the weight."""
        return self._snapped(self.tested.weight, self.tested.rows is None)

    def squares(self) -> Tensor:
        """The squares of what snapping changes in the sample, whose k-means is its own: that of a large tensor takes
        long."""
        weight = self.tested.sampled(self.tested.weight)
        return (self._snapped(weight, True).double() - weight).square()

    def _snapped(self, weight: Tensor, is_sample: bool) -> Tensor:
        spec = self.row.spec
        if spec is None:
            return rounded(weight, torch.float16)
        if is_sample not in self.centroids:
            self.centroids[is_sample] = kmeans_groups(weight, spec, self.tested.seed)
        return snapped_values(weight, self.centroids[is_sample], spec, row_scales(weight) if spec.scaled else None)


def as_spec(candidate: AsCandidate) -> Spec:
    """A candidate as a spec, whichever way it was given."""
    if isinstance(candidate, Spec):
        return candidate
    if isinstance(candidate, str):
        return parse_spec(candidate, "candidates")
    if isinstance(candidate, tuple) and len(candidate) == 2:
        return Spec(*candidate)
    raise TypeError(f"a candidate is a pair of bits and dim, a text such as '2 scaled', or a Spec, got {candidate!r}")


def fitting(row: Row, specs: Sequence[Spec], size: Callable[[Row], int]) -> list[Row]:
    """The ways to cluster a row's tensor that make sense, from the smallest to the largest, and last the row kept.

    A candidate makes sense if a group has at least 4 vectors for each centroid and it takes less than the kept tensor.
    """
    ways = [replace(row, spec=spec) for spec in set(specs) if _is_enough(spec.grouping(row.shape).weights, spec)]
    ways = [way for way in ways if size(way) < size(row)]
    return [*sorted(ways, key=lambda way: (size(way), way.bits or 0, way.label)), row]


def _is_enough(weights: int, spec: Spec) -> bool:
    return weights >= 4 * spec.dim * 2**spec.bits


def closest(rows: Sequence[Row], tested: Original) -> list[Candidate]:
    """The candidates from the smallest to the largest, without those that are no closer to the weight than a smaller
    one."""
    found: list[Candidate] = []
    for row in rows:
        candidate = Candidate(row, tested)
        if row.spec is None:
            candidate.cost = 0.0
        else:
            candidate.error = tested.share * float(candidate.squares().sum())
        if not found or candidate.error < found[-1].error:
            found.append(candidate)
    return found
