"""dkm eval: what a file, or any weights, are worth."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import run, settings
from ..errors import Problem
from ..own_code import names_function
from ..run_folder import RunFolder, run_of
from ..screen import Screen, in_words
from .application import AsJSON, command, print_json, with_settings

_NEEDED = {"model": "NAME", "data": "FOLDER"}  # to measure weights that no run tells about


@command(
    "eval",
    "dkm eval run",
    "dkm eval run/model.dkm --json",
    "dkm eval --model resnet18 --weights resnet18.pth --data images",
)
@with_settings(
    *("model", "weights", "weights_key", "data", "eval_data", "classes", "class_list", "skip_bad_images"),
    *("image_size", "resize", "text_columns", "label_column", "max_length", "batch_size", "workers"),
    *("autocast", "device"),
)
def eval_command(
    given: dict[str, Any],
    source: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="a run: its file, model and data; or the .dkm file of one"),
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Measure the accuracy or perplexity of a run's file, or of any weights.

    A run knows its model and its data; flags win over these. Without a run, give --model, --weights and --data.
    """
    stored = {} if source is None else _of_source(source, given)
    chosen = settings.make(stored, given, _data_to_measure(stored, given))
    with Screen(to_stderr=as_json) as screen:
        stage, model = run.open_stage(chosen, screen, trains=False)
        screen.note(f"measuring {stage.task.what_is_measured()}")
        score = run.evaluate(stage, model.eval(), screen.measured)
        screen.stop()
        if as_json:
            print_json({"metric": stage.task.measure.name, "unit": stage.task.unit} | score.figures(stage.task.measure))
        else:
            screen.note(f"{in_words(score, stage.task)}, loss {score.loss:.4f}")


def _of_source(source: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, or of the run that a file lies in, with its file as the weights."""
    folder = RunFolder(source) if source.is_dir() else run_of(source)
    if folder is None and not source.is_file():
        raise Problem(f"there is no run folder or file {source}")
    if folder is not None:
        stored, weights = folder.read_settings(), folder.read_model()
        values = {name: getattr(stored, name) for name in settings.FIELDS}
        return values | {"weights": str(weights), "weights_key": None}
    missing = [f"{settings.flag(name)} {what}" for name, what in _NEEDED.items() if not _is_given(name, given)]
    if missing:
        raise Problem(f"{source} is in no run's folder, so it needs {' and '.join(missing)} as well")
    return {"weights": str(source)}


def _is_given(name: str, given: dict[str, Any]) -> bool:
    return name in given or (name == "data" and "eval_data" in given)


def _data_to_measure(stored: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Data that is given is measured, all of it: `--data` and `--eval-data` mean the same, unless both are given.

    The classes are numbered as in the data that a run was trained on.
    """
    data, evaluation = given.get("data"), given.get("eval_data")
    if bool(data) == bool(evaluation):
        return {}
    wanted, before = tuple(data or evaluation or ()), tuple(stored.get("data") or ())
    if not before or any(map(names_function, before + wanted)):  # a function gives both parts itself
        before = wanted
    return {"data": before, "eval_data": wanted}
