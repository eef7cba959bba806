"""Tiny compressed models with known centroids: the same values, codes and files on every machine.

The centroids are set, not found, and every weight is near one of them: no clustering, whose last bits depend on the
machine, is involved.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import dkm

GOLDEN = Path(__file__).parents[1] / "formats" / "golden"


def grid(*shape: int, step: float = 0.25, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that float16 and bfloat16 hold exactly, in an order without a simple pattern."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 37 % 101 - 50) * step).reshape(shape).to(dtype)


def set_values(model: nn.Module) -> None:
    """Every parameter and buffer of floating point gets known values; clustered ones are near their centroids."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and "parametrizations" not in name:
                tensor.copy_(grid(*tensor.shape, dtype=tensor.dtype))
        for module in model.modules():
            if isinstance(module, torch.nn.utils.parametrize.ParametrizationList):
                clustered, weight = module[0], module.original
                k, dim = clustered.C.shape
                centroids = grid(k, dim, dtype=clustered.C.dtype)
                vectors = -(-weight.numel() // dim)
                codes = (torch.arange(vectors) * 7 + 3) % k
                clustered.C.copy_(centroids)
                weight.copy_(centroids[codes].reshape(-1)[: weight.numel()].reshape(weight.shape) + 2**-6)


def layers() -> nn.Module:
    """Clustered and kept parameters, running statistics, an integer."""
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 4))
    dkm.compress_(model, "0.weight:2, 2.weight:3/5", tau=1.0)
    set_values(model)
    return model


class Tied(nn.Module):
    """One tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 3)
        self.output = nn.Linear(3, 11)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.embedding(x))


def tied() -> nn.Module:
    """bfloat16; the last vector is longer than what is left of the tensor."""
    model = Tied().bfloat16()
    dkm.compress_(model, "embedding.weight:2/2", tau=1.0)
    set_values(model)
    return model


class Odd(nn.Module):
    """Buffers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3, 7, dtype=torch.float64))
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.large = nn.Parameter(torch.zeros(3))
        self.register_buffer("größe", torch.tensor([3, -1], dtype=torch.int16))
        self.register_buffer("mask", torch.tensor([[True, False, True]]))
        self.register_buffer("bytes", torch.tensor([0, 255], dtype=torch.uint8))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("limits", torch.tensor([float("inf"), -float("inf"), float("nan")]))


def odd() -> nn.Module:
    """float64, shapes of no dimension and of no value, a name beyond ASCII, 16 bits that cannot hold a value."""
    model = Odd()
    dkm.cluster_weight(model, "weight", bits=4, dim=3, tau=1.0)
    limits = model.limits.clone()
    set_values(model)
    with torch.no_grad():
        model.large.copy_(torch.tensor([1e6, 0.5, -2.0]))
        model.limits.copy_(limits)
    return model


def extreme() -> nn.Module:
    """Weights of about 2^-40 and 2^40, which need version 2."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4))
    with torch.no_grad():
        model[0].weight.copy_(grid(3, 5) * 2.0**-40)
        model[1].weight.copy_(grid(4, 3) * 2.0**40)
    dkm.compress_(model, "0.weight:2, 1.weight:3/5", tau="auto", steps=1)
    set_values(model)
    with torch.no_grad():
        for layer in model:
            clustered, weight = layer.parametrizations.weight[0], layer.parametrizations.weight.original
            weight.copy_(clustered.unscaled(weight))
    return model


SAMPLES: dict[str, Callable[[], nn.Module]] = {"layers": layers, "tied": tied, "odd": odd, "extreme": extreme}
