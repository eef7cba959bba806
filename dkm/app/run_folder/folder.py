"""The files of a run folder, each written whole or not at all.

config.toml     the settings, all of them
measurements.jsonl
                what was measured to choose a plan for a size, so that it is not measured again
plan.json       what becomes of each tensor; missing while a plan is being chosen
samples.safetensors
                the texts that a language model wrote to be trained on, as tokens
bad-images.json the numbers of the images that cannot be read and are left out, with --skip-bad-images
log.jsonl       a line for each logged step, evaluation, look at the layers, and histogram
checkpoints/    last.pt, to resume from
model.dkm       the result
result.json     its figures
report.html     all of it, to look at
"""

import json
import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor

from ...foundation import jsonl
from ...foundation.atomic import Writer, write_atomically
from ..errors import Problem, WriteProblem, reason_of
from ..measures import LARGEST, Score
from ..places import located
from ..settings import Settings, as_toml, make, read
from .lock import locked
from .schema import Checkpoint, LeftOut, PlanFile, Record, Result, figures

_START_ANEW = "start the run anew in another --out"
_TRAIN_AGAIN = "take the file away, and --resume writes it again"

FILES = ("config.toml", "plan.json", "log.jsonl", "result.json")  # what a report is made from


def run_of(file: Path) -> "RunFolder | None":
    """The run that a compressed file is the result of; None where it lies somewhere else."""
    folder = RunFolder(file.parent)
    return folder if folder.is_run() and folder.model.name == file.name else None


