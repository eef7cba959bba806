"""Several runs next to each other: what they measured against their sizes, as a table and as curves."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...foundation.text import size_text
from ...foundation.text import table as text_table
from ..errors import Problem
from ..run_folder import RunFolder
from ..sweep import read_refused
from .charts import Figure, Line, Points, chart
from .reader import Number, Run, read
from .scatter import Dot, scatter
from .words import duration_text, ratio_text

LOOKS = "abcdefgh"  # the colours in `templates/style.css`
# These settings say where and how a run was computed; `plan` and `target-size` have a column of their own.
ELSEWHERE = {"out", "workers", "checkpoint-every", "device", "tracker"}
NOT_COMPARED = {*ELSEWHERE, "plan", "target-size"}
READING = (
    "“asked for” is the plan or the size that was given, and the settings in which the runs differ. “k-means” is the "
    "same plan before any training. ± is the standard error; of several seeds, whose mean is shown, it is their "
    "standard deviation."
)
DATA = ("data", "eval-data", "classes", "class-list", "image-size", "resize", "max-length")


@dataclass(frozen=True)
class Compared:
    """One of the runs."""

    label: str  # the shortest end of its path that no other run has
    look: str
    run: Run
    differs: str  # the settings that not all runs have in common

    @property
    def asked(self) -> str:
        """How small it was to be, and what else is special about it."""
        return ", ".join(filter(None, [self.run.asked, self.differs]))


@dataclass(frozen=True)
class Together:
    """Runs that differ in their seeds only: what the table shows of them is their mean.  Most often it is one run."""

    runs: list[Compared]

    @property
    def label(self) -> str:
        """The name of the first one, and how many there are."""
        first = self.runs[0]
        going = "" if all(each.run.finished for each in self.runs) else " (not finished)"
        return first.label + (f" ({len(self.runs)} seeds)" if len(self.runs) > 1 else "") + going

    @property
    def error(self) -> Number:
        """The standard error of one run, and the standard deviation of several."""
        if len(self.runs) == 1:
            return self.runs[0].run.error_after
        values = self._values("after")
        return statistics.stdev(values) if len(values) > 1 else None

    def mean(self, name: str) -> Number:
        """Of an attribute of the runs, over those that have it."""
        values = self._values(name)
        return statistics.mean(values) if values else None

    def _values(self, name: str) -> list[float]:
        return [value for each in self.runs if (value := getattr(each.run, name)) is not None]


@dataclass(frozen=True)
class Comparison:
    """All of them."""

    runs: list[Compared]
    groups: list[Together]  # all runs, those together that differ in the seed only
    refused: dict[str, str]  # runs that a sweep could not make, and why
    warnings: list[str]

    @property
    def model(self) -> str:
        """The name of what was compressed, where it is one model."""
        names = {each.run.name for each in self.runs}
        return names.pop() if len(names) == 1 else ""

    @property
    def first(self) -> Run:
        """A run for what all runs have in common."""
        return self.runs[0].run


def compare(paths: Sequence[str | os.PathLike]) -> Comparison:
    """Read the runs in these folders, or in the folders in these.

    Raises Problem where there are not two runs, or where they measured different things.
    """
    folders = [folder for path in paths for folder in _run_folders(Path(path))]
    folders = list({folder.resolve(): folder for folder in folders}.values())  # each of them once
    if len(folders) < 2:
        raise Problem(f"there is {len(folders) or 'no'} run to compare: name two or more, or a folder with runs in it")
    runs = [read(folder) for folder in folders]
    differing = _differing([run.config for run in runs])
    together: dict[str, list[int]] = {}
    for at, run in enumerate(runs):
        together.setdefault(_but_for_the_seed(run), []).append(at)
    several = {at for each in together.values() if len(each) > 1 for at in each}
    compared = [
        Compared(
            label, _look(at), run, _settings(run, [name for name in differing if at not in several or name != "seed"])
        )
        for at, (label, run) in enumerate(zip(_labels(folders), runs, strict=True))
    ]
    measures = {
        run.measure.name: label.label for label, run in zip(compared, runs, strict=True) if run.after is not None
    }
    if len(measures) > 1:
        said = " and ".join(f"the {name} of {label}" for name, label in measures.items())
        raise Problem(f"{said} cannot be compared: name runs that measured the same")
    groups = [Together([compared[at] for at in each]) for each in together.values()]
    refused = {name: why for path in paths for name, why in read_refused(Path(path)).items()}
    return Comparison(compared, groups, refused, _warnings(runs))


def _but_for_the_seed(run: Run) -> str:
    """What a run has in common with those that differ in the seed only."""
    return repr(sorted((name, value) for name, value in run.config.items() if name not in {*ELSEWHERE, "seed"}))


def _run_folders(path: Path) -> list[Path]:
    """The folder itself, where it is that of a run, or those in it that are."""
    if RunFolder(path).is_run() or not path.is_dir():
        return [path]
    return sorted(folder for folder in path.iterdir() if RunFolder(folder).is_run()) or [path]


def _labels(folders: Sequence[Path]) -> list[str]:
    """The ends of the paths: as short as they can be while all differ."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            break
    return labels


