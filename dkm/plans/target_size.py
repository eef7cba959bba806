"""Choose how every tensor is clustered within a budget of bytes, by what clustering each of them costs the loss.

1  Every tensor is clustered by k-means at every candidate, a spec: bits, dim, scales, groups.  A candidate is dropped
   if another one is both smaller and closer to the weights.
2  The cost of a candidate is the loss with this tensor alone replaced by its nearest centroids, minus the loss of
   the uncompressed model.
3  The choice of least total cost within the budget is a multiple-choice knapsack, solved exactly.
4  The errors of several tensors do not simply add up.  So the whole choice is measured, and chosen anew from there, as
   long as the loss falls.

Where the loss can be differentiated twice (`SecondOrder`), the costs of all candidates follow from a few gradients:
half the second derivative by each weight times the square of what snapping changes.  The second choices start from
the derivatives of the model that is clustered as chosen before.  Otherwise costs are measured, one at a time: a few of
each tensor, between which the cost is taken as linear in the squared error, and then those of the chosen candidates
and their neighbours until there is nothing left to measure; and for the second choices again with the others as chosen.

Two other allocators choose among the same candidates, within the same budget.  For "hawq" the cost is the squared error
times the mean second derivative by the tensor's weights, and step 3 is the last one; "haq" is a search (`haq.search`).
"""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import nn

from ..clustering.precision import check_weight
from ..foundation.errors import PlanError
from ..foundation.text import size_text
from ..modelling.parameters import parameters
from . import haq
from .bench import GRADIENT, KMEANS, LOSS, Bench, Combination, Loss, Measured, Progress, SecondOrder
from .candidates import CANDIDATES, AsCandidate, Candidate, Original, as_spec, closest, fitting
from .counting import Budget, Count, PaperCount
from .language import parse_target
from .rows import Plan, Row
from .selection import KINDS, apply, survey

TYPICAL_MEASUREMENTS = 8  # of a tensor, where there are no derivatives: an estimate, for the time left

# The ways to choose, and the option that each has, with its default.
ALLOCATORS = {"dkm": ("rounds", 2), "hawq": ("vectors", 32), "haq": ("episodes", 600)}


