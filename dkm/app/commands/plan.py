"""dkm plan: what a plan would do."""

import shutil
from typing import Annotated

import typer

from ...plans.plan import plan as make_plan
from .. import models
from ..run_folder import plan_file
from .application import AsJSON, command, print_json


@command(
    "plan",
    "dkm plan resnet18 'cv:4/4, fc:8/4'",
    "dkm plan network.py:network all:3 --classes 10 --json",
)
def plan_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="as for compress --model; its weights are not needed")],
    plan: Annotated[
        str,
        typer.Argument(
            metavar="PLAN",
            help="'cv:4/4, fc:8/4' gives convolutions codes of 4 bits for every 4 weights, and the last layer codes of "
            "8 bits for every 4 weights",
        ),
    ],
    classes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="outputs of the model; without: its own")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="a row for each bias and norm, too, instead of one for all of them")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Show what a plan would do: a row for each tensor, with its bits and bytes.

    In the column b/d, 4/4 means codes of 4 bits for vectors of 4 weights, which is 1 bit per weight and
    2^4 = 16 centroids, the column k. Nothing is trained, and no weights are read.
    """
    made = make_plan(models.model_without_values(model, classes), plan)
    if as_json:
        print_json(plan_file(made, plan))
        return
    print(made.table(shutil.get_terminal_size((100, 24)).columns, fold=not every))
    print(made.summary())