def _look(at: int) -> str:
    """A colour, and from the ninth run on dashes."""
    return LOOKS[at % len(LOOKS)] + (" dashed" if at >= len(LOOKS) else "")


def _differing(configs: Sequence[dict[str, Any]]) -> list[str]:
    """The settings that do not have one value in all of them."""
    names = list(dict.fromkeys(name for config in configs for name in config))
    return [name for name in names if any(config.get(name) != configs[0].get(name) for config in configs)]


def _settings(run: Run, names: Sequence[str]) -> str:
    shown = [name for name in names if name not in NOT_COMPARED and name not in DATA]
    return ", ".join(f"{name}={run.config[name]}" for name in shown if name in run.config)


def _warnings(runs: Sequence[Run]) -> list[str]:
    """Why figures may not mean the same."""
    differing = set(_differing([run.config for run in runs]))
    found = []
    if "model" in differing:
        found.append("The runs compress different models.")
    if differing.intersection(DATA):
        found.append("The runs have different data: their figures may not mean the same.")
    elif len({run.examples for run in runs if run.after is not None}) > 1:
        found.append("The runs were measured on different numbers of examples.")
    if any(not run.finished for run in runs):
        found.append("Of a run that is not finished, the figures are the latest.")
    return found


def sentences(comparison: Comparison) -> str:
    """What a colleague should know, in words."""
    measure, original = comparison.first.measure, _original(comparison)
    known = [each for each in comparison.groups if each.mean("after") is not None and each.mean("size")]
    found = []
    if original and original.dense_size and original.before is not None:
        found.append(
            f"The uncompressed network has {size_text(original.dense_size)} of parameters in float32 and "
            f"{measure.title} {measure.text(original.before)}."
        )
    if known:
        sign = -1 if measure.lower_is_better else 1
        best = max(known, key=lambda each: (sign * (each.mean("after") or 0), -(each.mean("size") or 0)))
        smallest = min(known, key=lambda each: (each.mean("size") or 0, -sign * (each.mean("after") or 0)))
        found.append(f"The best run, {best.label}, gives {_result(best)}.")
        if smallest is not best:
            found.append(f"The smallest, {smallest.label}, gives {_result(smallest)}.")
    examples = {run.examples for each in comparison.runs if (run := each.run).after is not None and run.examples}
    if len(examples) == 1:
        found.append(f"All were measured on {examples.pop():,.0f} {comparison.first.examples_are}.")
    return " ".join(found)


def _result(each: Together) -> str:
    after, size, ratio = each.mean("after"), each.mean("size"), each.mean("ratio")
    assert after is not None
    assert size is not None
    smaller = f", {ratio_text(ratio)} times smaller" if ratio else ""
    average = " on average" if len(each.runs) > 1 else ""
    return f"{each.runs[0].run.measure.text(after)}{average} in {size_text(size)}{smaller}"


# --- the table -----------------------------------------------------------------------------------


def columns(comparison: Comparison) -> list[str]:
    """The titles of the table's columns."""
    return ["run", "size", "smaller", comparison.first.measure.title, "change", "k-means", "time", "asked for"]


