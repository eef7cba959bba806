"""The files of a run folder -> a `Run`, in which every number is a finite number or None.

A file may be missing, and a record may lack any of its entries: the run may still be going, may have diverged, or may
have been written by a training loop of the user's own.
"""

import json
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ...foundation import jsonl
from ..errors import Problem, reason_of
from ..measures import Measure, named_measure
from ..places import without_places
from ..run_folder import (
    FILES,
    Beginning,
    EvalRecord,
    HistogramRecord,
    LayersRecord,
    Other,
    PlanFile,
    PlanRow,
    Result,
    RunFolder,
    StepRecord,
    figures,
)

Number = float | None
LARGEST = 1e100  # float32 ends at 3e38; sums and quotients of larger numbers could leave the range of Python's floats
MOST_BITS, MOST_DIMENSIONS = 64, 64  # of one code, and of one tensor


@dataclass(frozen=True)
class _Logged:
    """What all records have."""

    step: int


@dataclass(frozen=True)
class Step(_Logged):
    """A logged training step."""

    epoch: Number
    loss: Number


@dataclass(frozen=True)
class Evaluation(_Logged):
    """A logged evaluation."""

    epoch: Number
    soft: Number
    snapped: Number
    loss: Number
    error: Number  # the standard error of `snapped`
    examples: Number


@dataclass(frozen=True)
class Measured:
    """One clustered tensor at one moment; `dkm.monitor` explains the numbers."""

    iterations: Number = None
    tau: Number = None
    gap: Number = None
    changed: Number = None
    dead: Number = None
    entropy: Number = None


@dataclass(frozen=True)
class Layers(_Logged):
    """All clustered tensors at one moment, and the numbers for all of them together."""

    tensors: dict[str, Measured]
    gap: Number
    changed: Number


@dataclass(frozen=True)
class Histogram(_Logged):
    """The weights of one tensor at one moment; see `HistogramRecord`."""

    name: str
    edges: list[float]
    counts: list[float]
    centroids: list[float]


@dataclass(frozen=True)
class Run:
    """What a run folder holds; what is missing is None or empty.  Lists of records are sorted by step."""

    path: Path
    config_text: str
    config: dict[str, Any]  # what config_text says
    model: str | None
    model_class: str  # empty where it is not known
    epochs: Number
    plan_text: str | None
    rows: list[PlanRow]
    plan_bytes: Number
    plan_dense_bytes: Number
    finished: bool
    measure: Measure  # what was measured before and after, and at every evaluation
    before: Number  # of the uncompressed model
    measured_after: Number  # of the file
    error_before: Number  # standard errors of these two; older runs have none
    error_measured_after: Number
    examples: Number  # how many were evaluated, where that is known
    examples_are: str  # what they are: images
    others: list[Other]  # what was measured besides
    bytes_dense: Number
    bytes_paper: Number
    bytes_file: Number
    stored: dict[
        str, int
    ]  # the arrays of the file and its `header` -> their bytes, expected ones until there is a file
    seconds: Number
    seed: str | None
    date: str | None  # 2026-11-19
    command: str | None
    environment: dict[str, str]
    steps: list[Step]
    evaluations: list[Evaluation]
    layers: list[Layers]
    histograms: list[Histogram]
    blocks: int  # that were trained one by one, before the first step

    @property
    def name(self) -> str:
        """What was compressed: `resnet18`, and of `folder/resnet18` the same.  Of `file.py:function` it is the class of
        the model, where that is known and one of the user's own, and otherwise the function."""
        model = self.model or self.path.resolve().name
        if self.model_class and ".py:" in model:
            return self.model_class
        return model.rstrip("/").rpartition("/")[2].rpartition(":")[2] or model

    @property
    def asked(self) -> str | None:
        """How small it was to be: the plan as the user gave it, or the size."""
        plan, size = self.config.get("plan"), self.config.get("target-size")
        if size:
            return f"{size}, {plan}" if plan else str(size)
        return str(plan) if plan else self.plan_text

    @property
    def after(self) -> Number:
        """What was measured of the file; of a run still going that of the last evaluation."""
        if self.finished or self.latest is None:
            return self.measured_after
        return self.latest.snapped

    @property
    def error_after(self) -> Number:
        """The standard error of `after`."""
        if self.finished or self.latest is None:
            return self.error_measured_after
        return self.latest.error

    @property
    def latest(self) -> Evaluation | None:
        """The last evaluation that gave a number."""
        return next((record for record in reversed(self.evaluations) if record.snapped is not None), None)

    @property
    def untrained(self) -> Number:
        """What was measured of k-means alone, before any training."""
        first = (record for record in self.evaluations if record.step == 0 and not self.blocks)
        return next((record.snapped for record in first), None)

    @property
    def dense_size(self) -> Number:
        """Bytes of the parameters in float32."""
        return self.bytes_dense or self.plan_dense_bytes

    @property
    def paper_size(self) -> Number:
        """Bytes as the paper counts: codes and centroids, and 16 bit for every other parameter."""
        return self.bytes_paper or self.plan_bytes

    @property
    def size(self) -> Number:
        """Bytes of the file, or of that to come; of an older run that is not finished, as the paper counts."""
        return self.bytes_file or sum(self.stored.values()) or self.paper_size

    @property
    def ratio(self) -> Number:
        """How many times smaller the file is than the parameters in float32."""
        return self.dense_size / self.size if self.dense_size and self.size else None

    @property
    def is_taught(self) -> bool:
        """Whether it learned from the uncompressed model: its training loss is then another quantity than that of the
        evaluations."""
        return self.config.get("teacher", "none") != "none"

    @property
    def gap(self) -> Number:
        """How much snapping changes the weights, at the last record."""
        return self.layers[-1].gap if self.layers else None

    @property
    def last_step(self) -> int | None:
        """The latest step that was logged."""
        lists: tuple[Sequence[_Logged], ...] = (self.steps, self.evaluations, self.layers)
        return max((record.step for records in lists for record in records), default=None)

    def time(self, step: int) -> float:
        """Where a step stands in the training: its epoch, where epochs are known, otherwise its number."""
        return step * self.epochs_per_step if self.epochs_per_step else step

    @property
    def unit(self) -> str:
        """What `time` counts."""
        return "epoch" if self.epochs_per_step else "step"

    @property
    def epochs_per_step(self) -> float:
        """0 where epochs are not known."""
        known = [r.epoch / r.step for r in self.steps if r.step and r.epoch]
        known += [r.epoch / r.step for r in self.evaluations if r.step and r.epoch]
        return known[-1] if known else 0.0


