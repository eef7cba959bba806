"""What a plan takes, in one of the ways to count it: as the paper does, or as the bytes of the file."""

from collections.abc import Sequence
from typing import Protocol

from .knapsack import knapsack
from .rows import Row


class Count(Protocol):
    """A way to count.  What a plan takes need not be the sum of what its rows take, but must be close to it."""

    name: str  # for messages: "as the paper counts"

    def of_row(self, row: Row) -> int:
        """Bits that a tensor takes; a number that is added for each tensor, whatever becomes of it, does not matter."""

    def of_plan(self, rows: Sequence[Row]) -> int:
        """Bits that all of it takes, exactly."""


class PaperCount:
    """The paper's: codes, centroids and scales, and 16 bit for each value of the other parameters."""

    name = "as the paper counts"

    def of_row(self, row: Row) -> int:
        """`stored_bits`."""
        return row.stored_bits

    def of_plan(self, rows: Sequence[Row]) -> int:
        """The sum."""
        return sum(row.stored_bits for row in rows)


class Budget:
    """The bits that a plan may take, and the cheapest choices that keep to it.

    `fixed` are all rows of the plan; those at the places `chosen` become what is chosen.
    """

    def __init__(self, bits: int, count: Count, fixed: Sequence[Row], chosen: Sequence[int]):
        self.bits, self.count, self.fixed, self.chosen = bits, count, list(fixed), list(chosen)
        self._sizes: dict[Row, int] = {}

    def size(self, row: Row) -> int:
        """What a tensor takes, nearly."""
        if row not in self._sizes:
            self._sizes[row] = self.count.of_row(row)
        return self._sizes[row]

    def total(self, rows: Sequence[Row]) -> int:
        """What a plan takes, exactly, with these rows at the chosen places."""
        whole = list(self.fixed)
        for at, row in zip(self.chosen, rows, strict=True):
            whole[at] = row
        return self.count.of_plan(whole)

    def smallest(self, options: Sequence[Sequence[Row]]) -> list[int]:
        """The index of the smallest option of each tensor."""
        return [min(range(len(own)), key=lambda at: self.size(own[at])) for own in options]

    def cheapest(self, options: Sequence[Sequence[Row]], costs: Sequence[Sequence[float]]) -> list[int]:
        """The index of each tensor's option: least total cost, and within the budget to the bit.

        What the whole takes beyond the sum of its parts is known only once it is chosen.  So what the last choice took
        is set aside, and there is another choice, until one fits.  The smallest choice must fit.
        """
        sizes = [[self.size(row) for row in own] for own in options]
        least = sum(map(min, sizes))
        best = picked = self.smallest(options)
        aside, fits = self._beyond(options, sizes, picked), False
        for _ in range(8):
            if least > self.bits - aside:
                break
            picked = knapsack(sizes, costs, self.bits - aside)
            beyond = self._beyond(options, sizes, picked)
            if beyond > aside and fits:
                break
            if beyond <= aside:
                best, fits = picked, True
            if beyond == aside:
                break
            aside = beyond
        return best

    def _beyond(self, options: Sequence[Sequence[Row]], sizes: Sequence[Sequence[int]], picked: Sequence[int]) -> int:
        rows = [own[at] for own, at in zip(options, picked, strict=True)]
        return self.total(rows) - sum(own[at] for own, at in zip(sizes, picked, strict=True))
