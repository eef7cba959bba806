"""The allocators of a plan for a size, compared: the digits of examples/digits.py, 99.5 % uncompressed.

    python -m experiments.allocators --sizes 19kB 22kB 28kB --seeds 0 1 2

For every seed a network is trained; for every size each allocator chooses a plan for it, with 512 training images and
without labels.  Prints a line for each: the divergence that it was chosen by, the accuracy of the snapped network on
the test images before any training and after a short one, with re-estimated batch-norm statistics, and the seconds
that choosing took.  `measured` is `dkm` with a loss that has no derivatives.
"""

import argparse
import copy
import json
import time

import torch
from torch import nn

import dkm
from dkm.plans.candidates import CANDIDATES
from examples import digits

ALLOCATORS = ("dkm", "measured", "hawq", "haq")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.allocators", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["19kB", "22kB", "28kB"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--allocators", nargs="+", choices=ALLOCATORS, default=ALLOCATORS)
    parser.add_argument("--epochs", type=int, default=12, help="of the uncompressed training")
    parser.add_argument("--short", type=int, default=3, help="epochs of the training after it")
    parser.add_argument("--episodes", type=int, default=300, help="of haq")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data = digits.load_data()
    for seed in args.seeds:
        torch.manual_seed(seed)
        model = digits.network()
        digits.train(model, data, args.epochs, lambda epoch, loss: None)
        loss = dkm.divergence(model.eval(), data.x[:512].split(256))
        print(json.dumps(dict(seed=seed, uncompressed=round(digits.accuracy(model, data), 2))), flush=True)
        for size in args.sizes:
            for name in args.allocators:
                options = dict(allocator=name) if name != "measured" else {}
                options |= dict(episodes=args.episodes) if name == "haq" else {}
                began = time.perf_counter()
                measure = (lambda model: loss(model)) if name == "measured" else loss  # noqa: B023  # used at once
                plan = dkm.plan(model, size=size, loss=measure, candidates=CANDIDATES, seed=seed, **options)
                took = time.perf_counter() - began
                record = dict(seed=seed, size=size, allocator=name, text=plan.text, bytes=plan.file_bytes)
                found = measured(model, plan, data, loss, args.short, seed)
                print(json.dumps({**record, **found, "seconds": round(took, 1)}), flush=True)


def measured(model: nn.Module, plan: dkm.Plan, data: digits.Data, loss, epochs: int, seed: int) -> dict[str, float]:
    """The divergence and the accuracies of a plan."""
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    dkm.compress_(model, plan, steps=max(1, epochs * data.steps), seed=seed)
    divergence = float(loss(model.eval()))
    before = accuracy(model, data)
    if epochs:
        digits.train(model, data, epochs, lambda epoch, loss: None)
    return dict(divergence=round(divergence, 4), snapped=before, trained=accuracy(model.eval(), data))


def accuracy(model: nn.Module, data: digits.Data) -> float:
    """Of a copy of the snapped network, with batch-norm statistics of its own."""
    model = copy.deepcopy(model).eval()
    dkm.recalibrate_(model, data.x.split(digits.BATCH))
    return round(digits.accuracy(model, data), 2)


if __name__ == "__main__":
    main()
