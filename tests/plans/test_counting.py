"""A budget that is kept to the bit, though what the whole takes is not the sum of what its parts take."""

import itertools
from collections.abc import Sequence

import pytest

from dkm.clustering.spec import Spec
from dkm.plans.counting import Budget, PaperCount
from dkm.plans.rows import Row

SHAPE = (64, 64)


def row(name: str, bits: int | None) -> Row:
    return Row(name, SHAPE, "lin", None if bits is None else Spec(bits), "a test")


class WithHeader(PaperCount):
    """Beyond the sum, the whole takes the digits of it."""

    def of_plan(self, rows: Sequence[Row]) -> int:
        total = super().of_plan(rows)
        return total + 800 * len(str(total)) + sum(64 * (row.bits or 0) for row in rows)


OPTIONS = [[row(name, bits) for bits in (1, 2, 3, 4, None)] for name in "abc"]
COSTS = [[weight / bits**2 for bits in (1, 2, 3, 4, 16)] for weight in (1.0, 2.0, 5.0)]
FIXED = [row("first", None), *(options[0] for options in OPTIONS)]
TOTALS = [
    WithHeader().of_plan([FIXED[0], *(own[at] for own, at in zip(OPTIONS, picked, strict=True))])
    for picked in itertools.product(range(5), repeat=3)
]


@pytest.mark.parametrize("bits", sorted(set(TOTALS)))
def test_it_fits_and_uses_what_there_is(bits: int):
    budget = Budget(bits, WithHeader(), FIXED, [1, 2, 3])
    picked = budget.cheapest(OPTIONS, COSTS)
    taken = budget.total([own[at] for own, at in zip(OPTIONS, picked, strict=True)])
    assert taken <= bits
    cost = sum(own[at] for own, at in zip(COSTS, picked, strict=True))
    # what the rounding of the header costs is at most what a slightly smaller budget would have
    affordable = [
        sum(own[at] for own, at in zip(COSTS, choice, strict=True))
        for choice, total in zip(itertools.product(range(5), repeat=3), TOTALS, strict=True)
        if total <= bits - 2_000
    ]
    assert cost <= min(affordable, default=float("inf"))


def test_the_paper_counts_the_sum():
    budget = Budget(10**9, PaperCount(), FIXED, [1, 2, 3])
    assert budget.total([options[1] for options in OPTIONS]) == 64 * 64 * (16 + 3 * 2) + 3 * 4 * 16
    assert budget.smallest(OPTIONS) == [0, 0, 0]
    assert budget.cheapest(OPTIONS, COSTS) == [4, 4, 4]
