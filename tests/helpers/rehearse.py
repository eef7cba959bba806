"""A program: on a GPU that is not there, whether a training step launches what was expected of it.

    rehearse.py CASE ...   for each case, in JSON, a line with the kernels; then those of a step that is really made

A program of its own, because kernels that were imported for Triton's interpreter cannot be compiled.
"""

import json
import sys
from typing import Any

import torch
from torch import nn

import dkm
from benchmarks.stand_in import stand_in
from dkm.clustering.kernels.triton import ahead, launch, tiles


def network() -> tuple[nn.Module, torch.Tensor]:
    """Weights of two sizes and, in a convolution, of another order in memory."""
    layers = [nn.Conv2d(32, 64, 3), nn.Flatten(), nn.Linear(64, 256), nn.Linear(256, 96), nn.Linear(96, 256)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last), torch.zeros(2, 32, 3, 3)


def check(plan: str, dtype: str, options: dict[str, Any]) -> None:
    """That a step launches the kernels that were expected, and no others."""
    model, x = network()
    model, x = model.to(getattr(torch, dtype)), x.to(getattr(torch, dtype))
    dkm.compress_(model, plan, steps=10, init="random", impl="triton", **options)
    expected = set(launch._expected.pop())
    with launch.written_down() as launches:
        model(x).sum().backward()
    made = set(launches)
    assert expected == made, f"{plan}: {len(expected)} expected, {len(made)} made, {len(expected & made)} both"
    print(*sorted({each.kernel.__name__ for each in launches.values()}))


def check_cluster(**differentiable: bool) -> None:
    """The same of `dkm.cluster`: by the kernels, as the temperature is a tensor of its own."""
    W, C, tau = torch.randn(4096), torch.randn(16, 1), torch.ones(())
    for name, tensor in dict(W=W, C=C, tau=tau).items():
        tensor.requires_grad_(differentiable.get(name, False))
    with launch.written_down() as launches:
        dkm.cluster(W, C, tau=tau, impl="triton").W_tilde.sum().backward()
        assert set(launch._expected.pop()) == set(launches)
        dkm.cluster(W, C, tau=tau, impl="triton")
        assert not launch._expected  # it is known now


def step() -> list[torch.Tensor]:
    """A training step of two equal layers, which compiles what it needs."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    dkm.compress_(model, "all:1/1", steps=10, init="random", impl="triton")
    model(torch.zeros(2, 128)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


if __name__ == "__main__":
    # as for large weights
    tiles.VALUE_TABLE = tiles.VALUE_TABLE_FOR_FEW = tiles.WINDOWS = 1 << 14
    ahead.PATIENCE = -100.0  # say what is done, however quick it is
    with stand_in() as launched:
        for case in sys.argv[1:]:
            check(*json.loads(case))
        check_cluster(W=True)
        check_cluster(C=True, tau=True)
        assert launched == []
        step()
        print(*launched)
