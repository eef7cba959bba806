"""dkm compare: several runs next to each other."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from .application import command


@command("compare", "dkm compare runs", "dkm compare run other-run --out comparison.html")
def compare_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="folders of runs, or folders that hold several")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="the page to write; without: comparison.html in the folder that holds the runs"
        ),
    ] = None,
) -> None:
    """Compare runs: a table, and a page with accuracy against size and all curves."""
    from .. import report

    comparison = report.compare(folders)
    page = report.write_comparison(comparison, out)
    print(f"{report.comparison_text(comparison, shutil.get_terminal_size((100, 24)).columns)}\n\n{page}")
