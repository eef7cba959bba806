"""What a user waits for with a whole network: `compress_`, a training step, and an evaluation of 20 batches."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dkm

from .measure import alternate, seconds
from .table import digits, note, ratio, table

PLANS = ["all:2/1", "cv:4/4, fc:8/4", "all:8/8"]
BATCHES = 20  # of the evaluation


def resnet18() -> tuple[nn.Module, tuple[int, ...]]:
    """ResNet-18 with random weights, and the shape of a batch."""
    from torchvision.models import resnet18  # imported here, because a smoke test does not need it

    return resnet18(), (16, 3, 112, 112)


def small() -> tuple[nn.Module, tuple[int, ...]]:
    """A network for a smoke test."""
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), (4, 3, 16, 16)


def run(device: str, quick: bool) -> list[dict]:
    """A row per plan: seconds, next to those of the plain network in the same run."""
    return [_row(small if quick else resnet18, plan, device, 2 if quick else 5) for plan in PLANS]


def _row(build: Callable[[], tuple[nn.Module, tuple[int, ...]]], plan: str, device: str, rounds: int) -> dict:
    note(f"network {plan}")
    torch.manual_seed(0)
    plain, shape = build()
    plain = plain.to(device)
    model = copy.deepcopy(plain)
    row: dict = dict(plan=plan, shape=shape, compress=seconds(lambda: dkm.compress_(model, plan, steps=1000), device))
    x, y = torch.randn(shape, device=device), torch.randint(10, shape[:1], device=device)
    steps = {"plain": _step(plain, x, y), "ours": _step(model, x, y)}
    for call in steps.values():  # warm up
        call()
    row["step"] = alternate(steps, device, rounds, slow=60.0)
    # each evaluation begins after a training step, so it has to snap the weights anew once
    row["evaluation"] = alternate(
        {"plain": lambda: _evaluate(plain, x), "ours": lambda: _evaluate(model, x)}, device, rounds, slow=60.0
    )
    return row


def _step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        model.train()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _evaluate(model: nn.Module, x: Tensor) -> None:
    model.train()
    with torch.no_grad():
        for parameter in model.parameters():  # as an optimizer step would
            parameter.mul_(1 + 1e-7)
    model.eval()
    with torch.inference_mode():
        for _ in range(BATCHES):
            model(x)


def text(rows: list[dict]) -> str:
    """The section as Markdown."""
    header = ["plan", "compress_, s", "step, ms", "of plain", f"{BATCHES} batches of evaluation, ms", "of plain"]
    cells = []
    for row in rows:
        times = [(row[what]["ours"], row[what]["plain"]) for what in ("step", "evaluation")]
        shown = [part for ours, plain in times for part in (digits(1e3 * ours), ratio(ours, plain))]
        cells.append([row["plan"], digits(row["compress"]), *shown])
    batch = " x ".join(map(str, rows[0]["shape"]))
    return "\n".join(
        [
            "### A whole network",
            "",
            table(header, cells),
            "",
            f"ResNet-18 with random weights (a small network with --quick), batches of {batch}, SGD.",
            "The weights change before each evaluation, so each of them snaps the weights anew once.",
        ]
    )
