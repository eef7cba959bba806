"""The run in a few lines of text."""

import os

from ...foundation.text import size_text
from .headline import reliability
from .reader import Run, read
from .words import duration_text, percent_text, ratio_text

WIDTH = 80


def summary(path: str | os.PathLike) -> str:
    """A run folder in a few lines of at most 80 columns."""
    run = read(path)
    lines = [f"{run.name}, {run.plan_text}" if run.plan_text else run.name]
    lines += [_measured(run), _size(run), _training(run), "" if run.finished else "  not finished"]
    shown = [line.rstrip() for part in lines for line in part.splitlines()]
    return "\n".join(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…" for line in shown)


def _line(run: Run, label: str, figure: str, more: list[str]) -> str:
    """A line of the table, whose first column is as wide as its longest label."""
    return f"  {label:<{max(len(run.measure.title), len('measured')) + 2}}{figure:<14}" + ", ".join(more)


def _measured(run: Run) -> str:
    measure, after, before = run.measure, run.after, run.before
    if after is None:
        return ""
    more = [] if before is None else [f"was {measure.text(before)}", measure.change(before, after)]
    more += [] if run.untrained is None else [f"k-means alone {measure.amount(run.untrained)}"]
    line = _line(run, measure.title, measure.text(after), more)
    return f"{line}\n{_line(run, 'measured', reliability(run), [])}" if reliability(run) else line


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
    more = [f"{run.blocks} blocks before, one by one"] if run.blocks else []
    more += [] if run.seconds is None else [f"in {duration_text(run.seconds)}"]
    more += [] if run.gap is None else [f"snapping changes weights by {percent_text(run.gap)}"]
    return _line(run, "trained", f"{run.last_step:,} steps", more)
