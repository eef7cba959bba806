"""What an evaluation measures, and how its values are written: accuracies in percent, perplexities, and so on."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

LARGEST = 1e100  # of the figures in result.json
HUGE = 1e6  # a perplexity from here on is that of a model that knows nothing: its digits say nothing either


@dataclass(frozen=True)
class Measure:
    """A quantity that is measured on the evaluation examples."""

    name: str  # also in the log, and in the names of the figures in result.json: accuracy_before
    unit: str = ""
    lower_is_better: bool = False
    label: str = ""  # for a reader; where it is empty, the name is

    @property
    def title(self) -> str:
        """What a reader gets to see: top-5."""
        return self.label or self.name

    @property
    def axis(self) -> str:
        """What a chart says besides the title: %, or where the good values are."""
        return self.unit or ("lower is better" if self.lower_is_better else "higher is better")

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


# One of these three is what a kind of data is mainly measured by.
ACCURACY = Measure("accuracy", "%")
PERPLEXITY = Measure("perplexity", lower_is_better=True)
PEARSON = Measure("pearson", label="Pearson")  # correlations, F1 and Matthews are times 100, as in GLUE's tables
# These are measured besides.
TOP5 = Measure("top5", "%", label="top-5")
F1 = Measure("f1", label="F1")
MATTHEWS = Measure("matthews", label="Matthews")
SPEARMAN = Measure("spearman", label="Spearman")
MEASURES = {
    measure.name: measure for measure in (ACCURACY, PERPLEXITY, PEARSON, TOP5, F1, MATTHEWS, SPEARMAN)
}  # fmt: skip


def named_measure(name: Any) -> Measure:
    """The measure that a file of a run names; accuracy where it names none, as runs of dkm 0.1.0 did at first."""
    return MEASURES.get(name, ACCURACY) if isinstance(name, str) else ACCURACY


class Score(NamedTuple):
    """The result of an evaluation."""

    value: float  # of what the task mainly measures
    loss: float  # mean over the examples, or over the tokens
    examples: int
    error: float | None  # the standard error of the value, in its unit; None where there are too few examples for one
    more: dict[str, float]  # the names of other measures -> their values

    def figures(self, measure: Measure) -> dict[str, float | None]:
        """All of it by name, as result.json and `dkm eval --json` have it."""
        main = {measure.name: self.value, "standard_error": self.error, "examples": self.examples, "loss": self.loss}
        figures = main | self.more
        return {name: None if value is None or not math.isfinite(value) else value for name, value in figures.items()}

    def reliability(self, unit: str) -> str:
        """What the value rests on: "± 1.86, 300 images"."""
        count = f"{self.examples:,} {unit}"
        return count if self.error is None else f"± {self.error:.2f}, {count}"
