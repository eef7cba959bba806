"""The multiple-choice knapsack: one option of each item, of least total cost within a budget.  Numbers only."""

from collections.abc import Sequence

import numpy as np

STATES = 1 << 16  # partial choices that are kept at a time

Options = list[np.ndarray]  # an array per item: the sizes, or the costs, of its options


def knapsack(sizes: Sequence[Sequence[int]], costs: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Choose one option of each item: least total cost, total size at most the budget; of equally good ones the
    smaller.  Returns the index of each item's option.

    The result is exact as long as no more than `STATES` partial choices compete.  Items are decided one after the
    other.  A partial choice is dropped if another one is both smaller and cheaper, or if it cannot become better than
    the best whole choice known: the Lagrangian relaxation says how much the items left cost at least.
    """
    s, c = [np.array(each, np.int64) for each in sizes], [np.array(each, np.float64) for each in costs]
    smallest = sum(int(each.min()) for each in s)
    if smallest > budget:
        raise ValueError(f"the smallest choice takes {smallest}, and the budget is {budget}")
    if _total(s, best := _relaxed(s, c, 0.0)) <= budget:
        return best
    low, high = _price_of_the_budget(s, c, budget)
    best = _relaxed(s, c, high)
    better = _search(s, c, budget, (low, high), _total(c, best))
    return best if better is None else better


def _relaxed(sizes: Options, costs: Options, price: float) -> list[int]:
    """The best choice where size is not limited but paid for."""
    return [int(np.lexsort((s, c + price * s))[0]) for s, c in zip(sizes, costs, strict=True)]


def _total(values: Options, choice: list[int]) -> float:
    return sum(each[i] for each, i in zip(values, choice, strict=True))


def _price_of_the_budget(sizes: Options, costs: Options, budget: int) -> tuple[float, float]:
    """Two prices close together: at the lower one the relaxed choice is too large, at the higher one it fits."""
    low, high = 0.0, 1e-12
    while _total(sizes, _relaxed(sizes, costs, high)) > budget:
        low, high = high, 4 * high
    for _ in range(50):
        middle = (low + high) / 2
        fits = _total(sizes, _relaxed(sizes, costs, middle)) <= budget
        low, high = (low, middle) if fits else (middle, high)
    return low, high


def _search(sizes: Options, costs: Options, budget: int, prices: tuple[float, float], upper: float) -> list[int] | None:
    """The choice of least cost, if it costs at most `upper`."""
    least = np.cumsum([0, *(s.min() for s in reversed(sizes))])[::-1]  # what the items from t on take at least
    allowed = upper + 1e-12 * sum(np.abs(c).max() for c in costs)
    taken, spent = np.zeros(1, np.int64), np.zeros(1)  # of each partial choice: its size and its cost
    decisions: list[tuple[np.ndarray, np.ndarray]] = []  # of each partial choice: the one it extends, the option added
    for t, (s, c) in enumerate(zip(sizes, costs, strict=True)):
        size, cost = (taken[:, None] + s).ravel(), (spent[:, None] + c).ravel()
        bound = np.full(len(size), -np.inf)
        for price in prices:
            rest = sum((b + price * a).min() for a, b in zip(sizes[t + 1 :], costs[t + 1 :], strict=True))
            bound = np.maximum(bound, cost + rest - price * (budget - size))
        kept = np.flatnonzero((size + least[t + 1] <= budget) & (bound <= allowed))
        kept = kept[np.lexsort((cost[kept], size[kept]))]
        kept = kept[cost[kept] < np.concatenate([[np.inf], np.minimum.accumulate(cost[kept])[:-1]])]
        if len(kept) > STATES:
            kept = kept[np.sort(np.argsort(bound[kept], kind="stable")[:STATES])]
        if not len(kept):
            return None
        taken, spent = size[kept], cost[kept]
        decisions.append(np.divmod(kept, len(s)))
    at = int(np.argmin(spent))
    if spent[at] > upper:
        return None
    chosen = []
    for extends, option in reversed(decisions):
        chosen.append(int(option[at]))
        at = int(extends[at])
    return chosen[::-1]
