"""Shrink a small convolutional network to 2 bits and to 1 bit a weight.  About half a minute on one core.

    python examples/digits.py --out demo-output

The data are the 1,797 handwritten digits that come with scikit-learn.  Writes two .dkm files, a picture of the
weights before and after, and report.html.  The calls of dkm are all in `compress` below.
"""

import argparse
import copy
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import digits_report
import safetensors.torch
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import dkm

PLANS = ("all:2/1", "all:4/4")  # 4 scalars for each layer; 16 vectors of 4 weights: 2 bits and 1 bit a weight
BATCH = 64
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Data:
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch; the last batch may be a small one."""
        return -(-len(self.x) // BATCH)


@dataclass(frozen=True)
class Result:
    """One plan, tried: accuracies on the test images in percent, and what it takes."""

    text: str
    model: nn.Module
    plan: dkm.Plan
    untrained: float  # k-means of the float32 weights, no training
    soft: float  # the weights of training: averages of the centroids
    snapped: float  # the weights of the file: the nearest centroids
    recalibrated: float  # the same, with batch-norm statistics of its own
    loaded: float  # read back from the file
    size: dkm.Plan  # with .file_bytes
    file: Path


def load_data() -> Data:
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    train, test = train_test_split(range(len(y)), test_size=1 / 3, stratify=y, random_state=0)
    return Data(x[train], y[train], x[test], y[test])


def network() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 32, 3, padding=1, bias=False),
            norm1=nn.BatchNorm2d(32),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3, padding=1, bias=False),
            norm2=nn.BatchNorm2d(64),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            conv3=nn.Conv2d(64, 64, 3, padding=1, bias=False),
            norm3=nn.BatchNorm2d(64),
            relu3=nn.ReLU(),
            flat=nn.Flatten(),
            hidden=nn.Linear(64 * 4 * 4, 128),
            relu4=nn.ReLU(),
            classes=nn.Linear(128, 10),
        )
    )


def train(model: nn.Module, data: Data, epochs: int, label: str) -> None:
    """An ordinary training loop.  It does not know about dkm."""
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * data.steps)
    model.train()
    for epoch in range(1, epochs + 1):
        total = 0.0
        for batch in torch.randperm(len(data.x)).split(BATCH):
            loss = F.cross_entropy(model(data.x[batch]), data.y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        progress(label, epoch, epochs, total / len(data.x))


def compress(model: nn.Module, data: Data, text: str, epochs: int, file: Path) -> Result:
    """Everything that dkm adds to a training script."""
    model = copy.deepcopy(model)
    plan = dkm.compress_(model, text, steps=epochs * data.steps)  # in place; the plan has a row for each tensor
    untrained = accuracy(model.eval(), data)
    train(model, data, epochs, text)

    soft = accuracy(with_soft_weights(model), data)
    snapped = accuracy(model.eval(), data)  # evaluation mode: every weight is its nearest centroid
    dkm.recalibrate_(model, data.x.split(BATCH))
    recalibrated = accuracy(model.eval(), data)

    dkm.save(model, file)
    loaded = dkm.load(file, into=network())  # a plain model, with dense weights
    return Result(
        text, model, plan, untrained, soft, snapped, recalibrated, accuracy(loaded.eval(), data), dkm.size(model), file
    )


def with_soft_weights(model: nn.Module) -> nn.Module:
    """Evaluation mode but for the weights: what the network computed while it trained, to compare with."""
    model.eval()
    for module in model.modules():
        if isinstance(module, dkm.Clustered):
            module.train()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    return 100 * (model(data.x_test).argmax(1) == data.y_test).double().mean().item()


def progress(label: str, epoch: int, epochs: int, loss: float) -> None:
    """One line that changes in a terminal; a line for every fifth epoch elsewhere."""
    line = f"{label:<10} epoch {epoch:>2} of {epochs}, loss {loss:.4f}"
    if sys.stdout.isatty():
        print(f"\r{line}\033[K", end="\n" if epoch == epochs else "", flush=True)
    elif epoch % 5 == 0 or epoch == epochs:
        print(line, flush=True)


def run(out: Path, epochs: int = 12, seed: int = 0) -> list[Result]:
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    data = load_data()
    print(f"{len(data.x):,} digits to train on, {len(data.x_test):,} to test with")

    model = network()
    train(model, data, epochs, "float32")
    before = accuracy(model.eval(), data)
    float_file = out / "digits.safetensors"
    safetensors.torch.save_file(model.state_dict(), float_file)

    results = []
    for text in PLANS:
        file = out / f"digits-{text.partition(':')[2].replace('/', '-')}.dkm"
        results.append(compress(model, data, text, epochs, file))

    print(f"\nthe plan {PLANS[-1]}\n{results[-1].plan}\n")
    table = digits_report.table(before, float_file, results, len(data.x_test))
    print(digits_report.as_text(table))
    digits_report.draw(model, results, out / "weights.png")
    digits_report.write_html(table, model, results, out / "report.html", epochs, seed)
    print(f"\n{time.perf_counter() - started:.0f} s; open {out / 'report.html'}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Shrink a small network to 2 bits and to 1 bit a weight.")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the files")
    parser.add_argument("--epochs", type=int, default=12, help="of training, and again of each compression")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the network is small, and the result must not depend on the number of cores
    run(arguments.out, arguments.epochs, arguments.seed)


if __name__ == "__main__":
    main()
