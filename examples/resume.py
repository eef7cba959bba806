"""A training that can be killed at any moment and still ends in the same file, to the last byte.  A few seconds.

    python examples/resume.py --out resume-output      # kill it at any moment, run it again: it continues

A checkpoint holds what the training depends on: the model (its state_dict includes all of dkm's state), the optimizer,
the schedule, the number of steps done, and the state of the random numbers.  It is written to another file and then
renamed, so a checkpoint is either complete or absent.  The bytes are the same on one machine with one number of
threads.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import dkm

PLAN = "0:3/2, 3:4/4, 6:4"
EVERY = 5  # steps between checkpoints


def network() -> nn.Sequential:
    layers = nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.1)
    return nn.Sequential(*layers, nn.Linear(128, 10))


def write(checkpoint: dict, path: Path) -> None:
    """Write a checkpoint such that a kill at any moment leaves either the old one or the new one."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as stream:
        torch.save(checkpoint, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)


def run(out: Path, steps: int, seed: int = 0) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    y = torch.arange(2000) % 10  # there is something to learn: ten patterns, with noise
    x = torch.randn(10, 64)[y] + 2 * torch.randn(2000, 64)

    model = network()  # here you would load your trained weights
    dkm.compress_(model, PLAN, steps=steps)  # the same plan and the same steps every time
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    done, saved = 0, out / "checkpoint.pt"
    if saved.exists():
        checkpoint = torch.load(saved, weights_only=True)  # tensors and numbers only
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
        torch.set_rng_state(checkpoint["random"])
        done = checkpoint["done"]

    model.train()
    while done < steps:
        batch = torch.randint(len(x), (64,))
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        done += 1
        print(f"step {done} of {steps}, loss {loss.item():.4f}", flush=True)
        if done % EVERY == 0:
            state = {"model": model, "optimizer": optimizer, "schedule": schedule}
            checkpoint = {name: thing.state_dict() for name, thing in state.items()}
            write(checkpoint | {"random": torch.get_rng_state(), "done": done}, saved)

    file = out / "model.dkm"
    dkm.save(model, file)
    with torch.no_grad():
        accuracy = (model.eval()(x).argmax(1) == y).double().mean().item()
    print(f"{file}: {file.stat().st_size:,} bytes, {100 * accuracy:.1f} % right")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description="Training that survives being killed.")
    parser.add_argument("--out", type=Path, default=Path("resume-output"), help="folder for the files")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # another number of threads adds in another order, which rounds differently
    run(arguments.out, arguments.steps)


if __name__ == "__main__":
    main()
