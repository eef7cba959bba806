"""dkm eval: what a file, or any weights, are worth."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import run, settings
from ..errors import Problem
from ..run_folder import RunFolder
from ..screen import Screen, in_words
from .application import app, with_settings


@app.command("eval")
@with_settings(
    *("model", "weights", "data", "eval_data", "classes", "image_size", "resize", "text_columns", "label_column"),
    *("max_length", "batch_size", "workers", "autocast", "device"),
)
def eval_command(
    given: dict[str, Any],
    folder: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="a run: its file, model and data")] = None,
) -> None:
    """The accuracy or perplexity of a run's file, or of any weights: --model NAME --weights FILE --data FOLDER."""
    base: dict[str, Any] = {}
    if folder is not None:
        files = RunFolder(folder)
        stored = files.read_settings()
        if not files.model.is_file():
            raise Problem(f"{folder} has no model.dkm yet: finish it with dkm compress --resume --out {folder}")
        base = {name: getattr(stored, name) for name in settings.FIELDS} | {"weights": str(files.model)}
    chosen = settings.make(base, given)
    with Screen() as screen:
        stage, model = run.open_stage(chosen, screen)
        score = run.evaluate(stage, model.eval())
        screen.note(f"{in_words(score, stage.task)}, loss {score.loss:.4f}")
