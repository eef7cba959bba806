"""dkm sweep: a run for each of several plans and sizes, methods and seeds, and their comparison."""

import gc
import shlex
import shutil
from typing import Annotated, Any

import torch
import typer

from ...foundation.errors import DKMError, MethodError
from .. import recipes, settings
from ..errors import Problem, reason_of, say
from ..processes import has_several_processes
from ..sweep import SWEPT, Sweep, open_sweep, read_refused
from .application import command, with_settings
from .compress import Config, NoTraining, Recipe, run_and_show, without_training

Methods = Annotated[
    list[str] | None,
    typer.Option(
        rich_help_panel="Clustering",
        metavar="METHOD",
        help="how weights are clustered while they train; a run for each --method; "
        "'quant_noise p=0.2 lr=0.01' gives it options and settings of its own [default: dkm]",
    ),
]
Seeds = Annotated[
    list[int] | None,
    typer.Option(
        rich_help_panel="Running", metavar="N", help="of everything random; a run for each --seed [default: 0]"
    ),
]


@command(
    "sweep",
    "dkm sweep --model resnet18 --weights resnet18.pth --data images --plan all:4/4 --plan all:2 --out runs",
    "dkm sweep --model resnet18 --weights resnet18.pth --data images --target-size 1MB --out runs",
    "dkm sweep --config mine.toml --plan all:2 --method dkm --method 'hard lr=0.01' --seed 0 --seed 1 --out runs",
    "dkm sweep --resume --target-size 2MB --out runs",
)
@with_settings(*(name for name in settings.FIELDS if name not in SWEPT))
def sweep_command(
    given: dict[str, Any],
    plan: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel="Model and data",
            metavar="PLAN",
            help="which layers become how small, 'cv:4/4, fc:8/4'; a run for each --plan; 'bwn=all:1 scaled' is for "
            "the method bwn alone",
        ),
    ] = None,
    target_size: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel="Model and data",
            metavar="SIZE",
            help="1.0MB or 40kB: choose the bits for such a file; a run for each --target-size",
        ),
    ] = None,
    method: Methods = None,
    seed: Seeds = None,
    config: Config = None,
    recipe: Recipe = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the sweep in --out: with what is not finished, or failed")
    ] = False,
    no_training: NoTraining = False,
) -> None:
    """Run dkm compress for several plans, sizes, methods and seeds, and compare the results.

    Each --plan and each --target-size is a run in a folder of its own, with each --method and each --seed. The
    comparison shows the mean of the seeds and their standard deviation. All other flags are those of dkm compress,
    whose help explains the words.
    """
    if has_several_processes():
        raise Problem("dkm sweep runs in one process: launch dkm compress for each plan, and then dkm compare")
    base = settings.read(recipes.path_of(recipe)) if recipe else {}
    base |= settings.read(config) if config else {}
    given = without_training(given) if no_training else given
    swept = {"plan": plan, "target_size": target_size, "method": method, "seed": seed}
    sweep = open_sweep({name: values or [] for name, values in swept.items()}, given, base, resume)
    sweep.write()
    failures = _run_all(sweep)
    _compare(sweep)
    if failures:
        raise Problem(
            f"{len(failures)} of {len(sweep.runs())} runs failed: {', '.join(failures)}; dkm sweep --resume --out "
            f"{shlex.quote(str(sweep.folder))} tries them again"
        )


def _run_all(sweep: Sweep) -> list[str]:
    """Make the runs one after the other; returns the names of those that failed, whose reasons have been said.

    A run that its method cannot make has not failed: the comparison says why it is not there.
    """
    planned, failures = sweep.runs(), []
    refused: dict[str, str] = {}
    again = f"dkm sweep --resume --out {shlex.quote(str(sweep.folder))}"
    for number, each in enumerate(planned, 1):
        print(f"\n=== {number} of {len(planned)}: {each.flags}\n", flush=True)
        try:
            run_and_show(sweep.settings_of(each), {}, resume=True, again=again)
        except (DKMError, OSError) as error:
            if isinstance(error.__cause__, MethodError):
                refused.setdefault(each.folder.name.removesuffix(f"_seed-{each.own.get('seed')}"), str(error))
                print(f"left out: {error}", flush=True)
                continue
            sentence = str(error) if isinstance(error, DKMError) else f"{reason_of(error)}: {error.filename}"
        except torch.OutOfMemoryError:
            sentence = "the GPU has too little memory: give a smaller --batch-size, or --autocast bf16"
        else:
            continue
        finally:
            gc.collect()  # the next run needs the memory of this one
            torch.cuda.empty_cache()
        failures.append(each.folder.name)
        say(f"{each.folder.name}: {sentence}")
    if refused or read_refused(sweep.folder):
        sweep.write_refused(refused)
    return failures


def _compare(sweep: Sweep) -> None:
    """Write and print the comparison, where there is something to compare."""
    from .. import report

    there = [each.folder for each in sweep.runs() if (each.folder / "config.toml").is_file()]
    if len(there) < 2:
        return
    comparison = report.compare([sweep.folder])
    page = report.write_comparison(comparison, sweep.folder)
    print(f"\n{report.comparison_text(comparison, shutil.get_terminal_size((100, 24)).columns)}\n\n{page}")
