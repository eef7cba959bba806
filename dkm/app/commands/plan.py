"""dkm plan: what a plan would do, and which plan would be chosen for a size."""

import shutil
from typing import Annotated, Any

import typer

from ...planning import plan as make_plan
from ...plans.rows import Plan
from .. import models, run, settings
from ..errors import Problem
from ..run_folder import plan_file
from ..screen import Screen
from ..tasks import LanguageTask
from .application import AsJSON, command, print_json, with_settings


@command(
    "plan",
    "dkm plan resnet18 'cv:4/4, fc:8/4'",
    "dkm plan network.py:network all:3 --classes 10 --json",
    "dkm plan resnet18 --target-size 2MB --weights resnet18.pth --data images",
)
@with_settings(
    *("target_size", "allocator", "episodes", "weights", "data", "eval_data", "classes", "image_size", "resize"),
    *("augment", "text_columns"),
    *("label_column", "max_length", "batch_size", "workers", "autocast", "device", "seed"),
)
def plan_command(
    given: dict[str, Any],
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="as for compress --model; its weights are needed for --target-size only"),
    ],
    plan: Annotated[
        str | None,
        typer.Argument(
            metavar="PLAN",
            help="'cv:4/4, fc:8/4' gives convolutions codes of 4 bits for every 4 weights, and the last layer codes of "
            "8 bits for every 4 weights",
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="a row for each bias and norm, too, instead of one for all of them")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Show what a plan would do: a row for each tensor, with its bits and bytes.

    In the column b/d, 4/4 means codes of 4 bits for vectors of 4 weights, which is 1 bit per weight and
    2^4 = 16 centroids, the column k. Nothing is trained, and no weights are read.

    With --target-size, --weights and --data: which plan dkm compress would choose for this size. It is measured on the
    data, and nothing is written.
    """
    is_chosen = "target_size" in given
    made = _chosen(model, plan, given, to_stderr=as_json) if is_chosen else _planned(model, plan, given)
    if as_json:
        print_json(plan_file(made, made.text if is_chosen else str(plan)))
        return
    print(made.table(shutil.get_terminal_size((100, 24)).columns, fold=not every))
    print(made.summary())
    if is_chosen:
        print(f"\n--plan '{made.text}'")


def _planned(model: str, plan: str | None, given: dict[str, Any]) -> Plan:
    if plan is None:
        raise Problem(
            "which plan? give one, such as 'cv:4/4, fc:8/4', or --target-size 1.0MB with --weights and --data"
        )
    for name in given:
        if name != "classes":
            raise Problem(f"{settings.flag(name)} is for --target-size: give that as well, or leave it out")
    classes = settings.make({"classes": given.get("classes")}).classes
    return make_plan(models.model_without_values(model, classes), plan)


def _chosen(model: str, plan: str | None, given: dict[str, Any], *, to_stderr: bool) -> Plan:
    """The plan that a run with these settings would choose.  Writes nothing."""
    if not given.get("data"):
        raise Problem("--target-size is chosen by measuring on data: give --data, as for dkm compress, and --weights")
    chosen = settings.make(given, {"model": model, "plan": plan})
    with Screen(to_stderr=to_stderr) as screen, run.stop_requests() as requested:
        stage, built = run.open_stage(chosen, screen)
        stage.stop_requested = requested
        stage.make_order()
        built.eval()
        samples = run.own_texts(stage, built, stage.task.measured_count, screen)
        if samples is not None and isinstance(stage.task, LanguageTask):
            stage.task.use_own_texts(samples)
        return run.choose_plan(stage, built, screen)