def allocate(
    model: nn.Module,
    size: int | str,
    loss: Loss | None,
    *,
    count: Count | None = None,
    text: str | None = None,
    candidates: Sequence[AsCandidate] = CANDIDATES,
    allocator: str = "dkm",
    rounds: int | None = None,
    vectors: int | None = None,
    episodes: int | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    measured: Measured | None = None,
) -> Plan:
    """The plan of at most `size` that costs the loss least.  See `dkm.plan`.

    Args:
        size: "1.0MB", "40kB" or a number of bytes, as `count` counts them; "1.0MB paper" is as the paper counts.
        loss: `model -> number`, on a few batches, always the same ones; lower is better.  It is called in evaluation
            mode.  `dkm.divergence(model, batches)` makes one that is `SecondOrder`, which is called a few times; any
            other one is called without gradient, some 5 to 10 times per tensor.
        count: how to count a size that is not the paper's.
        text: entries as in a plan; they decide about the tensors that they select, and the others are chosen.
        candidates: to choose from: pairs of bits and dim, texts as in a plan such as "2 scaled", or specs.  Keeping a
            tensor is always one more.
        allocator: of ALLOCATORS; `rounds`, `vectors` and `episodes` are the options of one each.
        seed: of the k-means, as in `compress_`, and of what hawq and haq draw at random.
        progress: is called after each piece of work.
        measured: what was measured before, of the same model with the same loss, and is not measured again; what is
            measured is added to it.

    The weights are replaced while it measures; they are as before afterwards, whatever happens.
    """
    target = parse_target(size)
    way = _way(allocator, rounds=rounds, vectors=vectors, episodes=episodes)
    measure = _checked_loss(loss)
    specs = [as_spec(candidate) for candidate in candidates]
    walk = parameters(model)
    rows, selected = (survey(walk), set[int]()) if text is None else apply(walk, text)
    tensors = {owned.name: owned.tensor for owned in walk}
    # A tensor that the text clusters has one candidate: it is clustered while the others are measured.
    fixed = [i for i, row in enumerate(rows) if i in selected and row.spec is not None]
    open_rows = [i for i, row in enumerate(rows) if i not in selected and row.kind in KINDS]
    if not open_rows:
        raise PlanError(f"plan '{text}' says what becomes of every tensor: there is nothing left to choose for a size")
    places = [*fixed, *open_rows]
    weights = [_checked(rows[i].name, tensors) for i in places]
    used = PaperCount() if target.as_paper or count is None else count
    budget = Budget(8 * target.bytes, used, rows, places)
    options = [[rows[i]] for i in fixed] + [fitting(rows[i], specs, budget.size) for i in open_rows]
    _check_budget(size, budget, options)
    work = Progress(progress or (lambda _: None))
    tested = [Original.of(weight, seed) for weight in weights]
    with Bench(model, measure, weights, tested, {} if measured is None else measured, work) as bench:
        choices, reason = _choose(bench, budget, options, way, seed)
    for i, (own, at) in list(zip(places, choices, strict=True))[len(fixed) :]:
        rows[i] = replace(own[at].row, reason=reason or _reason(own, at))
    return Plan(tuple(rows), None if target.as_paper or count is None else -(-budget.count.of_plan(rows) // 8))


def _checked_loss(loss: Loss | None) -> Loss:
    if not callable(loss):
        raise TypeError(
            "a size needs loss=, a function model -> number to measure with; dkm.divergence(model, batches) makes one "
            f"without labels; got {loss!r}"
        )
    return loss


def _checked(name: str, tensors: Mapping[str, nn.Parameter]) -> nn.Parameter:
    """The tensor of a name, which can be clustered."""
    check_weight(tensors[name], name)
    return tensors[name]


class Way(NamedTuple):
    """How to choose."""

    allocator: str  # of ALLOCATORS
    effort: int  # its option


def _way(allocator: str, **given: int | None) -> Way:
    """An allocator by its name, with the option that is its own."""
    if allocator not in ALLOCATORS:
        close = difflib.get_close_matches(str(allocator), ALLOCATORS, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise PlanError(f"allocator must be one of {', '.join(ALLOCATORS)}, got {allocator!r}{hint}")
    own, default = ALLOCATORS[allocator]
    for other, (name, _) in ALLOCATORS.items():
        if name != own and given[name] is not None:
            raise PlanError(f'{name} is of allocator="{other}", and this is "{allocator}": leave it out')
    effort, least = given[own], 0 if own == "rounds" else 1
    if effort is None:
        effort = default
    if not isinstance(effort, int) or isinstance(effort, bool) or effort < least:
        raise PlanError(f"{own} must be an integer of at least {least}, got {effort!r}")
    return Way(allocator, effort)


Choices = list[tuple[list[Candidate], int]]  # the candidates of each tensor, and the index of the chosen one


def _check_budget(size: int | str, budget: Budget, options: list[list[Row]]) -> None:
    least = budget.total([own[at] for own, at in zip(options, budget.smallest(options), strict=True)])
    if budget.bits < least:
        raise PlanError(
            f"size {size!r} is too small: the smallest plan of these candidates takes {-(-least // 8):,} bytes"
            f" {budget.count.name}"
        )
    most = budget.total([own[-1] for own in options])
    if budget.bits >= most:
        raise PlanError(
            f"size {size!r} is more than is needed: with nothing clustered that is left to choose it takes "
            f"{-(-most // 8):,} bytes {budget.count.name}, in 16 bit; give less"
        )


def _choose(bench: Bench, budget: Budget, options: list[list[Row]], way: Way, seed: int) -> tuple[Choices, str]:
    """What is chosen, and the reason where it is the same for all tensors."""
    allocator, effort = way
    _expect(bench, len(options), way)
    base = bench.loss(bench.uncompressed)
    if not math.isfinite(base):
        raise ValueError(f"the loss of the uncompressed model is {base}: check the model and the batches")
    choices = []
    for rows, tested in zip(options, bench.tested, strict=True):
        choices.append(closest(rows, tested))
        bench.progress.add(KMEANS)
    reason = ""
    if allocator == "haq":
        picked, loss, tried = haq.search(bench, choices, budget, effort, seed)
        reason = f"haq: best of {tried:,} tried, cost {loss - base:.2g}"
    elif allocator == "hawq":
        picked = _by_traces(bench, choices, budget, effort, seed)
    elif isinstance(bench.measure, SecondOrder):
        picked = _by_derivatives(bench, choices, budget, effort)
    else:
        picked = _improved(bench, choices, _by_measuring(bench, choices, budget, base), budget, effort)
    return list(zip(choices, picked, strict=True)), reason


def _expect(bench: Bench, tensors: int, way: Way) -> None:
    """How much work choosing will be."""
    work = {KMEANS: tensors}
    if way.allocator == "haq":
        work |= {LOSS: 1 + way.effort}
    elif way.allocator == "hawq":
        work |= {LOSS: 1, GRADIENT: way.effort}
    elif isinstance(bench.measure, SecondOrder):
        rounds = way.effort
        work |= {LOSS: 1 + (1 + rounds if rounds else 0), GRADIENT: bench.measure.passes * (1 + rounds)}
    else:
        work |= {LOSS: TYPICAL_MEASUREMENTS * tensors}
    for kind, count in work.items():
        bench.progress.expect(kind, count)


def _cheapest(budget: Budget, choices: Sequence[Sequence[Candidate]], costs: list[list[float]]) -> list[int]:
    return budget.cheapest([[candidate.row for candidate in options] for options in choices], costs)


def _combination(choices: Sequence[Sequence[Candidate]], picked: Sequence[int]) -> Combination:
    return [options[at] for options, at in zip(choices, picked, strict=True)]


# --- by traces -----------------------------------------------------------------------------------


def _by_traces(bench: Bench, choices: list[list[Candidate]], budget: Budget, vectors: int, seed: int) -> list[int]:
    """The index of each tensor's candidate as HAWQ-v2 has it: the sum of the squared errors, each times the mean second
    derivative by the tensor's weights, is least.  Where that mean is negative it counts as 0."""
    for options, own, trace in zip(choices, bench.tested, bench.traces(vectors, seed), strict=True):
        for candidate in options:
            candidate.cost = max(0.0, trace) / own.weight.numel() * candidate.error
    return _cheapest(budget, choices, [_costs(options) for options in choices])


# --- by derivatives ------------------------------------------------------------------------------


def _by_derivatives(bench: Bench, choices: list[list[Candidate]], budget: Budget, rounds: int) -> list[int]:
    """The index of each tensor's candidate, by what the second order of the loss says."""
    costs = bench.expected_costs(choices, bench.uncompressed)
    best = picked = _cheapest(budget, choices, costs)
    least = bench.loss(_combination(choices, picked)) if rounds else math.inf
    kept = costs
    for _ in range(rounds):
        costs = bench.expected_costs(choices, _combination(choices, picked))
        picked = _cheapest(budget, choices, costs)
        if picked == best:
            break
        loss = bench.loss(_combination(choices, picked))
        if loss < least:
            best, least, kept = picked, loss, costs
    for options, own in zip(choices, kept, strict=True):
        for candidate, cost in zip(options, own, strict=True):
            candidate.cost = cost
    return best


# --- by measuring --------------------------------------------------------------------------------


def _by_measuring(bench: Bench, choices: list[list[Candidate]], budget: Budget, base: float) -> list[int]:
    """The index of each tensor's candidate, by what each candidate costs alone."""
    wanted = [{0, len(options) // 3, 2 * len(options) // 3} for options in choices]
    picked: list[int] = []
    while any(wanted):
        for i, (options, indices) in enumerate(zip(choices, wanted, strict=True)):
            for j in sorted(indices):
                options[j].cost = bench.cost(i, options[j], bench.uncompressed, base)
        picked = _cheapest(budget, choices, [_costs(options) for options in choices])
        wanted = [
            {j for j in _near(at, options) if options[j].cost is None}
            for options, at in zip(choices, picked, strict=True)
        ]
    return picked


def _improved(
    bench: Bench, choices: list[list[Candidate]], picked: list[int], budget: Budget, rounds: int
) -> list[int]:
    """A choice made better by measuring it as a whole, and each tensor one candidate finer and one coarser."""
    for _ in range(rounds):
        whole = _combination(choices, picked)
        base = bench.loss(whole)
        near = [_near(at, options) for options, at in zip(choices, picked, strict=True)]
        costs = [
            [0.0 if j == picked[i] else bench.cost(i, choices[i][j], whole, base) for j in indices]
            for i, indices in enumerate(near)
        ]
        close = [[options[j] for j in indices] for options, indices in zip(choices, near, strict=True)]
        moved = [indices[move] for indices, move in zip(near, _cheapest(budget, close, costs), strict=True)]
        # The loss must fall.  Where it stays equal the batches cannot tell the two choices apart: keep the old one.
        if not bench.loss(_combination(choices, moved)) < base:
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
