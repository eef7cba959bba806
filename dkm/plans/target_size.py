"""Choose how every tensor is clustered within a budget of bytes, by what clustering each of them costs the loss.

1  Every tensor is clustered by k-means at every candidate, a spec: bits, dim, scales, groups.  A candidate is dropped
   if another one is both smaller and closer to the weights.
2  The cost of a candidate is the loss with this tensor alone replaced by its nearest centroids, minus the loss of
   the uncompressed model.  A few candidates are measured; between them the cost is taken as linear in the squared
   error, which is what the second-order expansion of the loss says.
3  The choice of least total cost within the budget is a multiple-choice knapsack, solved exactly.  The chosen
   candidates and their neighbours are measured where they were not yet, and the knapsack is solved again, until there
   is nothing left to measure.
4  The errors of several tensors do not simply add up.  So the loss of the whole choice is measured, and then with each
   tensor one candidate finer and one coarser; the knapsack is solved again with these costs, as long as the loss falls.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..clustering.precision import check_weight, rounded
from ..clustering.snapping import kmeans_groups, row_scales, snapped_values
from ..clustering.spec import Spec
from ..foundation.errors import PlanError
from ..foundation.text import size_text
from ..modelling.parameters import parameters
from .knapsack import knapsack
from .language import parse_size, parse_spec
from .rows import Plan, Row
from .selection import KINDS, apply, survey

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
WORST = 1e9  # the cost of a loss that is not finite

Loss = Callable[[nn.Module], Any]
AsCandidate = tuple[int, int] | str | Spec
Combination = Sequence["Candidate | None"]  # one per tensor; None: as it was


@dataclass
class Candidate:
    """A tensor clustered in one way; `row` says in which, and how many bits it takes."""

    row: Row
    C: Tensor | None  # (groups, k, d): the centroids, by k-means; None: the tensor is kept
    scales: Tensor | None  # of the rows, where they are scaled
    error: float  # the sum of squares of what snapping changes
    cost: float | None = None  # by how much the loss rises, where that was measured

    def values(self, weight: Tensor) -> Tensor:
        """What the file would hold of the weight."""
        if self.C is None or self.row.spec is None:
            return rounded(weight, torch.float16)
        return snapped_values(weight, self.C, self.row.spec, self.scales)


def allocate(
    model: nn.Module,
    size: int | str,
    loss: Loss | None,
    *,
    text: str | None = None,
    candidates: Sequence[AsCandidate] = CANDIDATES,
    rounds: int = 2,
    seed: int = 0,
) -> Plan:
    """The plan of at most `size` that costs the loss least, by measuring it.  See `dkm.plan`.

    Args:
        size: of the parameters as the paper counts, `Plan.bytes`: "1.0MB", "40kB" or a number of bytes.
        loss: `model -> number`, on a few batches, always the same ones; lower is better.  It is called without
            gradient, in evaluation mode, some 5 to 10 times per tensor.  `dkm.divergence(model, batches)` makes one.
        text: entries as in a plan; they decide about the tensors that they select, and the others are chosen.
        candidates: to choose from: pairs of bits and dim, texts as in a plan such as "2 scaled", or specs.  Keeping a
            tensor is always one more.
        rounds: how often the choice is improved by measuring it as a whole; 0: never.
        seed: of the k-means, as in `compress_`.

    The weights are replaced while it measures; they are as before afterwards, whatever happens.
    """
    budget = 8 * parse_size(size)
    if not callable(loss):
        raise TypeError(
            "a size needs loss=, a function model -> number to measure with; dkm.divergence(model, batches) makes one "
            f"without labels; got {loss!r}"
        )
    specs = [as_spec(candidate) for candidate in candidates]
    walk = parameters(model)
    rows, selected = (survey(walk), set[int]()) if text is None else apply(walk, text)
    tensors = {owned.name: owned.tensor for owned in walk}
    # A tensor that the text clusters has one candidate: it is clustered while the others are measured.
    options = {i: [row] for i, row in enumerate(rows) if i in selected and row.spec is not None}
    open_rows = [i for i, row in enumerate(rows) if i not in selected and row.kind in KINDS]
    if not open_rows:
        raise PlanError(f"plan '{text}' says what becomes of every tensor: there is nothing left to choose for a size")
    options |= {i: _fitting(rows[i], specs) for i in open_rows}
    for i in options:
        check_weight(tensors[rows[i].name], rows[i].name)
    rest = budget - sum(row.stored_bits for i, row in enumerate(rows) if i not in options)
    _check_budget(size, budget, rest, list(options.values()))
    weights = [tensors[rows[i].name] for i in options]
    with _Bench(model, loss, weights) as bench:
        choices = [_candidates(at, weight.detach(), seed) for at, weight in zip(options.values(), weights, strict=True)]
        picked = _improved(bench, choices, _choose(bench, choices, rest), rest, rounds)
    for i, choice, at in zip(options, choices, picked, strict=True):
        if i in open_rows:
            rows[i] = replace(choice[at].row, reason=_reason(choice, at))
    return Plan(tuple(rows))


def as_spec(candidate: AsCandidate) -> Spec:
    """A candidate as a spec, whichever way it was given."""
    if isinstance(candidate, Spec):
        return candidate
    if isinstance(candidate, str):
        return parse_spec(candidate, "candidates")
    if isinstance(candidate, tuple) and len(candidate) == 2:
        return Spec(*candidate)
    raise TypeError(f"a candidate is a pair of bits and dim, a text such as '2 scaled', or a Spec, got {candidate!r}")


def _fitting(row: Row, specs: Sequence[Spec]) -> list[Row]:
    """The ways to cluster a row's tensor that make sense, from the smallest to the largest, and last the row kept.

    A candidate makes sense if a group has at least 4 vectors for each centroid and it takes less than the kept tensor.
    """
    ways = [replace(row, spec=spec) for spec in set(specs) if _is_enough(spec.grouping(row.shape).weights, spec)]
    ways = [way for way in ways if way.stored_bits < row.stored_bits]
    return [*sorted(ways, key=lambda way: (way.stored_bits, way.bits or 0, way.label)), row]


def _is_enough(weights: int, spec: Spec) -> bool:
    return weights >= 4 * spec.dim * 2**spec.bits


def _check_budget(size: int | str, budget: int, rest: int, rows: list[list[Row]]) -> None:
    least, most = (sum(options[at].stored_bits for options in rows) + budget - rest for at in (0, -1))
    if budget < least:
        raise PlanError(
            f"size {size!r} is too small: the smallest plan of these candidates takes {-(-least // 8):,} bytes"
        )
    if budget >= most:
        raise PlanError(
            f"size {size!r} is more than is needed: with nothing clustered that is left to choose it takes "
            f"{-(-most // 8):,} bytes, in 16 bit; give less"
        )


def _candidates(rows: list[Row], weight: Tensor, seed: int) -> list[Candidate]:
    """The candidates from the smallest to the largest, without those that are no closer to the weight than a smaller
    one."""
    found: list[Candidate] = []
    for other in rows:
        candidate = Candidate(other, None, None, 0.0, 0.0)
        if other.spec is not None:
            scales = row_scales(weight) if other.spec.scaled else None
            candidate = Candidate(other, kmeans_groups(weight, other.spec, seed), scales, 0.0)
            candidate.error = float((candidate.values(weight).double() - weight).square().sum())
        if not found or candidate.error < found[-1].error:
            found.append(candidate)
    return found


class _Bench:
    """Measures the model with some of its tensors replaced, and puts everything back at the end.

    It remembers what the tensors hold, so that a measurement writes only what differs from the one before.
    """

    def __init__(self, model: nn.Module, loss: Loss, tensors: list[nn.Parameter]):
        self.model, self.measure, self.tensors = model, loss, tensors
        self.original = [tensor.detach().clone() for tensor in tensors]
        self.uncompressed: Combination = [None] * len(tensors)
        self.present = self.uncompressed
        self.modes = {part: part.training for part in model.modules()}

    def __enter__(self) -> "_Bench":
        self.model.eval()
        return self

    @torch.no_grad()
    def __exit__(self, *error: object) -> None:
        for tensor, weight in zip(self.tensors, self.original, strict=True):
            tensor.copy_(weight)
        for part, mode in self.modes.items():
            part.training = mode

    @torch.no_grad()
    def loss(self, wanted: Combination) -> float:
        """The loss with these candidates in the place of the tensors; None leaves a tensor as it was."""
        for tensor, weight, old, new in zip(self.tensors, self.original, self.present, wanted, strict=True):
            if old is not new:
                tensor.copy_(weight if new is None else new.values(weight))
        self.present = list(wanted)
        value = self.measure(self.model)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise TypeError(f"loss(model) must return a number, lower is better, got {value!r}") from None

    def cost(self, i: int, candidate: Candidate, others: Combination, base: float) -> float:
        """How much more than `base` the loss is with this candidate for tensor i, and the others as given."""
        cost = self.loss([*others[:i], candidate, *others[i + 1 :]]) - base
        return cost if math.isfinite(cost) else WORST


def _choose(bench: _Bench, choices: list[list[Candidate]], budget: int) -> list[int]:
    """The index of each tensor's candidate, by what each candidate costs alone: steps 2 and 3 above."""
    base = bench.loss(bench.uncompressed)
    if not math.isfinite(base):
        raise ValueError(f"the loss of the uncompressed model is {base}: check the model and the batches")
    sizes = [[candidate.row.stored_bits for candidate in options] for options in choices]
    wanted = [{0, len(options) // 3, 2 * len(options) // 3} for options in choices]
    picked: list[int] = []
    while any(wanted):
        for i, (options, indices) in enumerate(zip(choices, wanted, strict=True)):
            for j in sorted(indices):
                options[j].cost = bench.cost(i, options[j], bench.uncompressed, base)
        picked = knapsack(sizes, [_costs(options) for options in choices], budget)
        wanted = [
            {j for j in _near(at, options) if options[j].cost is None}
            for options, at in zip(choices, picked, strict=True)
        ]
    return picked


def _improved(bench: _Bench, choices: list[list[Candidate]], picked: list[int], budget: int, rounds: int) -> list[int]:
    """A choice made better by measuring it as a whole: step 4 above."""
    for _ in range(rounds):
        whole: Combination = [options[at] for options, at in zip(choices, picked, strict=True)]
        base = bench.loss(whole)
        near = [_near(at, options) for options, at in zip(choices, picked, strict=True)]
        costs = [
            [0.0 if j == picked[i] else bench.cost(i, choices[i][j], whole, base) for j in indices]
            for i, indices in enumerate(near)
        ]
        sizes = [[choices[i][j].row.stored_bits for j in indices] for i, indices in enumerate(near)]
        moved = [near[i][move] for i, move in enumerate(knapsack(sizes, costs, budget))]
        # The loss must fall.  Where it stays equal the batches cannot tell the two choices apart: keep the old one.
        if not bench.loss([options[at] for options, at in zip(choices, moved, strict=True)]) < base:
            break
        picked = moved
    return picked


def _near(at: int, options: list[Candidate]) -> list[int]:
    """The index of a candidate, and those of its neighbours."""
    return [j for j in (at - 1, at, at + 1) if 0 <= j < len(options)]


def _costs(options: list[Candidate]) -> list[float]:
    """The cost of every candidate: as measured, or interpolated linearly in the error; without error there is none."""
    known = sorted((option.error, option.cost) for option in options if option.cost is not None)
    errors, costs = zip((0.0, 0.0), *known, strict=True)
    return [float(np.interp(o.error, errors, costs)) if o.cost is None else o.cost for o in options]


def _reason(options: list[Candidate], at: int) -> str:
    """Why this candidate: what it costs, and what the next one would cost and save."""
    costs = _costs(options)
    if len(options) == 1:
        return "exact"
    other = at - 1 if at else 1
    bytes_more = (options[other].row.stored_bits - options[at].row.stored_bits) / 8
    change = f"add {size_text(bytes_more)}" if other > at else f"save {size_text(-bytes_more)}"
    return f"cost {costs[at]:.2g}; {options[other].row.label} would cost {costs[other]:.2g} and {change}"
