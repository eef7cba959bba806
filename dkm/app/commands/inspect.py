"""dkm inspect: what a file holds."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from .application import app


@app.command("inspect")
def inspect_command(file: Annotated[Path, typer.Argument(help="a .dkm file")]) -> None:
    """What a file holds: a row for each tensor, how evenly its codes are used, and their entropy."""
    from ...formats.contents import describe

    print(describe(file, shutil.get_terminal_size((100, 24)).columns))
