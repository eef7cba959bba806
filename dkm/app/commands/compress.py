"""dkm compress: the run itself."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import recipes, run, settings
from ..errors import Problem, say
from ..processes import has_several_processes, rank
from ..run_folder import Result, RunFolder
from ..screen import Screen
from .application import command, with_settings

Config = Annotated[Path | None, typer.Option(metavar="FILE", help="a .toml or .yaml file with any of these settings")]
Recipe = Annotated[
    str | None, typer.Option(metavar="NAME", help="one of the paper's configurations; dkm recipes lists them")
]
NoTraining = Annotated[
    bool,
    typer.Option("--no-training", help="k-means of the trained weights and no more: takes seconds, loses accuracy"),
]


@command(
    "compress",
    "dkm compress --model resnet18 --weights resnet18.pth --data images --plan cv:4/4,fc:8/4 --out run",
    "dkm compress --model resnet18 --weights resnet18.pth --data images --target-size 2MB --out small",
    "dkm compress --model bert-folder --data reviews.csv --plan all:3 --no-training --out quick",
    "dkm compress --recipe resnet18-6-8 --weights resnet18.pth --data imagenet --out paper",
    "dkm compress --resume --out run",
)
@with_settings(*settings.FIELDS)
def compress_command(
    given: dict[str, Any],
    config: Config = None,
    recipe: Recipe = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --out, if there is one")] = False,
    no_training: NoTraining = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check and show everything up to the training, and write nothing")
    ] = False,
) -> None:
    """Train a model with clustered weights; write the small file and a report.

    All weights of a layer come to share a few values, so that the file needs only a short code for each weight (or
    for a few weights together) and a small table. The output uses these words:

      plan        which layers become how small. cv:4/4 gives convolutions
                  codes of 4 bits, one for every 4 weights: 1 bit per weight.
                  cv:2 has 2 bits for each weight, all:3 means every layer.
                  fc is the last layer; docs/plan.md has the other words.
      centroids   the values in the table, 2^4 = 16 for codes of 4 bits; in
                  4/4, each is a vector of 4 weights
      train-time  the weights that the network computes with while it trains:
                  soft mixtures of the centroids
      snapped     the weights of the file: each is its nearest centroid
      k-means     the centroids before any training; --no-training stops there
    """
    base = settings.read(recipes.path_of(recipe)) if recipe else {}
    base |= settings.read(config) if config else {}
    given = without_training(given) if no_training else given
    if dry_run:
        _rehearse(given, base, resume)
    else:
        run_and_show(given, base, resume)


def without_training(given: dict[str, Any]) -> dict[str, Any]:
    """The settings that `--no-training` makes of those that were given."""
    if given.get("epochs"):
        raise Problem(f"--no-training and --epochs {given['epochs']} contradict each other: leave one of them out")
    if given.get("reconstruct"):
        raise Problem("--no-training and --reconstruct contradict each other: give --epochs 0 --reconstruct N")
    return given | {"epochs": 0}


def _rehearse(given: dict[str, Any], config: dict[str, Any], resume: bool) -> None:
    chosen, continues = run.prepare(given, config, resume)
    if continues:
        raise Problem(f"--dry-run is about a run that has yet to begin, and there is one in {chosen.out}")
    with Screen() as screen:
        screen.settings(chosen)
        run.rehearse(chosen, screen)


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
