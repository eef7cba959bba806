"""What an evaluation measures, and how its values are written: accuracies in percent, or perplexities."""

from dataclasses import dataclass
from typing import Any

LARGEST = 1e100  # of the figures in result.json
HUGE = 1e6  # a perplexity from here on is that of a model that knows nothing: its digits say nothing either


@dataclass(frozen=True)
class Measure:
    """A quantity that is measured on the evaluation examples."""

    name: str  # also in the log, and in the names of the figures in result.json: accuracy_before
    unit: str = ""
    lower_is_better: bool = False

    def amount(self, value: float) -> str:
        """The number alone: 88.25."""
        return f"{value:.2f}" if abs(value) < HUGE else f"{value:.3g}"

    def text(self, value: float) -> str:
        """The number with its unit: 88.25 %, or 5.45."""
        return f"{self.amount(value)} {self.unit}".rstrip()

    def change(self, before: float, after: float) -> str:
        """The difference, with its sign."""
        difference = self.amount(after - before)
        return difference if difference.startswith("-") else f"+{difference}"


ACCURACY = Measure("accuracy", "%")
PERPLEXITY = Measure("perplexity", lower_is_better=True)
MEASURES = {measure.name: measure for measure in (ACCURACY, PERPLEXITY)}


def named_measure(name: Any) -> Measure:
    """The measure that a file of a run names; accuracy where it names none, as runs of dkm 0.1.0 did at first."""
    return MEASURES.get(name, ACCURACY) if isinstance(name, str) else ACCURACY
