"""Every method on equal data, seeds and epochs: CIFAR-10, ResNet-20 (91.73 % uncompressed), first and last layer kept.

    python -m experiments.methods_cifar --data cifar10 --weights resnet20.safetensors --out methods.jsonl --jobs 6
    python -m experiments.methods_cifar --data cifar10 --weights resnet20.safetensors --out held-out.jsonl \\
        --held-out 5000 --run "dkm 1/1 0 tau=1e-3" --run "dkm 1/1 0 tau=3e-3" --run "bwn 1/1 0 lr=0.05"

Without --run these are all runs of the table: each method, with each plan that it can have and the seeds 0, 1 and 2.  A
run is METHOD BITS/DIM SEED, and then options of the method, and `lr=` for a learning rate of its own.  Several runs
are made side by side with --jobs.  What is in --out is not run again, so the command goes on where it was stopped.
Settings are chosen with --held-out: so many images of the training data are kept out of it and measured instead of the
test data.  --images and --test-images take fewer, for a machine without a GPU; what comes out then is another table.

At the end it prints the table: the accuracy of the snapped network with re-estimated batch-norm statistics, the mean of
the seeds and their standard deviation.  Every record also has it without re-estimation.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import torch

import dkm
from dkm.foundation import jsonl
from dkm.foundation.text import table
from dkm.modelling.methods import METHODS, named
from dkm.plans.language import parse_spec

from . import cifar

PLANS = ("3/1", "2/1", "1/1", "4/4", "8/8")
SEEDS = (0, 1, 2)
FIXED = ("tau=1e-3", "tau=3e-3")  # fixed temperatures, as the paper has them
WAYS = (*METHODS, *(f"{method} {tau}" for method in ("dkm", "gumbel") for tau in FIXED))
ENDINGS = {"bwn": " scaled"}  # of the plans of a method that is to be as in its paper: a scale per filter
SHOWN = (8, 64)  # batches of so many images for `dkm.calibrate_`
RECALIBRATED = (20, 500)  # the same for `dkm.recalibrate_`


@dataclass(frozen=True, kw_only=True)
class Run(cifar.Run):
    method: str
    options: str  # NAME=VALUE, with spaces between them
    images: int | None  # of the training; None: all
    test_images: int | None
    held_out: int

    @classmethod
    def parse(cls, text: str, **options: Any) -> "Run":
        method, plan, seed, *own = [*text.split(), "", "", ""][: max(3, len(text.split()))]
        if not seed.isdigit() or not all("=" in word for word in own):
            raise ValueError(f"'{text}' is not a run, METHOD BITS/DIM SEED and NAME=VALUE, for example dkm 4/4 0")
        rates = [float(word.removeprefix("lr=")) for word in own if word.startswith("lr=")]
        words = " ".join(word for word in own if not word.startswith("lr="))
        run = cls(
            method=method, plan=plan, seed=int(seed), options=words, **options | {"lr": [options["lr"], *rates][-1]}
        )
        named(method, dict(steps=1) | run.given)
        parse_spec(plan, text)
        return run

    @property
    def given(self) -> dict[str, Any]:
        """The options of the method."""
        pairs = [word.partition("=") for word in self.options.split()]
        return {name: dkm.temperature.parse(value) if name == "tau" else _value(value) for name, _, value in pairs}

    @property
    def text(self) -> str:
        """The plan in full: a pattern, because `cv` would give the small layers 8 bits."""
        return f"layer*:{self.plan}{ENDINGS.get(self.method, '')}"

    @property
    def cannot(self) -> str:
        """Why the method has no such plan; "" where it has."""
        return METHODS[self.method].cannot(parse_spec(self.plan, self.plan))


def _value(text: str) -> int | float | str:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def main(arguments: list[str] | None = None) -> None:
    parser = cifar.arguments("methods_cifar", __doc__, "'METHOD BITS/DIM SEED'")
    parser.add_argument("--images", type=int, metavar="N", help="train on the first N images only")
    parser.add_argument("--test-images", type=int, metavar="N", help="measure on the first N images only")
    parser.add_argument("--held-out", type=int, default=0, metavar="N", help="measure on N images of the training data")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many runs at a time")
    args = parser.parse_args(arguments)
    if not args.runs:
        everything = [(way.split(), plan, seed) for seed in SEEDS for plan in PLANS for way in WAYS]
        args.runs = [" ".join([method, plan, str(seed), *own]) for (method, *own), plan, seed in everything]
    measured = {name: getattr(args, name) for name in ("images", "test_images", "held_out")}
    runs = cifar.runs(parser, args, lambda text, **options: Run.parse(text, **options, **measured))
    failures = side_by_side([run for run in runs if not run.cannot], args)
    print(as_table(runs, jsonl.read(args.out)))
    for run in dict.fromkeys(dataclasses.replace(run, seed=0) for run in runs if run.cannot):
        print(f"{run.method} at {run.plan}: it {run.cannot}")
    if failures:
        raise SystemExit("\n".join(["these runs failed, the same command tries them again:", *failures]))


def side_by_side(runs: Sequence[Run], args: argparse.Namespace) -> list[str]:
    """Make the runs that are not in the file yet, `args.jobs` at a time.  Returns what became of those that failed."""
    there = jsonl.read(args.out)
    todo = [run for run in runs if not any(record | asdict(run) == record for record in there)]
    failures = []
    context = get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(args.jobs, context, _open, (args,)) as pool:
        waiting = {pool.submit(work, run): run for run in todo}
        for done in as_completed(waiting):
            run = waiting[done]
            if error := done.exception():
                failures.append(f"{run.method} {run.plan} {run.seed} {run.options}: {error}")
                continue
            jsonl.append(args.out, record := asdict(run) | done.result())
            print(json.dumps(record), flush=True)
    return failures


def _open(args: argparse.Namespace) -> None:
    """What a process does before its first run."""
    global _args, _data
    torch.backends.cudnn.benchmark = True
    if args.device == "cpu":
        torch.set_num_threads(1)
    _args, _data = args, divided(cifar.Cifar10.load(args.data, args.device), args)


def divided(data: cifar.Cifar10, args: argparse.Namespace) -> cifar.Cifar10:
    """The images to train with and to measure on."""
    x, y = (part[: len(part) - args.held_out][: args.images] for part in (data.x, data.y))
    x_test, y_test = data.x_test, data.y_test
    if args.held_out:
        x_test, y_test = data.x[-args.held_out :, 4:36, 4:36], data.y[-args.held_out :]
    return dataclasses.replace(data, x=x, y=y, x_test=x_test[: args.test_images], y_test=y_test[: args.test_images])


def work(run: Run) -> dict[str, Any]:
    """What one run finds."""
    began = time.perf_counter()
    model = cifar.load_model(_args.weights, _args.device)
    options = dict(steps=run.steps(_data), eps=run.eps, max_iter=run.max_iter, seed=run.seed) | run.given
    dkm.compress_(model, run.text, method=run.method, **options)
    dkm.calibrate_(model, _data.random_batches(*SHOWN, run.seed))
    cifar.fit(model, _data, run)
    accuracy = _data.accuracy(model)
    dkm.recalibrate_(model, _data.random_batches(*RECALIBRATED, run.seed))
    return dict(
        bytes=dkm.size(model).bytes,
        accuracy=round(accuracy, 2),
        recalibrated=round(_data.accuracy(model), 2),
        seconds=round(time.perf_counter() - began, 1),
    )


def as_table(runs: Iterable[Run], records: Sequence[dict[str, Any]]) -> str:
    """A row for each method, a column for each plan."""
    runs = list(runs)
    plans = list(dict.fromkeys(run.plan for run in runs))

    def cell(way: tuple[str, str, float], plan: str) -> str:
        its = [asdict(run) for run in runs if (run.method, run.options, run.lr, run.plan) == (*way, plan)]
        found = [record["recalibrated"] for record in records for run in its if record | run == record]
        if len(found) < 2:
            return f"{found[0]:.2f}" if found else "-"
        return f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}"

    rows = [["method", *plans]]
    for way in dict.fromkeys((run.method, run.options, run.lr) for run in runs):
        name = " ".join(filter(None, [way[0], way[1], f"lr={way[2]:g}"]))
        rows.append([name, *(cell(way, plan) for plan in plans)])
    return table(rows, "<" + ">" * len(plans), 120)


if __name__ == "__main__":
    main()
