"""Peak resident memory of the forward and backward pass of one layer.  Each is measured in a process of its own.

That process is this module: `python -m benchmarks.memory ours 8 8 8388608 5 12884901888 2` prints JSON.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch

from . import contenders
from .measure import GIB, MIB, Layer, OutOfMemory, available_memory, memory_limit, peak_extra
from .table import digits, note, table

# bits, dim, iterations
CONFIGURATIONS = [(2, 1, 5), (8, 1, 5), (4, 4, 5), (8, 8, 5), (8, 8, 10), (8, 16, 5), (8, 3, 5)]
QUICK_CONFIGURATIONS = [(4, 3, 5)]
SIZE, QUICK_SIZE = 1 << 23, 1 << 18
LIMIT = 12 * GIB
WARM_UP = 300  # weights


def bound(size: int) -> int:
    """The bytes that the library promises not to exceed."""
    return 3 * 4 * size + 32 * MIB


def run(device: str, quick: bool) -> list[dict]:
    size = QUICK_SIZE if quick else SIZE
    rows = []
    for bits, dim, iterations in QUICK_CONFIGURATIONS if quick else CONFIGURATIONS:
        row = dict(bits=bits, dim=dim, iterations=iterations, size=size, bound=bound(size))
        for name in ("ours", "unrolled"):
            note(f"memory {bits}/{dim}, {iterations} iterations, {name}")
            row[name] = _in_child(name, bits, dim, size, iterations)
        rows.append(row)
    return rows


def _in_child(name: str, bits: int, dim: int, size: int, iterations: int) -> dict:
    limit = min(LIMIT, int(0.85 * (available_memory() or LIMIT)))
    arguments = [name, bits, dim, size, iterations, limit, torch.get_num_threads()]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", *map(str, arguments)],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode < 0:
        return dict(failed=f"ended by signal {-done.returncode}")
    if done.returncode:
        raise RuntimeError(f"the measurement of {name} at {bits}/{dim} failed, see its message above")
    return json.loads(done.stdout)


def _child(name: str, bits: int, dim: int, size: int, iterations: int, limit: int, threads: int) -> dict:
    """One step of one contender in this process."""
    torch.set_num_threads(threads)
    contender = getattr(contenders, name)
    layer = Layer.make(size, bits, dim)
    contender(layer.first(WARM_UP), iterations)()  # loads libraries
    step = contender(layer, iterations)
    try:
        with memory_limit(limit):
            extra, before, how = peak_extra(step)
    except OutOfMemory:
        return dict(failed=f"over {limit / GIB:.0f} GiB")
    # The weight, its copy with gradient, G, and Python with torch are already in memory and do not count.
    assert 3 * 4 * size < before < 3 * 4 * size + 4 * GIB, f"the process had {before / MIB:,.0f} MiB before it began"
    return dict(extra=extra, before=before, how=how)


def text(rows: list[dict]) -> str:
    size = rows[0]["size"]
    header = ["b/d", "iterations", "ours, MiB", "x weight", "promise, MiB", "holds", "unrolled, MiB", "x weight"]
    cells = []
    for row in rows:
        holds = row["ours"].get("extra", row["bound"] + 1) <= row["bound"]
        first, second = _cells(row["ours"], size), _cells(row["unrolled"], size)
        promise = [f"{row['bound'] / MIB:,.0f}", "yes" if holds else "NO"]
        cells.append([f"{row['bits']}/{row['dim']}", str(row["iterations"]), *first, *promise, *second])
    how = {row[name]["how"] for row in rows for name in ("ours", "unrolled") if "how" in row[name]}
    return "\n".join(
        [
            f"### Memory: forward + backward of {size:,} float32 weights ({4 * size / MIB:,.0f} MiB)",
            "",
            table(header, cells),
            "",
            "Peak resident memory beyond what the process held before (the weight and its upstream gradient);",
            f"W~ and dW are counted.  A process each ({', '.join(sorted(how))}).  Promise: 3x the weight + 32 MiB.",
        ]
    )


def _cells(measured: dict, size: int) -> list[str]:
    if "failed" in measured:
        return [measured["failed"], ""]
    return [f"{measured['extra'] / MIB:,.0f}", digits(measured["extra"] / (4 * size))]


if __name__ == "__main__":
    print(json.dumps(_child(sys.argv[1], *map(int, sys.argv[2:]))))
