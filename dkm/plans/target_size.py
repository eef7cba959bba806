"""Bits and dim for every tensor within a budget of bytes, by what clustering each of them costs the loss.

1  For each tensor: its k-means at every candidate.  Of two candidates, one that is neither smaller nor closer to
   the weights is dropped.
2  The cost of a candidate is the loss with this tensor alone replaced by its nearest centroids, less the loss
   without.  A few are measured; between them the cost is taken as linear in the squared error, which is what
   the second-order expansion of the loss says.
3  The choice of least total cost within the budget: a multiple-choice knapsack, solved exactly.  What it chose,
   and its neighbours, are measured where they were not, and it is solved again until nothing is new.
4  Errors of several tensors do not just add up.  So the loss of the whole choice is measured, and with each tensor
   one candidate finer and coarser in it; solved again with these costs, while that makes it better.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..clustering.assign import assign
from ..clustering.initialize import init_centroids
from ..clustering.precision import check_bits_dim, check_weight, rounded, stored_dtype
from ..clustering.vectors import from_vectors, to_vectors
from ..foundation.errors import PlanError
from ..modelling.parameters import parameters
from .knapsack import knapsack
from .language import parse_size
from .rows import Plan, Row
from .selection import KINDS, apply, survey

# Rates from 16 bits a weight down to 1/2, close to one another between 1 and 3 where most budgets lead.  At one rate
# several: the larger dim is the closer to the weights, and has the larger table; which is better depends on how
# many weights share it.
CANDIDATES = (
    *((bits, 1) for bits in (1, 2, 3, 4, 5, 6, 8)),
    *((bits, 2) for bits in (2, 3, 4, 5, 6, 8)),
    *((bits, 4) for bits in (2, 3, 4, 5, 6, 8)),
    *((bits, 8) for bits in (4, 5, 6, 8)),
)
WORST = 1e9  # the cost of a loss that is not finite

Loss = Callable[[nn.Module], Any]


@dataclass
class Candidate:
    """A tensor at some fineness: `row` says which and what it takes."""

    row: Row
    C: Tensor | None  # its k-means; None: kept
    error: float  # the sum of squares of what snapping changes
    cost: float | None = None  # measured

    def values(self, weight: Tensor) -> Tensor:
        """What the file would hold of the weight."""
        if self.C is None:
            return rounded(weight, torch.float16)
        V = to_vectors(weight, self.row.dim)
        return from_vectors(self.C[assign(V, self.C)], weight.shape)


def allocate(
    model: nn.Module,
    size: int | str,
    loss: Loss,
    *,
    text: str | None = None,
    candidates: Sequence[tuple[int, int]] = CANDIDATES,
    rounds: int = 2,
    seed: int = 0,
) -> Plan:
    """The plan of at most `size` that costs the loss least, by measuring it.  See `dkm.plan`.

    Args:
        size: of the parameters as the paper counts, `Plan.bytes`: "1.0MB", "40kB" (2^20 and 2^10 bytes) or bytes.
        loss: `model -> number`, on a few batches, always the same ones; lower is better.  Called without gradient,
            in evaluation mode, some 5 to 10 times for every tensor.  `dkm.divergence(model, batches)` makes one.
        text: entries as in a plan; tensors that they select are as they say, and the others are chosen.
        candidates: pairs of bits and dim to choose from; keeping a tensor is always one more.
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
    for bits, dim in candidates:
        check_bits_dim(bits, dim)
    walk = parameters(model)
    rows, selected = (survey(walk), set[int]()) if text is None else apply(walk, text)
    tensors = {owned.name: owned.tensor for owned in walk}
    # What the text clusters has one candidate: it costs what it costs, and the others are measured next to it.
    options = {i: [row] for i, row in enumerate(rows) if i in selected and row.bits is not None}
    free = [i for i, row in enumerate(rows) if i not in selected and row.kind in KINDS]
    if not free:
        raise PlanError(f"plan '{text}' says what becomes of every tensor: there is nothing left to choose for a size")
    options |= {i: _fitting(rows[i], candidates) for i in free}
    weights = [tensors[rows[i].name] for i in options]
    for i, weight in zip(options, weights, strict=True):
        check_weight(weight, rows[i].name)
    rest = budget - sum(row.stored_bits for i, row in enumerate(rows) if i not in options)
    _check_budget(size, budget, rest, list(options.values()))

    modes = {part: part.training for part in model.modules()}
    bench = _Bench(model.eval(), loss, weights)
    try:
        base = bench.loss(bench.none)
        if not math.isfinite(base):
            raise ValueError(f"the loss of the uncompressed model is {base}: check the model and the batches")
        choices = [_candidates(at, weight.detach(), seed) for at, weight in zip(options.values(), weights, strict=True)]
        picked = _choose(bench, base, choices, rest, rounds)
    finally:
        bench.restore()
        for part, mode in modes.items():
            part.training = mode
    for i, choice, at in zip(options, choices, picked, strict=True):
        if i in free:
            rows[i] = replace(choice[at].row, reason=_reason(choice, at))
    return Plan(tuple(rows))


