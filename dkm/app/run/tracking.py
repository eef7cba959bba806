"""What a run logs, sent to TensorBoard, Weights & Biases or a tracker of the user's own as well, through Accelerate.

Only the first process of a run has a tracker.  `accelerator.log` does nothing where there is none.
"""

import dataclasses
import hashlib
from typing import Any

from ..errors import Problem
from ..measures import named_measure
from ..own_code import load_function
from ..places import located
from ..run_folder import EvalRecord, Record, Result, RunFolder, figures
from ..settings import NO_TRACKER, Settings
from .stage import Stage


def check_tracker(settings: Settings) -> None:
    """Raise Problem where the tracker's package, or the user's function, is missing: before any work is done."""
    from accelerate.utils import is_tensorboard_available, is_wandb_available

    name = settings.tracker
    available = {"tensorboard": is_tensorboard_available, "wandb": is_wandb_available}
    if name in available and not available[name]():
        raise Problem(f"--tracker {name} needs a package that is not installed: pip install {name}")
    if name not in (*available, NO_TRACKER):
        load_function(name)


def start_tracker(stage: Stage, folder: RunFolder, done: int, before: float) -> None:
    """Begin to track the run, or go on with it after so many steps; `before` is the uncompressed model's figure."""
    settings, accelerator = stage.settings, stage.accelerator
    if settings.tracker == NO_TRACKER or not accelerator.is_main_process:
        return
    try:
        # not by Accelerator(log_with=...): the folder of the run has to be there before its tracker
        accelerator.log_with.append(_tracker(settings.tracker, folder, done))
        accelerator.init_trackers("dkm", None if done else _as_config(located(settings)))
    except Problem:
        raise
    except Exception as error:  # each of them has its own kinds, such as for a user who is not logged in
        accelerator.trackers.clear()  # there is nothing to finish
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Problem(f"--tracker {settings.tracker} did not start: {reason}") from error
    if not done:
        accelerator.log({f"eval/{stage.task.measure.name}_before": before}, step=0)


def stop_tracker(stage: Stage) -> None:
    """End the tracking; a tracker may still have something to write."""
    trackers = stage.accelerator.trackers
    while trackers:
        trackers.pop().finish()


def _tracker(name: str, folder: RunFolder, done: int) -> Any:
    """The tracker, with its files in the folder."""
    from accelerate import tracking

    if name == "tensorboard":
        again = {"purge_step": done + 1} if done else {}  # hides the steps that are done again
        return tracking.TensorBoardTracker(name, folder.path, **again)
    if name == "wandb":
        id = hashlib.sha256(folder.config.read_bytes() + folder.plan.read_bytes()).hexdigest()[:16]  # for a resumed run
        path = folder.path.resolve()
        return tracking.WandBTracker("dkm", dir=str(path), name=path.name, id=id, resume="allow")
    own = load_function(name)
    assert own is not None  # see `settings.make`
    tracker = own(folder.path)
    if not isinstance(tracker, tracking.GeneralTracker):
        raise Problem(f"{name} must return one of Accelerate's trackers, a GeneralTracker, and not {tracker!r:.100}")
    return tracker


def _as_config(settings: Settings) -> dict[str, Any]:
    """The settings as values that all trackers can store."""
    values = dataclasses.asdict(settings)
    return {name: value if isinstance(value, int | float | str) else str(value) for name, value in values.items()}


def tracked(record: Record) -> dict[str, float]:
    """The figures of a record of the log, by the names that a tracker shows; none of a histogram."""
    found: dict[str, float | None] = {}
    if record["kind"] == "step":
        found = {"train/loss": record["loss"], "train/lr": record.get("lr"), "train/epoch": record["epoch"]}
        found |= {"train/examples_per_second": record.get("per_second")}
    elif record["kind"] == "eval":
        found = _of_evaluation(record)
    elif record["kind"] == "layers":
        found = {"clustering/snap_gap": record["total"]["gap"], "clustering/changed": record["total"]["changed"]}
    return {name: value for name, value in found.items() if value is not None}


def _of_evaluation(record: EvalRecord) -> dict[str, float | None]:
    name = named_measure(record.get("metric")).name
    values = {name: record["snapped"], f"{name}_train_time": record["soft"], "loss": record.get("loss")}
    values |= {"standard_error": record.get("standard_error"), **record.get("more", {})}
    return {f"eval/{name}": value for name, value in values.items()}


def tracked_result(result: Result) -> dict[str, float]:
    """The figures of a finished run."""
    found = figures(result)
    return {
        f"result/{found.measure.name}": found.after,
        "result/bytes_file": result["bytes_file"],
        "result/ratio": result["ratio"],
    }