def read(path: str | os.PathLike) -> Run:
    """Read a run folder.  Raises Problem where there is none, or where a file in it is not what it should be."""
    folder = RunFolder(Path(path))
    if not folder.path.is_dir():
        raise Problem(f"there is no run folder {folder.path}: name one that dkm compress wrote")
    if not any((folder.path / name).exists() for name in FILES):
        raise Problem(f"{folder.path} is not a run folder: it has none of {', '.join(FILES)}")
    config_text = _text(folder.config)
    config = _config(folder.config, config_text)
    plan, result = cast(PlanFile, _json(folder.plan)), cast(Result, _json(folder.result))
    log = _log(folder.log)
    beginning = _beginning(plan)
    found = figures(result or beginning)
    measure = found.measure
    if not result and not beginning and log["eval"]:
        measure = named_measure(log["eval"][-1].get("metric"))
    evaluations = [_evaluation(cast(EvalRecord, record)) for record in log["eval"]]
    command, seed = result.get("command") or config.get("command"), result.get("seed")
    command = " ".join(map(str, command)) if isinstance(command, list) else str(command) if command else ""
    model, plan_text = config.get("model"), plan.get("text")
    return Run(
        path=folder.path,
        config_text=without_places(config_text, config),
        config=config,
        model=str(model) if model else None,
        model_class=str(beginning.get("model") or ""),
        epochs=number(config.get("epochs")),
        plan_text=str(plan_text) if plan_text else None,
        rows=[_row(cast(PlanRow, row)) for row in _list(plan.get("rows")) if isinstance(row, dict)],
        plan_bytes=_amount(plan.get("bytes")),
        plan_dense_bytes=_amount(plan.get("dense_bytes")),
        finished=bool(result.get("finished")),
        measure=measure,
        before=number(found.before),
        measured_after=number(found.after),
        error_before=_amount(found.error_before),
        error_measured_after=_amount(found.error_after),
        examples=_amount(found.examples) or next((r.examples for r in reversed(evaluations) if r.examples), None),
        examples_are=found.unit,
        others=[Other(other.measure, number(other.before), number(other.after)) for other in found.others],
        bytes_dense=_amount(result.get("bytes_dense")),
        bytes_paper=_amount(result.get("bytes_paper")),
        bytes_file=_amount(result.get("bytes_file")),
        stored=_stored((result or beginning).get("file")),
        seconds=_amount(result.get("seconds")),
        seed=None if seed is None else str(seed),
        date=str((result or beginning).get("date") or "")[:10] or None,
        command=without_places(command, config) or None,
        environment=_environment(result.get("environment")),
        steps=[_step(cast(StepRecord, record)) for record in log["step"]],
        evaluations=evaluations,
        layers=[_layers(cast(LayersRecord, record)) for record in log["layers"]],
        histograms=[h for record in log["histogram"] if (h := _histogram(cast(HistogramRecord, record)))],
        blocks=len(log["block"]),
    )


