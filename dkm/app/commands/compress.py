"""dkm compress: the run itself."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import recipes, run, settings
from ..errors import say
from ..processes import has_several_processes, rank
from ..run_folder import Result, RunFolder
from ..screen import Screen
from .application import app, with_settings


@app.command("compress")
@with_settings(*settings.FIELDS)
def compress_command(
    given: dict[str, Any],
    config: Annotated[Path | None, typer.Option(help="a .toml or .yaml file with any of the settings below")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="one of the paper's configurations; dkm recipes lists them")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --out, if there is one")] = False,
) -> None:
    """Train a model with clustered weights; write the small file and a report."""
    base = settings.read(recipes.path_of(recipe)) if recipe else {}
    run_and_show(given, base | (settings.read(config) if config else {}), resume)


def run_and_show(
    given: dict[str, Any], config: dict[str, Any], resume: bool = False, *, again: str | None = None
) -> Result:
    """A run of these settings, of which `given` win over `config`, with a screen that shows how it goes on.

    `again` is the command that goes on with it, where that is another than dkm compress.
    """
    chosen, continues = run.prepare(given, config, resume)
    folder = RunFolder(Path(str(chosen.out)))
    finished = folder.read_result() if continues else None
    with Screen(folder) as screen:
        if finished is not None:
            screen.note(f"{folder.path} is finished:")
            screen.finished(finished)
            return finished
        screen.settings(chosen)
        try:
            return run.compress(chosen, screen, resume=continues)
        except run.Stopped:
            screen.stop()
            if again is not None:
                say(f"stopped; go on with: {again}")
            elif rank() == 0 and folder.is_run():
                program = " the launcher and: -m dkm" if has_several_processes() else ": dkm"
                say(f"stopped; go on with{program} compress --resume --out {folder.path}")
            elif rank() == 0:
                say("stopped before the training began; nothing was written")
            raise