def rows(comparison: Comparison) -> list[list[str]]:
    """A line of the table for each run, from the largest file to the smallest, the uncompressed model first."""
    measure = comparison.first.measure
    lines = []
    if original := _original(comparison):
        value = "" if original.before is None else _with_error(original, original.before, original.error_before)
        whole = "" if original.dense_size is None else size_text(original.dense_size)
        lines.append(["not compressed", whole, "", value, "", "", "", ""])
    for each in sorted(comparison.groups, key=lambda each: -(each.mean("size") or 0)):
        size, ratio, seconds = each.mean("size"), each.mean("ratio"), each.mean("seconds")
        before, after, untrained = each.mean("before"), each.mean("after"), each.mean("untrained")
        lines.append(
            [
                each.label,
                "" if size is None else size_text(size),
                "" if ratio is None else f"{ratio_text(ratio)}x",
                "" if after is None else _with_error(each.runs[0].run, after, each.error),
                measure.change(before, after) if before is not None and after is not None else "",
                "" if untrained is None else measure.amount(untrained),
                "" if seconds is None else duration_text(seconds),
                each.runs[0].asked,
            ]
        )
    return lines + [[name, "", "", "", "", "", "", why] for name, why in comparison.refused.items()]


def _original(comparison: Comparison) -> Run | None:
    """A run that says what the uncompressed model is worth, where that is one model."""
    known = [each.run for each in comparison.runs if each.run.before is not None]
    is_one = len({(run.before, run.dense_size) for run in known}) == 1
    return known[0] if is_one else None


def _with_error(run: Run, value: float, error: Number) -> str:
    return run.measure.text(value) + ("" if error is None else f" ± {error:.2f}")


def text(comparison: Comparison, width: int) -> str:
    """The table as text of at most so many columns, with what there is to say about it."""
    shown = [columns(comparison), *rows(comparison)]
    used = [at for at in range(len(shown[0])) if any(line[at] for line in shown[1:])]
    shown = [[line[at] for at in used] for line in shown]
    align = "<" + ">" * (len(used) - 2) + "<"
    spare = ("time", "k-means", "change")
    lines = [text_table(shown, align, width, shrink_last=True, spare=spare)]
    return "\n".join([*lines, *comparison.warnings])


# --- the pictures --------------------------------------------------------------------------------


def size_figure(comparison: Comparison) -> Figure | None:
    """What the runs measured against the sizes of their files."""
    dots = [
        Dot(
            each.label,
            each.runs[0].look.split()[0],
            size,
            after,
            each.error,
            f"{each.label}: {size_text(size)}, {_with_error(each.runs[0].run, after, each.error)}",
        )
        for each in comparison.groups
        if (size := each.mean("size")) and (after := each.mean("after")) is not None
    ]
    measure, original = comparison.first.measure, _original(comparison)
    better = "lower is better" if measure.lower_is_better else "higher is better"
    notes = [f"Small and {'low' if measure.lower_is_better else 'high'} is best: the thin line joins the runs that no"]
    notes[0] += " other run beats in both."
    if any(dot.error for dot in dots):
        notes.append(
            "Vertical bars are one standard error each way, of several seeds one standard deviation. All runs of one "
            "data set answer the same examples, so what lies between two runs is more certain than their bars."
        )
    return scatter(
        f"{measure.title.capitalize()}, {measure.unit or better}",
        dots,
        level=None if original is None else original.before,
        lower_is_better=measure.lower_is_better,
        note=" ".join(notes),
    )


def curves(comparison: Comparison) -> list[Figure]:
    """How the runs went on: what they measured, the loss, and how much snapping changes the weights."""
    runs, measure = comparison.runs, comparison.first.measure
    unit = "epoch" if all(each.run.unit == "epoch" for each in runs if each.run.last_step) else "step"

    def lines(of: Any, form: str, factor: float = 1, marks: bool = False) -> list[Line]:
        drawn = []
        for each in runs:
            found = [(step, value) for step, value in of(each.run) if value is not None]
            points: Points = [(each.run.time(s) if unit == "epoch" else s, v * factor) for s, v in found]
            value = format(points[-1][1], form) if points else ""
            drawn.append(Line(each.label, each.look, points, value, marks=marks))
        return drawn

    snapped = lines(lambda run: [(r.step, r.snapped) for r in run.evaluations], ".2f", marks=True)
    losses = lines(lambda run: [(r.step, r.loss) for r in run.evaluations], ".3g", marks=True)
    gaps = lines(lambda run: [(r.step, r.gap) for r in run.layers], ".2g", 100)
    title = f"{measure.title.capitalize()}, {measure.axis}"
    found = [
        chart(title, snapped, unit, "Of snapped weights, as in the file."),
        chart("Evaluation loss", losses, unit, "Of snapped weights, as in the file."),
        chart("Snap gap, %", gaps, unit, "By how much snapping changes the weights.", log=True),
    ]
    return [figure for figure in found if figure is not None]
