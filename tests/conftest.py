import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: they then run on the CPU

# Several workers on few cores: more threads each would only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:  # it counts what it compiled for all tests of a process together, up to a limit
        torch._dynamo.reset()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, x: Tensor | None = None) -> list[float]:
    """Towards zero, always with the same input; the losses."""
    x, losses = torch.linspace(-1, 1, 48).reshape(2, 24) if x is None else x, []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def log_lines(run: Path) -> int:
    path = run / "log.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_log(alive: Callable[[], bool], run: Path, count: int) -> None:
    """Until the log of a run has so many lines, or whoever writes it has ended."""
    deadline = time.monotonic() + 600
    while alive() and log_lines(run) < count and time.monotonic() < deadline:
        time.sleep(0.001)
