"""Peak memory of clustering a weight that fully_shard has split, on 1, 2 and 4 processes of this machine's CPU.

python -m benchmarks.sharded            one layer of 8,388,608 weights, and a step of a network of 8 smaller ones
python -m benchmarks.sharded --quick    a smoke test on small layers
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import dkm

from .measure import MIB, peak_extra
from .table import note, table

RANKS = (1, 2, 4)
CONFIGURATIONS = ((8, 1), (4, 4), (8, 8), (8, 3))  # of the last, vectors straddle the shards
QUICK_CONFIGURATIONS = ((4, 3),)
NETWORK = (4, 4)
SIZE, QUICK_SIZE, LAYERS = 4096, 128, 8


def main(quick: bool) -> str:
    size = QUICK_SIZE if quick else SIZE
    rows = []
    for bits, dim in QUICK_CONFIGURATIONS if quick else CONFIGURATIONS:
        measured = [_launch(ranks, "layer", bits, dim, size) for ranks in RANKS]
        rows += _rows(f"one layer, {bits}/{dim}, forward", [forward for forward, _ in measured])
        rows += _rows(f"one layer, {bits}/{dim}, backward", [backward for _, backward in measured])
    bits, dim = NETWORK
    measured = [_launch(ranks, "network", bits, dim, size // 4) for ranks in RANKS]
    rows += _rows(f"{LAYERS} layers, {bits}/{dim}, a step", [ours for ours, _ in measured])
    rows += _rows(f"{LAYERS} layers, not compressed, a step", [plain for _, plain in measured])
    large, small = size * size // 2, size * size // 16
    return (
        table(["MiB for each process", *(f"{ranks} process" + "es" * (ranks > 1) for ranks in RANKS)], rows)
        + f"""

One layer: what the clustering takes beyond the shard of a weight of {large:,} values
({4 * large / MIB:,.0f} MiB in all) and, backward, the shard of its gradient.  Layers: forward and backward of {LAYERS}
of {small:,} values ({4 * small / MIB:,.0f} MiB each), sharded one by one, beyond their shards; what fully_shard
gathers is counted.  Peak resident memory, the largest of all processes."""
    )


def _rows(name: str, numbers: list[int]) -> list[list[str]]:
    return [[name, *(f"{number / MIB:,.0f}" for number in numbers)]]


def _launch(ranks: int, what: str, bits: int, dim: int, size: int) -> list[int]:
    note(f"{what}, {bits}/{dim}, processes: {ranks}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, "-m", "benchmarks.sharded", what, str(bits), str(dim), str(size)],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout)


def _child(what: str, bits: int, dim: int, size: int) -> list[int]:
    """The measurements of one process; the largest of all."""
    dist.init_process_group("gloo")
    _sharded(1, 40, bits, dim)(torch.randn(1, 40)).sum().backward()  # loads libraries
    numbers = torch.tensor((_layer if what == "layer" else _network)(bits, dim, size))
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    dist.destroy_process_group()
    return numbers.tolist()


def _layer(bits: int, dim: int, size: int) -> list[int]:
    weight = _sharded(1, size, bits, dim)[0].parametrizations.weight
    rows, sharded = weight.original.to_local().detach(), weight[0].sharded
    G = torch.randn_like(rows)
    return [
        peak_extra(lambda: sharded.values(rows, soft=True))[0],
        peak_extra(lambda: sharded.through_clustering(G))[0],
    ]


def _network(bits: int, dim: int, size: int) -> list[int]:
    models = _sharded(LAYERS, size, bits, dim), _sharded(LAYERS, size, None, dim)
    x = torch.randn(1, size)
    return [peak_extra(lambda model=model: model(x).sum().backward())[0] for model in models]


def _sharded(count: int, size: int, bits: int | None, dim: int) -> nn.Sequential:
    """Layers from `size` to half of it and back, and so on, all of them with as many weights."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    sizes = [(size, size // 2) if i % 2 == 0 else (size // 2, size) for i in range(count)]
    model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))
    if bits is not None:
        dkm.compress_(model, f"*:{bits}/{dim}", tau=1e-4, eps=0.0, init="random")
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


if __name__ == "__main__":
    if "RANK" in os.environ:
        result = _child(sys.argv[1], *map(int, sys.argv[2:]))
        if os.environ["RANK"] == "0":
            print(json.dumps(result))
    else:
        print(main("--quick" in sys.argv[1:]))
