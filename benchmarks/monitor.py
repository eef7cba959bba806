"""What `dkm.monitor` costs: the time of a record compared with that of a training step.

    python -m benchmarks.monitor                  on the CPU, with PyTorch's number of threads
    python -m benchmarks.monitor --device cuda

"overhead" is the extra time of a training loop that calls `monitor.record(step)` at every step, with the
default `every`.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import dkm
from experiments.cifar import ResNet

from .measure import DEVICES, alternate, environment
from .table import note, table


def mobilenet_v2() -> nn.Module:
    from torchvision.models import mobilenet_v2  # imported here, because the first row does not need it

    return mobilenet_v2()


# name: the network, a plan, and the images of a step; these are small, so that a step is short
CASES: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...]]] = {
    "ResNet-20, 128 x 32 x 32": (ResNet, "layer*:2/1", (128, 3, 32, 32)),
    "ResNet-20, 128 x 32 x 32, 4/4": (ResNet, "layer*:4/4", (128, 3, 32, 32)),
    "MobileNet-v2, 32 x 96 x 96": (mobilenet_v2, "cv:4/4, fc:4/4", (32, 3, 96, 96)),
}


def measure(build: Callable[[], nn.Module], plan: str, shape: tuple[int, ...], device: str, rounds: int) -> dict:
    """Seconds of a training step, of a call that records, and of a call that does not record."""
    torch.manual_seed(0)
    model = build().to(device)
    dkm.compress_(model, plan, steps=1000, init="random")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    monitor = dkm.monitor(model)
    x, y = torch.randn(shape, device=device), torch.randint(10, shape[:1], device=device)

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    calls = {"step": step, "record": lambda: monitor.record(0), "idle": lambda: monitor.record(1)}
    for call in calls.values():  # warm up
        call()
    return dict(every=monitor.every, **alternate(calls, device, rounds, slow=60.0))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.monitor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=list(DEVICES), default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="the median of so many (%(default)s)")
    arguments = parser.parse_args()
    machine = environment(arguments.device)
    print(f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, {machine['date']}\n")
    rows = []
    for name, case in CASES.items():
        note(name)
        times = measure(*case, arguments.device, arguments.rounds)
        overhead = times["record"] / times["every"] / times["step"] + times["idle"] / times["step"]
        milliseconds = (f"{1e3 * times['step']:.1f}", f"{1e3 * times['record']:.1f}")
        rows.append([name, *milliseconds, str(times["every"]), f"{100 * overhead:.2f} %"])
    print(table(["network", "step, ms", "record, ms", "every", "overhead"], rows))


if __name__ == "__main__":
    main()