@dataclass(frozen=True)
class RunFolder:
    """The folder at `path`, which need not exist yet."""

    path: Path

    @property
    def config(self) -> Path:
        """The settings."""
        return self.path / "config.toml"

    @property
    def plan(self) -> Path:
        """What becomes of each tensor."""
        return self.path / "plan.json"

    @property
    def measurements(self) -> Path:
        """What was measured to choose a plan; only there where one was chosen."""
        return self.path / "measurements.jsonl"

    @property
    def log(self) -> Path:
        """A line for each record; see `schema`."""
        return self.path / "log.jsonl"

    @property
    def samples(self) -> Path:
        """The language model's own texts; only there where it is trained on those."""
        return self.path / "samples.safetensors"

    @property
    def bad_images(self) -> Path:
        """The images that are left out."""
        return self.path / "bad-images.json"

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint."""
        return self.path / "checkpoints" / "last.pt"

    @property
    def model(self) -> Path:
        """The compressed file."""
        return self.path / "model.dkm"

    @property
    def result(self) -> Path:
        """The figures; there once the run is finished."""
        return self.path / "result.json"

    @property
    def report(self) -> Path:
        """The page."""
        return self.path / "report.html"

    def lock(self) -> AbstractContextManager[None]:
        """Hold the folder, which must be that of a run, for one process; Problem where another process holds it."""
        return locked(self.path, self.config)

    # --- reading

    def is_run(self) -> bool:
        """Whether there is a run in the folder, begun or finished."""
        return self.config.is_file()

    def read_settings(self) -> Settings:
        """The settings that the run was started with; Problem where there is no run."""
        if not self.is_run():
            raise Problem(f"{self.path} is not the folder of a run: it has no config.toml")
        return make(read(self.config))

    def read_model(self) -> Path:
        """The compressed file; Problem where there is no run, or where it is not finished."""
        self.read_settings()
        if not self.model.is_file():
            raise Problem(f"{self.path} has no model.dkm yet: finish it with dkm compress --resume --out {self.path}")
        return self.model

    def read_plan(self) -> PlanFile:
        """plan.json, which every run has from its beginning, or since its plan was chosen."""
        plan = _read_json(self.plan)
        if not isinstance(plan.get("text"), str):
            raise Problem(f"{self.plan} does not hold the plan of a run: {_START_ANEW}")
        return cast(PlanFile, plan)

    def read_samples(self) -> Tensor:
        """The `(texts, length)` int32 tokens that the uncompressed model wrote."""
        try:
            tokens = safetensors.torch.load_file(self.samples)["tokens"]
        except OSError as error:
            raise Problem(f"cannot read {self.samples}: {reason_of(error)}; {_START_ANEW}") from None
        except Exception:  # safetensors raises its own kind, and a missing name is a KeyError
            raise Problem(f"{self.samples} does not hold the texts of a run, or is cut off: {_START_ANEW}") from None
        if tokens.ndim != 2 or tokens.dtype != torch.int32:
            raise Problem(f"{self.samples} does not hold the texts of a run: {_START_ANEW}")
        return tokens

    def read_bad_images(self) -> LeftOut | None:
        """The images that the run leaves out; None where it reads all of them."""
        if not self.bad_images.is_file():
            return None
        found = _read_json(self.bad_images)
        for numbers in found.values():
            if not isinstance(numbers, list) or not all(isinstance(each, int) and each >= 0 for each in numbers):
                raise Problem(f"{self.bad_images} does not hold the images that a run leaves out: {_START_ANEW}")
        return cast(LeftOut, found)

    def read_result(self) -> Result | None:
        """The figures of the run; None until it is finished."""
        if not self.result.is_file():
            return None
        result = _read_json(self.result)
        found = figures(cast(Result, result))
        name = found.measure.name
        needed = {f"{name}_before": found.before, f"{name}_after": found.after}
        needed |= {name: result.get(name) for name in ("bytes_dense", "bytes_file", "ratio", "seconds")}
        for name, value in needed.items():
            if not isinstance(value, int | float) or not abs(value) < LARGEST:
                raise Problem(f"{self.result} does not hold the figures of a run, such as {name}: {_TRAIN_AGAIN}")
        return cast(Result, result)

    def read_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint; None where there is none yet."""
        if not self.checkpoint.is_file():
            return None
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises many kinds of them
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise Problem(f"cannot read the checkpoint {self.checkpoint}: {reason}") from None
        numbers = ("done", "evaluated", "lines", "before", "seconds", "steps", "world")
        if (
            not isinstance(state, dict)
            or not Checkpoint.__required_keys__ <= state.keys()
            or not all(isinstance(state[name], int | float) for name in numbers)
            or set(state.get("score_before", Score._fields)) != set(Score._fields)
        ):
            raise Problem(f"{self.checkpoint} is not the checkpoint of a run: {_START_ANEW}")
        return cast(Checkpoint, state)

    # --- writing

    def check_place(self) -> None:
        """Raise Problem where the folder could not be made."""
        above = next(path for path in self.path.absolute().parents if path.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise Problem(f"cannot make the folder {self.path}: {above} is not a folder that you may write to")

    def create(
        self,
        settings: Settings,
        plan: PlanFile | None,
        samples: Tensor | None = None,
        bad_images: LeftOut | None = None,
    ) -> None:
        """Make the folder with its first files: whole, or not at all.  An empty folder may be there already.
        Without a plan, `write_plan` follows.

        All paths of the settings are stored absolute, so that the run means the same in every working directory.
        """
        partial = self.path.with_name(f".{self.path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed at this very moment
        try:
            (partial / "checkpoints").mkdir(parents=True)
            write_atomically(partial / self.config.name, as_toml(located(settings)))
            if plan is not None:
                write_atomically(partial / self.plan.name, json.dumps(plan, indent=1) + "\n")
            if samples is not None:
                write_atomically(partial / self.samples.name, safetensors.torch.save({"tokens": samples}))
            if bad_images is not None:
                write_atomically(partial / self.bad_images.name, json.dumps(bad_images) + "\n")
            os.rename(partial, self.path)
        except OSError as error:
            raise Problem(f"cannot make the folder {self.path}: {reason_of(error)}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def append(self, record: Record) -> None:
        """Add a line to the log."""
        try:
            jsonl.append(self.log, dict(record))
        except OSError as error:
            raise self.cannot_write(self.log, reason_of(error)) from None

    def keep_log_lines(self, count: int) -> None:
        """Remove what was logged after the first `count` lines."""
        if self.log.exists():
            jsonl.keep(self.log, count)

    def write_plan(self, plan: PlanFile) -> None:
        """Write plan.json."""
        self._write(self.plan, json.dumps(plan, indent=1) + "\n")

    def write_result(self, result: Result) -> None:
        """Write result.json, which says that the run is finished."""
        self._write(self.result, json.dumps(result, indent=2) + "\n")

    def write_checkpoint(self, state: Checkpoint) -> None:
        """Replace the last checkpoint."""
        try:
            write_atomically(self.checkpoint, lambda stream: torch.save(state, stream))
        except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
            reason = getattr(error, "strerror", None) or "the disk may be full"
            raise self.cannot_write(self.checkpoint, reason) from None

    def _write(self, path: Path, content: str | bytes | Writer) -> None:
        try:
            write_atomically(path, content)
        except OSError as error:
            raise self.cannot_write(path, reason_of(error)) from None

    def cannot_write(self, path: Path, reason: str) -> WriteProblem:
        """The error for a file of the run that could not be written; it says from where the run can go on."""
        start = "the last checkpoint" if self.checkpoint.is_file() else "the beginning, as there is no checkpoint yet"
        resume = f"dkm compress --resume --out {self.path}"
        return WriteProblem(f"cannot write {path}: {reason}; make room, and {resume} goes on from {start}")

    def remove_unfinished_files(self) -> None:
        """Remove what a run that was killed while it wrote has left behind."""
        for folder in (self.path, self.checkpoint.parent):
            for file in folder.glob(".*.partial"):
                file.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; Problem where the file is missing, cut off, or something else."""
    remedy = _TRAIN_AGAIN if path.name == "result.json" else _START_ANEW
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Problem(f"cannot read {path}: {reason_of(error)}") from None
    except (ValueError, RecursionError):
        raise Problem(f"{path} is cut off or is not JSON: {remedy}") from None
    if not isinstance(found, dict):
        raise Problem(f"{path} should hold a JSON object, and holds a {type(found).__name__}: {remedy}")
    return found
