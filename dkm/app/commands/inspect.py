"""dkm inspect: what a file holds."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ...formats import contents
from ..run_folder import RunFolder
from .application import AsJSON, command, print_json


@command("inspect", "dkm inspect run/model.dkm", "dkm inspect run --json")
def inspect_command(
    source: Annotated[Path, typer.Argument(metavar="FILE_OR_RUN", help="a .dkm file, or the folder of a run")],
    as_json: AsJSON = False,
) -> None:
    """Show what a file holds: a row for each tensor, and how its codes are used.

    b/d is bits per code and weights per vector, k the number of centroids, used how many of them have a code. entropy
    is how many bits a code would need at least; codes is a histogram, from the smallest centroid to the largest.
    """
    file = RunFolder(source).read_model() if source.is_dir() else source
    if as_json:
        print_json(contents.figures(file))
    else:
        print(contents.describe(file, shutil.get_terminal_size((100, 24)).columns))
