import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: they then run on the CPU

# One thread, here and in the processes that tests start: sums in another order are other sums, so a resumed training is
# bit-equal only with as many threads.  And several workers on few cores would only wait for one another.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

# How long an example takes is a matter of the machine.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:  # it counts what it compiled for all tests of a process together, up to a limit
        torch._dynamo.reset()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, x: Tensor | None = None) -> list[float]:
    """Train towards an output of zero, always with the same input; returns the losses."""
    x, losses = torch.linspace(-1, 1, 48).reshape(2, 24) if x is None else x, []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def log_lines(run: Path) -> int:
    """How many lines the log of a run has."""
    path = run / "log.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_log(alive: Callable[[], bool], run: Path, count: int) -> None:
    """Wait until the log of a run has so many lines, or whoever writes it has ended.  The deadline is for a run that
    hangs; no machine is so slow that a run in order would meet it."""
    deadline = time.monotonic() + 600
    while alive() and log_lines(run) < count and time.monotonic() < deadline:
        time.sleep(0.001)
