"""A plan chosen for a size against uniform plans of at most that size: CIFAR-10, ResNet-20 (91.73 % uncompressed).

    python -m experiments.target_cifar --data cifar10 --weights resnet20.safetensors --uniform 40kB
    python -m experiments.target_cifar --data cifar10 --weights resnet20.safetensors --out results.jsonl \\
        --run size=40kB:0 --run "layer*:4/4:0" --run "*:4/4:0" --run size=40kB,rounds=0:0

The first line lists the uniform plans of at most 40 kB, the ones that cost least before training first: those are the
ones to train.  `*:b/d` is every weight, `layer*:b/d` keeps the first and the last layer in 16 bit, and
`all:b/d` has the rule for small tensors, 8/1 for those under 10,000 weights; here that is 65 kB of layers.

A run is PLAN:SEED, where PLAN is a plan's text, or size=SIZE to choose one, on 1,024 training images without labels;
with `,rounds=0` without measuring the whole.  Several runs of one size choose once.  Every run prints a line of JSON
with the accuracy after snapping, as it is and with batch norm's statistics re-estimated, and is added to --out; runs
that are in it are skipped, so several processes may share a file and a list, each with its part.

The training is that of `experiments.tau_cifar`, with tau="auto".
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

import dkm
from dkm import jsonl
from dkm.allocate import CANDIDATES, Loss, parse_size

from .cifar import Cifar10, ResNet
from .tau_cifar import make_optimizer

FORMS = ("*", "layer*", "all")


@dataclass(frozen=True)
class Run:
    """What tells one run from another."""

    plan: str
    seed: int
    epochs: float
    batch: int
    optimizer: str
    lr: float

    @classmethod
    def parse(cls, text: str, **options) -> "Run":
        plan, _, seed = text.rpartition(":")
        if not plan or not seed.isdigit():
            raise ValueError(f"'{text}' is not a run, PLAN:SEED, for example size=40kB:0 or *:4/4:0")
        run = cls(plan, int(seed), **options)
        parse_size(run.size[0]) if run.size else dkm.plan(ResNet(), plan)
        return run

    @property
    def size(self) -> tuple[str, int] | None:
        """The size to choose a plan for and the rounds of doing so, if that is what the run is about."""
        if not self.plan.startswith("size="):
            return None
        size, _, rounds = self.plan.removeprefix("size=").partition(",rounds=")
        return size, int(rounds or 2)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.target_cifar",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--uniform", metavar="SIZE", help="list the uniform plans of at most this size, and end")
    parser.add_argument("--run", action="append", default=[], metavar="PLAN:SEED", dest="runs")
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--lr", type=float, help="the highest rate (default: 0.02 for sgd, 0.001 for adam)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)

    lr = args.lr or dict(sgd=0.02, adam=0.001)[args.optimizer]
    options = dict(epochs=args.epochs, batch=args.batch, optimizer=args.optimizer, lr=lr)
    try:
        runs = [Run.parse(text, **options) for text in args.runs]
        largest = parse_size(args.uniform) if args.uniform else 0
    except ValueError as error:
        parser.error(str(error))
    if runs and args.out is None:
        parser.error("--run needs --out, the file of the results")
    torch.backends.cudnn.benchmark = True
    weights, data = safetensors.torch.load_file(args.weights), Cifar10.load(args.data, args.device)

    def make_model() -> nn.Module:
        model = ResNet()
        model.load_state_dict(weights)
        return model.to(args.device).eval()

    original = make_model()
    images = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))[:1024].to(args.device)
    batches = [data.normalize(data.x[part][:, 4:36, 4:36]) for part in images.split(256)]
    loss = dkm.divergence(original, batches)

    if args.uniform:
        for record in sorted(uniform(make_model, loss, largest), key=lambda record: record["divergence"]):
            print(json.dumps(record), flush=True)
        return

    @cache
    def choose(size: str, rounds: int) -> dkm.Plan:
        began = time.perf_counter()
        plan = dkm.plan(original, size=size, loss=loss, rounds=rounds, candidates=CANDIDATES)
        print(plan, f"chosen in {time.perf_counter() - began:.0f} s", sep="\n", flush=True)
        return plan

    for run in runs:
        if any(record | asdict(run) == record for record in jsonl.read(args.out)):
            continue
        plan = choose(*run.size) if run.size else dkm.plan(original, run.plan)
        model = make_model()
        began = time.perf_counter()
        record = asdict(run) | dict(bytes=plan.bytes, text=plan.text) | train(model, data, plan, run, loss)
        record |= dict(seconds=round(time.perf_counter() - began, 1))
        jsonl.append(args.out, record)
        print(json.dumps(record), flush=True)


def uniform(make_model, loss: Loss, largest: int):
    """Every uniform plan of at most `largest` bytes, with its size and its loss before training."""
    for form in FORMS:
        for bits, dim in CANDIDATES:
            model = make_model()
            plan = dkm.plan(model, f"{form}:{bits}/{dim}")
            if plan.bytes <= largest:
                dkm.compress_(model, plan, tau=1.0)
                yield dict(plan=f"{form}:{bits}/{dim}", bytes=plan.bytes, divergence=round(float(loss(model)), 4))


def train(model: nn.Module, data: Cifar10, plan: dkm.Plan, run: Run, loss: Loss) -> dict[str, float]:
    """The divergence before training, and the accuracies after it, snapped."""
    device = data.x.device
    generator = torch.Generator(device).manual_seed(run.seed)
    per_epoch = len(data.x) // run.batch
    steps = max(1, round(run.epochs * per_epoch))
    dkm.compress_(model, plan, steps=steps, seed=run.seed)
    before = round(float(loss(model)), 4)
    optimizer = make_optimizer(model, run)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    model.train()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for step in range(steps):  # nothing in here waits for the device
            if step % per_epoch == 0:
                order = torch.randperm(len(data.x), generator=generator, device=device)
            at = step % per_epoch * run.batch
            x, y = data.batch(order[at : at + run.batch], generator)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
    accuracy = data.accuracy(model)
    order = torch.randperm(len(data.x), generator=generator, device=device)
    dkm.recalibrate_(model, (data.batch(part, generator)[0] for part in order[:10_000].split(500)))
    recalibrated = data.accuracy(model)
    return dict(divergence=before, accuracy=round(accuracy, 2), recalibrated=round(recalibrated, 2))


if __name__ == "__main__":
    main()
