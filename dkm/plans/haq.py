"""HAQ (Wang 2019): an agent tries plans, and learns from the loss of each as a whole.

An episode is a plan.  The agent (`ddpg`) goes through the tensors and gives each a number between 0 and 1, which stands
for one of its candidates, from the smallest to the largest.  What is larger than the budget is cut back: from the last
tensor to the first, each gets the next smaller candidate, again and again until the plan fits.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..foundation.errors import PlanError
from .bench import LOSS, Bench
from .candidates import Candidate
from .counting import Budget
from .ddpg import Agent
from .rows import Row
from .selection import KINDS

ROOM = 1 << 28  # snapped weights that are remembered: 1 GB in float32


class Found(NamedTuple):
    """The best plan that was tried."""

    picked: list[int]  # the index of each tensor's candidate
    loss: float
    tried: int  # plans


def search(bench: Bench, choices: Sequence[Sequence[Candidate]], budget: Budget, episodes: int, seed: int) -> Found:
    """Try so many plans, all within the budget, and return the one of least loss.  Of each tensor the candidates are
    ordered by size; the smallest ones together must fit."""
    bench.room = ROOM
    fits = _fitting(choices, budget)
    chosen = [i for i, options in enumerate(choices) if len(options) > 1]
    agent = Agent(geometry([choices[i][0].row for i in chosen]), episodes, seed) if chosen else None
    if agent is None:  # there is one plan only
        bench.progress.expect(LOSS, 1 - episodes)
        episodes = 1
    best = Found([0] * len(choices), math.inf, episodes)
    lowest = math.inf  # of the rewards
    for _ in range(episodes):
        actions = agent.propose() if agent else []
        picked = [0] * len(choices)
        for i, action in zip(chosen, actions, strict=True):
            picked[i] = min(int(action * len(choices[i])), len(choices[i]) - 1)
        picked = cut_back(picked, fits)
        loss = bench.loss([options[at] for options, at in zip(choices, picked, strict=True)])
        if loss < best.loss:
            best = Found(picked, loss, episodes)
        # Not finite: as bad as the worst one so far, because what is far worse would hide all other differences.
        lowest = min(lowest, -loss) if math.isfinite(loss) else lowest
        if agent and math.isfinite(lowest):
            agent.learn(actions, -loss if math.isfinite(loss) else lowest)
    if not math.isfinite(best.loss):
        raise PlanError(f"none of the {episodes} plans that haq tried has a finite loss: give a larger size")
    return best


def cut_back(picked: Sequence[int], fits: Callable[[list[int]], bool]) -> list[int]:
    """The choice made smaller until it fits: the last tensor by one candidate, the one before it, and so on, and then
    from the last one again.  Where all have their smallest candidate it is taken to fit."""
    picked = list(picked)
    while any(picked):
        for i in reversed(range(len(picked))):
            if fits(picked):
                return picked
            picked[i] = max(0, picked[i] - 1)
    return picked


def geometry(rows: Sequence[Row]) -> Tensor:
    """(tensors, features), from 0 to 1: what the agent knows of each tensor, all of it from its place and shape."""
    shapes = [(*row.shape, 1)[:2] for row in rows]
    sizes = [[math.log2(row.parameters) for row in rows]]
    sizes += [[math.log2(shape[axis]) for shape in shapes] for axis in (0, 1)]
    sizes += [[math.log2(math.prod(row.shape[2:])) for row in rows], [float(i) for i in range(len(rows))]]
    kinds = [[float(row.kind == kind) for row in rows] for kind in KINDS]
    return torch.tensor([*map(_spread, sizes), *kinds]).T


def _spread(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def _fitting(choices: Sequence[Sequence[Candidate]], budget: Budget) -> Callable[[list[int]], bool]:
    """Whether a choice is within the budget.

    To count it exactly takes long, so it is done only where the sum of its parts, and what the smallest choice takes
    beyond that, is small enough.
    """
    sizes = [[budget.size(candidate.row) for candidate in options] for options in choices]
    beyond = budget.total([options[0].row for options in choices]) - sum(own[0] for own in sizes)

    def fits(picked: list[int]) -> bool:
        if sum(own[at] for own, at in zip(sizes, picked, strict=True)) + beyond > budget.bits:
            return False
        return budget.total([options[at].row for options, at in zip(choices, picked, strict=True)]) <= budget.bits

    return fits
