"""The multiple-choice knapsack: one option of each item, of least total cost within a budget.  Numbers only."""

from collections.abc import Sequence

import numpy as np

STATES = 1 << 16  # partial choices that are kept at a time


def knapsack(sizes: Sequence[Sequence[int]], costs: Sequence[Sequence[float]], budget: int) -> list[int]:
    """One of each: the indices of least total cost whose sizes add up to at most the budget; of equals the smaller.

    Exact, as long as no more than `STATES` partial choices compete.  Choices are made one after the other; of the
    partial ones those remain that no other one beats in both size and cost, and that may still be better than the
    best choice known: the Lagrangian relaxation bounds what the rest costs at least.
    """
    sizes, costs = [np.array(s, np.int64) for s in sizes], [np.array(c, np.float64) for c in costs]
    least = np.cumsum([0, *(s.min() for s in reversed(sizes))])[::-1]  # what the rest takes at least
    if least[0] > budget:
        raise ValueError(f"the smallest choice takes {least[0]}, and the budget is {budget}")

    def relaxed(price: float) -> list[int]:
        return [int(np.lexsort((s, c + price * s))[0]) for s, c in zip(sizes, costs, strict=True)]

    def total(of: list[np.ndarray], at: list[int]) -> float:
        return sum(values[i] for values, i in zip(of, at, strict=True))

    low, high = 0.0, 1e-12
    if total(sizes, best := relaxed(low)) <= budget:
        return best
    while total(sizes, relaxed(high)) > budget:
        low, high = high, 4 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if total(sizes, relaxed(middle)) <= budget else (middle, high)
    best = relaxed(high)
    upper = total(costs, best)
    allowed = upper + 1e-12 * sum(np.abs(c).max() for c in costs)

    taken, spent, trail = np.zeros(1, np.int64), np.zeros(1), []
    for t, (s, c) in enumerate(zip(sizes, costs, strict=True)):
        size, cost = (taken[:, None] + s).ravel(), (spent[:, None] + c).ravel()
        bound = np.full(len(size), -np.inf)
        for price in (low, high):
            rest = sum((c + price * s).min() for s, c in zip(sizes[t + 1 :], costs[t + 1 :], strict=True))
            bound = np.maximum(bound, cost + rest - price * (budget - size))
        kept = np.flatnonzero((size + least[t + 1] <= budget) & (bound <= allowed))
        kept = kept[np.lexsort((cost[kept], size[kept]))]
        kept = kept[cost[kept] < np.concatenate([[np.inf], np.minimum.accumulate(cost[kept])[:-1]])]
        if len(kept) > STATES:
            kept = kept[np.sort(np.argsort(bound[kept], kind="stable")[:STATES])]
        if not len(kept):
            return best
        taken, spent = size[kept], cost[kept]
        trail.append(np.divmod(kept, len(s)))
    at = int(np.argmin(spent))
    if spent[at] > upper:
        return best
    chosen = []
    for came_from, option in reversed(trail):
        chosen.append(int(option[at]))
        at = came_from[at]
    return chosen[::-1]
