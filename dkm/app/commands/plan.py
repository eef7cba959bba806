"""dkm plan: what a plan would do."""

import shutil
from typing import Annotated

import typer

from ...plans.plan import plan as make_plan
from .. import models
from .application import app


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Argument(help="as for compress --model; its weights are not needed")],
    plan: Annotated[str, typer.Argument(help="'cv:4/4, fc:8/4'")],
    classes: Annotated[int | None, typer.Option(min=1, help="outputs of the model; without: its own")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="a row for each bias and norm, too, instead of one for all of them")
    ] = False,
) -> None:
    """What a plan would do: a row for each tensor, with its bits and bytes."""
    made = make_plan(models.model_without_values(model, classes), plan)
    print(made.table(shutil.get_terminal_size((100, 24)).columns, fold=not every))
    print(made.summary())