def _fitting(row: Row, candidates: Sequence[tuple[int, int]]) -> list[Row]:
    """The row at every candidate that makes sense for it, from the smallest: at least 4 vectors for each centroid, and
    smaller than kept; and kept."""
    at = [replace(row, bits=b, dim=d) for b, d in set(candidates) if row.parameters >= 4 * d * 2**b]
    at = [other for other in at if other.stored_bits < row.stored_bits]
    return [*sorted(at, key=lambda other: (other.stored_bits, other.bits)), row]


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
    """From the smallest to the largest, each closer to the weight than the ones before it."""
    found: list[Candidate] = []
    for other in rows:
        candidate = Candidate(other, None, 0.0, 0.0)
        if other.bits is not None:
            C = init_centroids(to_vectors(weight, other.dim), 2**other.bits, seed=seed)
            candidate = Candidate(other, C.to(stored_dtype(weight.dtype)), 0.0)
            candidate.error = float((candidate.values(weight).double() - weight).square().sum())
        if not found or candidate.error < found[-1].error:
            found.append(candidate)
    return found


class _Bench:
    """The model with some of its tensors replaced.  Remembers which: a measurement writes only what differs."""

    def __init__(self, model: nn.Module, loss: Loss, tensors: list[nn.Parameter]):
        self.model, self.measure, self.tensors = model, loss, tensors
        self.original = [tensor.detach().clone() for tensor in tensors]
        self.present: list[Candidate | None] = [None] * len(tensors)
        self.none = self.present

    @torch.no_grad()
    def loss(self, wanted: list[Candidate | None]) -> float:
        for tensor, weight, old, new in zip(self.tensors, self.original, self.present, wanted, strict=True):
            if old is not new:
                tensor.copy_(weight if new is None else new.values(weight))
        self.present = list(wanted)
        value = self.measure(self.model)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise TypeError(f"loss(model) must return a number, lower is better, got {value!r}") from None

    def cost(self, at: int, candidate: Candidate | None, others: list[Candidate | None], base: float) -> float:
        """How much more than `base` the loss is with this candidate in the place of the one among the others."""
        cost = self.loss([*others[:at], candidate, *others[at + 1 :]]) - base
        return cost if math.isfinite(cost) else WORST

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, weight in zip(self.tensors, self.original, strict=True):
            tensor.copy_(weight)


def _choose(bench: _Bench, base: float, choices: list[list[Candidate]], budget: int, rounds: int) -> list[int]:
    """Which candidate of each tensor."""
    sizes = [[candidate.row.stored_bits for candidate in options] for options in choices]
    wanted = [{0, len(options) // 3, 2 * len(options) // 3} for options in choices]
    while any(wanted):
        for i, (options, at) in enumerate(zip(choices, wanted, strict=True)):
            for j in sorted(at):
                options[j].cost = bench.cost(i, options[j], bench.none, base)
        picked = knapsack(sizes, [_costs(options) for options in choices], budget)
        wanted = [
            {j for j in (at - 1, at, at + 1) if 0 <= j < len(options) and options[j].cost is None}
            for options, at in zip(choices, picked, strict=True)
        ]
    for _ in range(rounds):
        whole = [options[at] for options, at in zip(choices, picked, strict=True)]
        base = bench.loss(whole)
        near = [[j for j in (at - 1, at, at + 1) if 0 <= j < len(o)] for o, at in zip(choices, picked, strict=True)]
        costs = [
            [0.0 if j == picked[i] else bench.cost(i, choices[i][j], whole, base) for j in at]
            for i, at in enumerate(near)
        ]
        moves = knapsack([[sizes[i][j] for j in at] for i, at in enumerate(near)], costs, budget)
        moved = [near[i][move] for i, move in enumerate(moves)]
        # not even: where nothing is measured, nothing moves
        if not bench.loss([options[at] for options, at in zip(choices, moved, strict=True)]) < base:
            break
        picked = moved
    return picked


def _costs(options: list[Candidate]) -> list[float]:
    """Of every candidate: as measured or, in between, linear in the error; no error, no cost."""
    known = sorted((option.error, option.cost) for option in options if option.cost is not None)
    errors, costs = zip((0.0, 0.0), *known, strict=True)
    return [float(np.interp(o.error, errors, costs)) if o.cost is None else o.cost for o in options]


def _reason(options: list[Candidate], at: int) -> str:
    costs = _costs(options)
    if len(options) == 1:
        return "exact"
    other = at - 1 if at else 1
    kilobytes = (options[other].row.stored_bits - options[at].row.stored_bits) / 8 / 1024
    change = f"add {kilobytes:.2g} kB" if other > at else f"save {-kilobytes:.2g} kB"
    return f"cost {costs[at]:.2g}; {options[other].row.label} would cost {costs[other]:.2g} and {change}"
