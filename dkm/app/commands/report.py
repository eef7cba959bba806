"""dkm report: the report of a run, written again."""

from pathlib import Path
from typing import Annotated

import typer

from ..run_folder import RunFolder
from .application import command


@command("report", "dkm report run", "dkm report runs/cv-4-4")
def report_command(folder: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run")]) -> None:
    """Write the report of a run again, of an unfinished one too."""
    from .. import report

    RunFolder(folder).read_settings()  # Problem where the folder is not that of a run
    print(report.write(folder))
