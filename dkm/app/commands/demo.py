"""dkm demo: a run for which the user needs nothing."""

import itertools
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ...foundation.atomic import write_atomically
from .. import demo, settings
from ..errors import Problem
from ..screen import Screen
from .application import command
from .compress import run_and_show


@command("demo", "dkm demo", "dkm demo --out my-first-run")
def demo_command(
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="the folder for all of it, a new one; without: dkm-demo-output"),
    ] = None,
) -> None:
    """Draw 600 pictures, train a network on them, compress it.  Under a minute; needs no data."""
    if out is None:
        names = itertools.chain(["dkm-demo-output"], (f"dkm-demo-{number}-output" for number in itertools.count(2)))
        out = next(path for path in map(Path, names) if not path.exists())
    if out.exists():
        raise Problem(f"{out} exists: choose another folder, --out FOLDER")
    torch.set_num_threads(1)  # the network is small: threads would only wait for one another
    network, weights = f"{out / 'network.py'}:network", out / "dense.safetensors"
    with Screen() as screen:
        screen.note(f"drawing 600 pictures into {out / 'images'}, half of them to measure with")
        demo.make_images(out / "images" / "train", 300)
        demo.make_images(out / "images" / "val", 300, seed=1)
        write_atomically(out / "network.py", demo.NETWORK)
        screen.note("training a small network on them, to have something to compress\n")
        demo.train(network, out / "images", weights)
        given: dict[str, Any] = dict(model=network, weights=str(weights), data=[str(out / "images")], plan=demo.PLAN)
        given |= dict(epochs=5, batch_size=32, lr=6e-3, image_size=demo.SIZE, out=str(out / "run"))
        screen.note(settings.as_command(settings.make(given)) + "\n")
    run_and_show(given, {})
