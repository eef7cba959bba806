"""CIFAR-10: the ResNets of He et al. (2016, section 4.2), the data on the device that uses them, and the training.

`--data` is a folder of *.npz files with `x`, `y`, `x_test` and `y_test` (images are uint8, n x 32 x 32 x 3).
`--weights` is a safetensors file of `ResNet`.  Every run prints one line of JSON and appends it to `--out`.  Runs that
are already in that file are skipped, so several processes may share the file and divide a list of runs.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dkm
from dkm.foundation import jsonl

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, with which the weights were trained


class Block(nn.Module):
    """Two convolutions and a shortcut without weights: it takes every second pixel, and zeros for the new channels."""

    def __init__(self, channels: int, out: int):
        super().__init__()
        self.stride, self.extra = out // channels, out - channels
        self.conv1 = nn.Conv2d(channels, out, 3, self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.extra:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra // 2, self.extra // 2))
        return F.relu(x + y)


class ResNet(nn.Module):
    """Images `(n, 3, 32, 32)` -> logits `(n, 10)`.  Depth 20, 32, 44, ..."""

    def __init__(self, depth: int = 20):
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16) for _ in range(blocks)))
        self.layer2 = nn.Sequential(Block(16, 32), *(Block(32, 32) for _ in range(blocks - 1)))
        self.layer3 = nn.Sequential(Block(32, 64), *(Block(64, 64) for _ in range(blocks - 1)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


@dataclass(frozen=True)
class Cifar10:
    """All images on one device, so that training needs no worker, no copy and no waiting."""

    x: Tensor  # (n, 40, 40, 3) uint8, with a black border around the 32 x 32 pixels
    y: Tensor  # (n,) int64
    x_test: Tensor  # (m, 32, 32, 3) uint8
    y_test: Tensor  # (m,) int64
    mean: Tensor  # (3,)
    std: Tensor  # (3,)

    @classmethod
    def load(cls, folder: Path, device: torch.device | str) -> "Cifar10":
        """Read every `*.npz` in the folder, in the order of their names.  Together they hold the arrays `x`, `y`,
        `x_test` and `y_test`; images are uint8 `(n, 32, 32, 3)`."""
        parts: dict[str, list[np.ndarray]] = {name: [] for name in ("x", "y", "x_test", "y_test")}
        for path in sorted(folder.glob("*.npz")):
            with np.load(path) as arrays:
                for name in arrays:
                    parts[name].append(arrays[name])
        if not all(parts.values()):
            raise FileNotFoundError(f"{folder} has no CIFAR-10: it needs *.npz files with x, y, x_test and y_test")
        x, y, x_test, y_test = (torch.from_numpy(np.concatenate(arrays)).to(device) for arrays in parts.values())
        mean, std = (torch.tensor(values, device=device) * 255 for values in (MEAN, STD))
        return cls(F.pad(x, (0, 0, 4, 4, 4, 4)), y.long(), x_test, y_test.long(), mean, std)

    def batch(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Randomly cropped training images, half of them mirrored, and labels: `(b, 3, 32, 32)` float32, `(b,)`."""
        b, device = len(index), index.device
        row, column, mirrored = torch.randint(9 * 9 * 2, (3, b), generator=generator, device=device)
        pixels = torch.arange(32, device=device)
        rows = row[:, None] % 9 + pixels
        columns = column[:, None] % 9 + torch.where(mirrored[:, None] % 2 == 0, pixels, 31 - pixels)
        return self.normalize(self.x[index[:, None, None], rows[:, :, None], columns[:, None, :]]), self.y[index]

    def random_batches(self, number: int, size: int, seed: int) -> Iterable[Tensor]:
        """Batches of training images as the training sees them, without labels."""
        generator = torch.Generator(self.x.device).manual_seed(seed)
        order = torch.randperm(len(self.x), generator=generator, device=self.x.device)
        return (self.batch(part, generator)[0] for part in order[: number * size].split(size))

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """The accuracy on the test images in percent, in evaluation mode."""
        model.eval()
        pairs = zip(self.x_test.split(1000), self.y_test.split(1000), strict=True)
        correct = sum((model(self.normalize(x)).argmax(1) == y).sum() for x, y in pairs)
        return 100 * float(correct) / len(self.y_test)

    def normalize(self, images: Tensor) -> Tensor:
        """`(n, height, width, 3)` uint8 -> `(n, 3, height, width)` float32; it stays channels last in memory."""
        return ((images - self.mean) / self.std).permute(0, 3, 1, 2)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What tells one run from another."""

    plan: str
    seed: int
    epochs: float
    batch: int
    optimizer: str
    lr: float
    eps: float
    max_iter: int

    def steps(self, data: Cifar10) -> int:
        return max(1, round(self.epochs * (len(data.x) // self.batch)))


def arguments(name: str, description: str, run: str) -> argparse.ArgumentParser:
    """The arguments that every experiment takes."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--run", action="append", default=[], metavar=run, dest="runs")
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--lr", type=float, help="the highest rate (default: 0.02 for sgd, 0.001 for adam)")
    parser.add_argument("--eps", type=float, default=1e-4)
    parser.add_argument("--max-iter", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def runs(parser: argparse.ArgumentParser, args: argparse.Namespace, parse: Callable[..., Run]) -> list[Run]:
    """The runs that were asked for; ends the program if one of them cannot be read."""
    if not args.runs and not getattr(args, "uniform", None):
        parser.error("nothing to do: give --run")
    options = {name: getattr(args, name) for name in ("epochs", "batch", "optimizer", "lr", "eps", "max_iter")}
    options["lr"] = args.lr or dict(sgd=0.02, adam=0.001)[args.optimizer]
    if args.runs and args.out is None:
        parser.error("--run needs --out, the file of the results")
    try:
        return [parse(text, **options) for text in args.runs]
    except ValueError as error:
        parser.error(str(error))


def carry_out(todo: Iterable[Run], out: Path, work: Callable[[Run], dict]) -> None:
    """Do each run that is not in the file yet, and write what `work` returns and how long it took."""
    for run in todo:
        if any(record | asdict(run) == record for record in jsonl.read(out)):
            continue
        began = time.perf_counter()
        record = asdict(run) | work(run)
        record |= dict(seconds=round(time.perf_counter() - began, 1))
        jsonl.append(out, record)
        print(json.dumps(record), flush=True)


def load_model(weights: Path, device: torch.device | str) -> nn.Module:
    model = ResNet()
    model.load_state_dict(safetensors.torch.load_file(weights))
    return model.to(device).eval()


def fit(model: nn.Module, data: Cifar10, run: Run) -> float:
    """Train a compressed model and return how many iterations its clusterings took on average.

    On a GPU the training is in bfloat16, and a whole step is one CUDA graph."""
    device, steps = data.x.device, run.steps(data)
    generator = torch.Generator(device).manual_seed(run.seed)
    per_epoch = len(data.x) // run.batch
    optimizer = make_optimizer(model, run)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(model(x), y) + dkm.method_loss(model)
        loss.backward()
        optimizer.step()

    step = dkm.capture(step, optimizer)
    clustered = [module for module in model.modules() if isinstance(module, dkm.Clustered)]
    iterations = torch.zeros((), dtype=torch.int64, device=device)
    model.train()
    for number in range(steps):  # nothing in here waits for the device
        if number % per_epoch == 0:
            order = torch.randperm(len(data.x), generator=generator, device=device)
        at = number % per_epoch * run.batch
        step(*data.batch(order[at : at + run.batch], generator))
        iterations += torch.stack([module.iterations for module in clustered]).sum()
        schedule.step()
    return float(iterations) / steps / len(clustered)


def make_optimizer(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [
        dict(params=[p for p in parameters if p.ndim > 1], weight_decay=1e-4),
        dict(params=[p for p in parameters if p.ndim <= 1], weight_decay=0.0),  # norms, biases, and tau="learn"
    ]
    if run.optimizer == "adam":
        return torch.optim.AdamW(groups, lr=run.lr, fused=True)
    return torch.optim.SGD(groups, lr=run.lr, momentum=0.9, nesterov=True, fused=True)
