"""Peak memory of clustering a weight that fully_shard has split, on 1, 2 and 4 processes of this machine's CPU.

python -m benchmarks.sharded            a layer of 8,388,608 weights (takes some minutes)
python -m benchmarks.sharded --quick    a smoke test on a small layer
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
CONFIGURATIONS = ((8, 1), (4, 4), (8, 8), (8, 3))  # at 8/3 vectors straddle the shards
QUICK_CONFIGURATIONS = ((4, 3),)
SIZE, QUICK_SIZE = 4096, 128


def main(quick: bool) -> str:
    size, counts, rows = (QUICK_SIZE, RANKS[:2], []) if quick else (SIZE, RANKS, [])
    for bits, dim in QUICK_CONFIGURATIONS if quick else CONFIGURATIONS:
        measured = [_launch(ranks, bits, dim, size) for ranks in counts]
        for name, numbers in zip(("forward", "backward"), zip(*measured, strict=True), strict=True):
            rows.append([f"{bits}/{dim}, {name}", *(f"{number / MIB:,.0f}" for number in numbers)])
    header = ["MiB for each process", *(f"{ranks} process" + "es" * (ranks > 1) for ranks in counts)]
    text = f"""

What the clustering of {size * size // 2:,} float32 weights ({size * size * 2 / MIB:,.0f} MiB in all) takes beyond the
shard and, backward, the shard of its gradient; the result is counted.  Peak resident memory, the largest
of all processes."""
    return table(header, rows) + text


def _launch(ranks: int, bits: int, dim: int, size: int) -> list[int]:
    note(f"{bits}/{dim}, processes: {ranks}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, "-m", "benchmarks.sharded", str(bits), str(dim), str(size)],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout)


def _child(bits: int, dim: int, size: int) -> list[int]:
    """The memory of the forward and the backward pass: the largest of all processes."""
    dist.init_process_group("gloo")
    _measure(bits, dim, 64)  # loads libraries
    numbers = torch.tensor(_measure(bits, dim, size))
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    dist.destroy_process_group()
    return numbers.tolist()


def _measure(bits: int, dim: int, size: int) -> list[int]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layer = nn.Linear(size, size // 2, bias=False)
    dkm.cluster_weight(layer, bits=bits, dim=dim, tau=1e-4, eps=0.0, init="random")
    weight = fully_shard(layer).parametrizations.weight
    rows, sharded = weight.original.to_local().detach(), weight[0].sharded
    G = torch.randn_like(rows)
    return [
        peak_extra(lambda: sharded.values(rows, soft=True))[0],
        peak_extra(lambda: sharded.through_clustering(G))[0],
    ]


if __name__ == "__main__":
    if "RANK" in os.environ:
        result = _child(*map(int, sys.argv[1:]))
        if os.environ["RANK"] == "0":
            print(json.dumps(result), flush=True)
        os._exit(0)  # the threads of gloo are sometimes still there when Python ends, and abort the process
    else:
        print(main("--quick" in sys.argv[1:]))
