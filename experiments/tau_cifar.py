"""Temperatures compared: CIFAR-10, ResNet-20 (91.73 % uncompressed), first and last layer kept.

    python -m experiments.tau_cifar --data cifar10 --weights resnet20.safetensors --out results.jsonl \\
        --run 2/1:auto:0 --run 2/1:1e-3:0 --run 4/4:learn:0 --run 1/1:geometric:3:0.05:1

A run is BITS/DIM:TAU:SEED; TAU is auto, learn, a number (fixed), or geometric:HOT:COLD, linear:HOT:COLD,
cosine:HOT:COLD or constant:MULTIPLE.  Every run prints a line of JSON with the accuracy after snapping and is
added to --out; runs that are in it are skipped, so several processes may share a file and a list, each with its part.

--data is a folder of *.npz with `x`, `y`, `x_test`, `y_test` (images uint8, n x 32 x 32 x 3), --weights a safetensors
file of `experiments.cifar.ResNet`.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

import dkm
from dkm import jsonl

from .cifar import Cifar10, ResNet


@dataclass(frozen=True)
class Run:
    """What tells one run from another."""

    plan: str
    tau: str
    seed: int
    epochs: float
    batch: int
    optimizer: str
    lr: float

    @classmethod
    def parse(cls, text: str, **options) -> "Run":
        plan, _, rest = text.partition(":")
        tau, _, seed = rest.rpartition(":")
        if not plan or not tau or not seed.isdigit():
            raise ValueError(f"'{text}' is not a run, BITS/DIM:TAU:SEED, for example 4/4:auto:0")
        dkm.temperature.parse(tau)
        return cls(plan, tau, int(seed), **options)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.tau_cifar",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--run", action="append", required=True, metavar="BITS/DIM:TAU:SEED", dest="runs")
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
    except ValueError as error:
        parser.error(str(error))
    torch.backends.cudnn.benchmark = True
    weights, data = safetensors.torch.load_file(args.weights), Cifar10.load(args.data, args.device)
    for run in runs:
        if any(record | asdict(run) == record for record in jsonl.read(args.out)):
            continue
        model = ResNet()
        model.load_state_dict(weights)
        began = time.perf_counter()
        accuracy = train(model.to(args.device), data, run)
        record = asdict(run) | dict(accuracy=round(accuracy, 2), seconds=round(time.perf_counter() - began, 1))
        jsonl.append(args.out, record)
        print(json.dumps(record), flush=True)


def train(model: nn.Module, data: Cifar10, run: Run) -> float:
    """The accuracy after training and snapping."""
    device = data.x.device
    generator = torch.Generator(device).manual_seed(run.seed)
    per_epoch = len(data.x) // run.batch
    steps = max(1, round(run.epochs * per_epoch))
    # a pattern, not `cv`: that would give the small layers 8 bits
    dkm.compress_(model, f"layer*:{run.plan}", tau=dkm.temperature.parse(run.tau), steps=steps, seed=run.seed)
    optimizer = make_optimizer(model, run)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    model.train()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for step in range(steps):  # nothing in here waits for the device
            if step % per_epoch == 0:
                order = torch.randperm(len(data.x), generator=generator, device=device)
            at = step % per_epoch * run.batch
            x, y = data.batch(order[at : at + run.batch], generator)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return data.accuracy(model)


def make_optimizer(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [
        dict(params=[p for p in parameters if p.ndim > 1], weight_decay=1e-4),
        dict(params=[p for p in parameters if p.ndim <= 1], weight_decay=0.0),  # norms, biases, and tau="learn"
    ]
    if run.optimizer == "adam":
        return torch.optim.AdamW(groups, lr=run.lr, fused=True)
    return torch.optim.SGD(groups, lr=run.lr, momentum=0.9, nesterov=True, fused=True)


if __name__ == "__main__":
    main()
