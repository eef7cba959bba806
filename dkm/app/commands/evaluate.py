"""dkm eval: what a file, or any weights, are worth."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import run, settings
from ..errors import Problem
from ..run_folder import RunFolder, run_of
from ..screen import Screen, in_words
from .application import app, with_settings

_NEEDED = {"model": "NAME", "data": "FOLDER"}  # to measure weights that no run tells about


@app.command("eval")
@with_settings(
    *("model", "weights", "data", "eval_data", "classes", "image_size", "resize", "text_columns", "label_column"),
    *("max_length", "batch_size", "workers", "autocast", "device"),
)
def eval_command(
    given: dict[str, Any],
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="a run: its file, model and data; or the .dkm file of one"),
    ] = None,
) -> None:
    """The accuracy or perplexity of a run's file, or of any weights: --model NAME --weights FILE --data FOLDER."""
    chosen = settings.make({} if source is None else _of_source(source, given), given)
    with Screen() as screen:
        stage, model = run.open_stage(chosen, screen)
        score = run.evaluate(stage, model.eval())
        screen.note(f"{in_words(score, stage.task)}, loss {score.loss:.4f}")


def _of_source(source: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, or of the run that a file lies in, with its file as the weights."""
    folder = RunFolder(source) if source.is_dir() else run_of(source)
    if folder is None and not source.is_file():
        raise Problem(f"there is no run folder or file {source}")
    if folder is not None:
        stored, weights = folder.read_settings(), folder.read_model()
        return {name: getattr(stored, name) for name in settings.FIELDS} | {"weights": str(weights)}
    missing = [f"{settings.flag(name)} {what}" for name, what in _NEEDED.items() if name not in given]
    if missing:
        raise Problem(f"{source} is in no run's folder, so it needs {' and '.join(missing)} as well")
    return {"weights": str(source)}
