"""The run in a few lines of text."""

import os

from ...foundation.text import size_text
from .reader import Run, read
from .words import duration_text, percent_text, ratio_text

WIDTH = 80


def summary(path: str | os.PathLike) -> str:
    """A run folder in a few lines of at most 80 columns."""
    run = read(path)
    lines = [f"{run.name}, {run.plan_text}" if run.plan_text else run.name]
    lines += [_measured(run), _size(run), _training(run), "" if run.finished else "  not finished"]
    shown = [line.rstrip() for line in lines if line]
    return "\n".join(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…" for line in shown)


def _line(run: Run, label: str, figure: str, more: list[str]) -> str:
    """A line of the table, whose first column is as wide as its longest label."""
    return f"  {label:<{len(run.measure.title) + 2}}{figure:<18}" + ", ".join(more)


def _measured(run: Run) -> str:
    measure, after, before = run.measure, run.after, run.before
    if after is None:
        return ""
    more = [] if before is None else [f"was {measure.text(before)}", measure.change(before, after)]
    more += [] if run.untrained is None else [f"k-means alone {measure.amount(run.untrained)}"]
    if run.examples:
        more.append(f"{run.examples:,.0f} {run.examples_are}")
    error = "" if run.error_after is None else f" ± {run.error_after:.2f}"
    return _line(run, measure.title, f"{measure.text(after)}{error}", more)


def _size(run: Run) -> str:
    if not run.size:
        return ""
    more = []
    if run.dense_size and run.ratio:
        more = [f"was {size_text(run.dense_size)}", f"{ratio_text(run.ratio)}x smaller"]
    if run.paper_size and run.paper_size != run.size:
        more.append(f"paper's count {size_text(run.paper_size)}")
    return _line(run, "size", size_text(run.size), more)


def _training(run: Run) -> str:
    if run.last_step is None:
        return ""
    more = [] if run.seconds is None else [f"in {duration_text(run.seconds)}"]
    more += [] if run.gap is None else [f"snapping changes weights by {percent_text(run.gap)}"]
    return _line(run, "trained", f"{run.last_step:,} steps", more)
