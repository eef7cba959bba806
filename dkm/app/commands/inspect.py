"""dkm inspect: what a file holds."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ..run_folder import RunFolder
from .application import app


@app.command("inspect")
def inspect_command(
    source: Annotated[Path, typer.Argument(metavar="FILE_OR_RUN", help="a .dkm file, or the folder of a run")],
) -> None:
    """What a file holds: a row for each tensor, how evenly its codes are used, and their entropy."""
    from ...formats.contents import describe

    file = RunFolder(source).read_model() if source.is_dir() else source
    print(describe(file, shutil.get_terminal_size((100, 24)).columns))
