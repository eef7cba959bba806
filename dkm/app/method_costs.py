"""What a training step takes with each method, measured here and now on one layer."""

import time
from collections.abc import Callable, Iterable

import torch
from torch import nn

from ..compress import compress_
from ..modelling.methods import METHODS
from ..training.needs import calibrate_, method_loss

WIDTH, EXAMPLES = 768, 256  # a linear layer of WIDTH x WIDTH weights
BITS = 2  # or as many as the method can have
ROUNDS = 5


def measure_steps(names: Iterable[str]) -> dict[str, float]:
    """Milliseconds of a step of SGD on the CPU for each method, and for "" without clustering: the least of some."""
    steps = {name: _step(name) for name in ("", *names)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # the first step sets things up
        step()
    for _ in range(ROUNDS):
        for name, step in steps.items():  # by turns, so that other work on the machine disturbs all of them
            start = time.perf_counter()
            step()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: min(found) for name, found in times.items()}


def _step(name: str) -> Callable[[], None]:
    """A training step with this method."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH)), torch.randn(EXAMPLES, WIDTH)
        if name:
            compress_(model, f"0.weight:{min(BITS, METHODS[name].most_bits)}", method=name, steps=100)
            calibrate_(model, [x])
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean() + method_loss(model)
        loss.backward()
        optimizer.step()

    return step
