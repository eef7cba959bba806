"""A small run for the tests: 60 pictures of three classes, a network, and its weights."""

import os
import signal
import sys
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import accelerate
import numpy as np
import PIL.Image
import safetensors.torch
import torch
from conftest import log_lines

from dkm.app import cli, run
from dkm.app.own_code import load_function
from dkm.app.run_folder import Result, RunFolder
from dkm.app.settings import Settings, make
from dkm.foundation import jsonl

NETWORK = """
from torch import nn

def network(classes=3):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1),
        nn.Conv2d(8, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes),
    )
"""
PLAN = "0:3/1, 4:4/2, 7:2"


def make_place(place: Path) -> Path:
    """Fill a folder with what a run needs."""
    rng = np.random.default_rng(0)
    for i in range(60):
        pixels = rng.integers(0, 100, (12, 12, 3), np.uint8)
        pixels[..., i % 3] += 60
        path = place / "images" / "abc"[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(pixels).save(path)
    (place / "network.py").write_text(NETWORK)
    torch.manual_seed(0)
    model = load_function(f"{place / 'network.py'}:network")()
    safetensors.torch.save_file(model.state_dict(), place / "weights.safetensors")
    return place


def settings(place: Path, out: Path, **options) -> Settings:
    given = dict(
        model=f"{place / 'network.py'}:network",
        weights=str(place / "weights.safetensors"),
        data=str(place / "images"),
        plan=PLAN,
        out=str(out),
        epochs=2,
        batch_size=9,
        image_size=12,
        resize=14,
        lr=1e-2,
        device="cpu",
    )
    return make(given | options)


def forget_the_last_run() -> None:
    """Accelerate has one state per process, and the tests have many runs."""
    accelerate.state.AcceleratorState._reset_state(True)


def finish(chosen: Settings) -> Result:
    """Run to the end, from the beginning or from the last checkpoint."""
    forget_the_last_run()
    return run.compress(chosen, resume=RunFolder(Path(chosen.out)).is_run())


def log(folder: Path, kind: str) -> list[dict]:
    return [record for record in jsonl.read(folder / "log.jsonl") if record["kind"] == kind]


def start_process(chosen: Settings, die_at: tuple[int, int] | None = None) -> BaseProcess:
    """The command, in a process of its own; forked, because importing torch takes longer than the run.

    With `die_at` of (lines, calls) it kills itself that many function calls after the log has got that many lines:
    anywhere in a step, an evaluation, the writing of a checkpoint, and on every machine at about the same place.
    """
    arguments = ["compress", "--resume"]
    for name in Settings.__dataclass_fields__:
        value, flag = getattr(chosen, name), f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            arguments += [flag] if value else []
            continue
        for item in value if isinstance(value, tuple) else () if value is None else (value,):
            arguments += [flag, str(item)]

    def target() -> None:
        os.setpgid(0, 0)
        forget_the_last_run()
        if die_at is not None:
            _die(*die_at)
        with open(os.devnull, "w") as nothing, open(Path(chosen.out).with_suffix(".err"), "a") as errors:
            sys.stdout, sys.stderr = nothing, errors
            cli.main(arguments)

    process = get_context("fork").Process(target=target)
    process.start()
    return process


def _die(lines: int, calls: int) -> None:
    def count_down(*event) -> None:
        nonlocal calls
        calls -= 1
        if calls <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    append = jsonl.append

    def append_and_count(path: Path, record: dict) -> None:
        append(path, record)
        if log_lines(path.parent) >= lines:
            sys.setprofile(count_down)

    jsonl.append = append_and_count
    if lines == 0:
        sys.setprofile(count_down)
