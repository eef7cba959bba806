"""The top of the page: accuracy or perplexity, and size, in large figures, and in a few sentences."""

import re
from dataclasses import dataclass

from ...foundation.text import size_text
from ..measures import ACCURACY, PERPLEXITY, Measure
from .reader import Run
from .words import ratio_text


@dataclass(frozen=True)
class Tile:
    """One of the large figures."""

    title: str
    amount: str
    unit: str
    more: list[str]  # lines of small print below


def tiles(run: Run) -> list[Tile]:
    """Accuracy or perplexity, size, and how many times smaller; as far as they are known."""
    found = []
    if run.after is not None:
        measure, more = run.measure, [with_hard_spaces(reliability(run))]
        if run.before is not None:
            difference = measure.change(run.before, run.after).replace("-", "−")  # a real minus, not a hyphen
            more.append(f"{difference}, was {with_hard_spaces(measure.text(run.before))}")
        more += ["lower is better"] if measure.lower_is_better else []
        found.append(Tile(measure.title, measure.amount(run.after), measure.unit, [line for line in more if line]))
    if run.size:
        amount, unit = size_text(run.size).split()
        found.append(Tile("size", amount, unit, [f"was {size_text(run.dense_size)}"] if run.dense_size else []))
    if run.ratio:
        found.append(Tile("smaller", ratio_text(run.ratio), "×", [f"{32 / run.ratio:.2f} bits per parameter"]))
    return found


def reliability(run: Run) -> str:
    """What the accuracy rests on: ± 1.86 on 300 images."""
    error = "" if run.error_after is None else f"± {run.error_after:.2f}"
    examples = f"on {run.examples:,.0f} {run.examples_are}" if run.examples else ""
    return f"{error} {examples}".strip()


def size_bars(run: Run) -> list[tuple[str, str, float]]:
    """The size before and after: what it is, the size, and its share of the larger one in percent."""
    if not run.size or not run.dense_size:
        return []
    largest = max(run.size, run.dense_size)
    before, after = ("in float32", run.dense_size), ("the file" if run.finished else "the file to come", run.size)
    return [(name, size_text(count), 100 * count / largest) for name, count in (before, after)]


LONGEST = 100  # characters of what was asked for, above the title


def kicker(run: Run) -> str:
    """The date, for the line above the title."""
    return f"{'compressed' if run.finished else 'begun'} {run.date}" if run.date else ""


def asked(run: Run) -> str:
    """How small it was to be, where that is not too long for the line above the title."""
    return run.asked if run.asked and len(run.asked) <= LONGEST else ""


def state(run: Run) -> str:
    """How far an unfinished run is, and that one was not trained."""
    if run.finished:
        return "Clustered by k-means, not trained." if run.last_step == 0 and not run.blocks else ""
    if run.last_step is None:
        return "Not trained yet."
    where = f"epoch {run.time(run.last_step):.1f}" if run.unit == "epoch" else f"step {run.last_step:,}"
    of = f" of {run.epochs:g}" if run.epochs and run.unit == "epoch" else ""
    return f"Not finished: {where}{of}. The figures are the latest."


def sentences(run: Run) -> str:
    """What a colleague should know, in words."""
    found = []
    if run.ratio and run.size and run.dense_size:
        found.append(
            f"The file {'takes' if run.finished else 'will take about'} {size_text(run.size)}; in float32 the "
            f"network’s parameters took {size_text(run.dense_size)}, {ratio_text(run.ratio)} times as much."
        )
    if run.after is not None:
        found.append(_measured(run.measure, run.after, run.before))
        if run.examples:
            error = "" if run.error_after is None else f"; the standard error is {run.measure.amount(run.error_after)}"
            found.append(f"That was measured on {run.examples:,.0f} {run.examples_are}{error}.")
        for measure, before, after in run.others if run.finished else ():
            if after is not None:
                was = "" if before is None else f", and was {measure.text(before)} before"
                found.append(f"{measure.title} is {measure.text(after)}{was}.")
        if run.untrained is not None and run.last_step:
            untrained = run.measure.text(run.untrained)
            found.append(f"Clustering the same weights without training would give {untrained}.")
    if run.paper_size and run.dense_size and run.size != run.paper_size:
        found.append(
            f"As the paper counts, without the file’s names and running statistics, the size is "
            f"{size_text(run.paper_size)}: {ratio_text(run.dense_size / run.paper_size)} times less."
        )
    return with_hard_spaces(" ".join(found))


def _measured(measure: Measure, after: float, before: float | None) -> str:
    now, then = measure.text(after), "" if before is None else measure.text(before)
    if measure is PERPLEXITY:
        original = f"; that of the original was {then}" if then else ""
        return f"The network’s perplexity on the evaluation texts is {now}, where lower is better{original}."
    if measure is not ACCURACY:
        original = f"; of the original it was {then}" if then else ""
        return f"{measure.title} of the network’s answers on the evaluation examples is {now}{original}."
    original = f"; the original answered {then}" if then else ""
    return f"The network answers {now} of the evaluation examples correctly{original}."


def with_hard_spaces(text: str) -> str:
    """Keep a unit, and ±, on the line of its number."""
    return re.sub(r"(?<=\d) (?=%|(?:MB|kB|B)\b)|(?<=±) ", "\u00a0", text)
