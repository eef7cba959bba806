"""One option of each item, of least cost within a budget: exact, and never above the budget."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dkm.plans import knapsack as module
from dkm.plans.knapsack import knapsack

options = st.lists(st.tuples(st.integers(0, 30), st.integers(-5, 30)), min_size=1, max_size=4)


problems = st.lists(options, min_size=1, max_size=6)


def split(problem: list[list[tuple[int, int]]]) -> tuple[list[list[int]], list[list[float]]]:
    return [[s for s, _ in o] for o in problem], [[float(c) for _, c in o] for o in problem]


def brute_force(sizes, costs, budget: int) -> tuple[float, int]:
    """The least cost and, of the choices with that cost, the least size."""
    choices = itertools.product(*(range(len(s)) for s in sizes))
    return min(found for found in (totals(sizes, costs, at) for at in choices) if found[1] <= budget)


def totals(sizes, costs, at: Sequence[int]) -> tuple[float, int]:
    cost, size = (sum(values[i] for values, i in zip(of, at, strict=True)) for of in (costs, sizes))
    return cost, size


@given(problems, st.integers(0, 100))
@settings(max_examples=300)
def test_the_knapsack_is_exact(problem, slack: int):
    sizes, costs = split(problem)
    budget = sum(map(min, sizes)) + slack
    assert totals(sizes, costs, knapsack(sizes, costs, budget)) == brute_force(sizes, costs, budget)


@given(problems, st.lists(st.integers(0, 100), min_size=2, max_size=5))
def test_a_larger_budget_never_costs_more(problem, slacks: list[int]):
    sizes, costs = split(problem)
    least = sum(map(min, sizes))
    found = [totals(sizes, costs, knapsack(sizes, costs, least + slack))[0] for slack in sorted(slacks)]
    assert found == sorted(found, reverse=True)


@given(problems, st.integers(0, 60))
def test_few_states_still_keep_to_the_budget(problem, slack: int):
    sizes, costs = split(problem)
    budget = sum(map(min, sizes)) + slack
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STATES", 2)
        assert totals(sizes, costs, knapsack(sizes, costs, budget))[1] <= budget


def test_a_budget_below_the_smallest_choice():
    with pytest.raises(ValueError, match="takes 5, and the budget is 4"):
        knapsack([[2, 9], [3]], [[0.0, 0.0], [0.0]], 4)


def test_many_tensors_are_solved_near_the_bound():
    """150 tensors with convex costs, as networks have: no worse than the relaxation by more than one item."""
    random = np.random.default_rng(0)
    sizes = [[int(n * bits) for bits in (0.5, 1, 1.5, 2, 3, 4, 8)] for n in random.integers(1_000, 2_000_000, 150)]
    costs = [[float(h * 4.0**-bits) for bits in (0.5, 1, 1.5, 2, 3, 4, 8)] for h in random.lognormal(0, 2, 150)]
    budget = sum(s[2] for s in sizes) + 12_345
    found = knapsack(sizes, costs, budget)
    cost, size = totals(sizes, costs, found)
    assert size <= budget
    prices = np.geomspace(1e-12, 1e-2, 2_000)
    bound = max(
        sum(min(c + p * s for s, c in zip(*o, strict=True)) for o in zip(sizes, costs, strict=True)) - p * budget
        for p in prices
    )
    assert bound <= cost <= bound + 1e-2 * abs(bound)