def number(value: Any) -> Number:
    """The value where it is a finite number of a size that can be drawn, otherwise None."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_real or not -LARGEST <= value <= LARGEST:  # which excludes NaN
        return None
    return 0.0 if 0 < abs(value) < 1 / LARGEST else value


def _amount(value: Any) -> Number:
    """The value where it is a number that is not negative, otherwise None."""
    found = number(value)
    return found if found is not None and found >= 0 else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# --- files ---------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except UnicodeDecodeError:
        raise Problem(f"{path} is not a text file") from None
    except OSError as error:
        raise Problem(f"cannot read {path}: {reason_of(error)}") from None


def _config(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise Problem(f"{path} is not TOML: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path) or "{}")
    except (ValueError, RecursionError) as error:
        raise Problem(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Problem(f"{path} should hold a JSON object, and holds {type(found).__name__}")
    return found


def _log(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The kind of records -> those of them that have a step, sorted by it."""
    try:
        records = jsonl.read(path)
    except ValueError as error:
        raise Problem(str(error)) from None
    except (OSError, RecursionError) as error:
        raise Problem(f"cannot read {path}: {reason_of(error)}") from None
    names = ("step", "eval", "layers", "histogram", "block")
    kinds: dict[str, dict[tuple[int, str], dict[str, Any]]] = {name: {} for name in names}
    for record in records:
        # A step that was repeated after a crash counts once, and the last time is the one that counts.
        kind, step = record.get("kind"), record.get("step")
        if isinstance(kind, str) and kind in kinds and isinstance(step, int) and _amount(step) is not None:
            kinds[kind][step, str(record.get("name"))] = record
    return {kind: sorted(found.values(), key=lambda record: record["step"]) for kind, found in kinds.items()}


# --- entries -------------------------------------------------------------------------------------


def _row(row: PlanRow) -> PlanRow:
    found, dim = _amount(row.get("bits")), max(1, int(_amount(row.get("dim")) or 1))
    bits = None if found is None or found > MOST_BITS else int(found)
    shape = [int(size) for size in map(_amount, _list(row.get("shape"))[:MOST_DIMENSIONS]) if size is not None]
    return PlanRow(
        name=str(row.get("name")),
        shape=shape,
        bits=bits,
        dim=dim,
        label="keep" if bits is None else str(row.get("label") or f"{bits}/{dim}"),  # older runs have none
        centroids="" if bits is None else str(row.get("centroids") or 2**bits),
        reason=str(row.get("reason") or ""),
        bytes=int(_amount(row.get("bytes")) or 0),
    )


def _beginning(plan: PlanFile) -> Beginning:
    found: Any = plan.get("beginning")
    return cast(Beginning, found if isinstance(found, dict) else {})


def _stored(found: Any) -> dict[str, int]:
    """Nothing unless all of them are numbers: together they have to be the whole file."""
    sizes = {str(name): _amount(size) for name, size in found.items()} if isinstance(found, dict) else {}
    return {name: int(size) for name, size in sizes.items() if size is not None} if None not in sizes.values() else {}


def _environment(found: Any) -> dict[str, str]:
    if not isinstance(found, dict):
        return {"environment": str(found)} if found else {}
    return {str(key): str(value) for key, value in found.items()}


def _step(record: StepRecord) -> Step:
    return Step(record["step"], number(record.get("epoch")), number(record.get("loss")))


def _evaluation(record: EvalRecord) -> Evaluation:
    return Evaluation(
        record["step"],
        epoch=number(record.get("epoch")),
        soft=number(record.get("soft")),
        snapped=number(record.get("snapped")),
        loss=number(record.get("loss")),
        error=_amount(record.get("standard_error")),
        examples=_amount(record.get("examples")),
    )


def _layers(record: LayersRecord) -> Layers:
    tensors, total = record.get("tensors"), record.get("total")
    measured = {
        str(name): Measured(
            iterations=number(numbers.get("iterations")),
            tau=number(numbers.get("tau")),
            gap=number(numbers.get("gap")),
            changed=number(numbers.get("changed")),
            dead=number(numbers.get("dead")),
            entropy=number(numbers.get("entropy")),
        )
        for name, numbers in (tensors.items() if isinstance(tensors, dict) else ())
        if isinstance(numbers, dict)
    }
    gap = number(total.get("gap")) if isinstance(total, dict) else None
    changed = number(total.get("changed")) if isinstance(total, dict) else None
    return Layers(record["step"], measured, gap, changed)


def _histogram(record: HistogramRecord) -> Histogram | None:
    """None where the record cannot be drawn."""
    edges, counts, centroids = _numbers(record.get("edges")), _numbers(record.get("counts")), record.get("centroids")
    places = _numbers(centroids)
    if edges is None or counts is None or places is None or len(edges) != len(counts) + 1 or not counts:
        return None
    if edges != sorted(edges) or min(counts) < 0:
        return None
    return Histogram(record["step"], str(record.get("name")), edges, counts, places)


def _numbers(values: Any) -> list[float] | None:
    """The list where it holds finite numbers only, otherwise None."""
    if not isinstance(values, list):
        return None
    found = [value for value in map(number, values) if value is not None]
    return found if len(found) == len(values) else None
