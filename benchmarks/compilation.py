"""Which GPU kernels a training step of a model needs, and what compiling them takes.  It needs no GPU.

    python -m benchmarks.compilation                              # ResNet-50 at cv:8/8, fc:8/4, for sm_90
    python -m benchmarks.compilation --plan all:3/1 --architecture 80
    python -m benchmarks.compilation --list                       # without compiling

Every kernel is compiled by itself, on one core, and not taken from Triton's cache.  Seconds are those of the processor,
as those on the clock of a busy machine say little: `front` is Python to Triton's own language, `middle` the passes on
that, `back` LLVM, and `ptxas` NVIDIA's assembler.  Stack is what registers do not hold, in bytes per thread; `sass` is
how many instructions the kernel has, `loops` how many of them are in innermost loops, and `mma` how many of these are
the tensor cores'.
"""

import argparse
import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from .network import small
from .stand_in import PROCESSORS, stand_in
from .table import digits, note, table

SHOWN = ("D", "K_TILES", "BLOCK_K", "BLOCK_N", "GROUP_K", "FOLD_ROWS", "WINDOWS_TILE", "num_stages")


class Kernel(NamedTuple):
    """One that has to be compiled, and how many weights need it."""

    launch: Any
    weights: int


def build(name: str) -> nn.Module:
    """A model of torchvision, or a small network."""
    if name == "small":
        return small()[0]
    import torchvision  # imported here, because a smoke test does not need it

    return getattr(torchvision.models, name)()


def kernels_of(model: nn.Module, plan: str, **options: Any) -> list[Kernel]:
    """The different kernels of a training step, within `stand_in`."""
    import dkm
    from dkm.clustering.kernels.triton.launch import written_down
    from dkm.modelling.clustered import Clustered
    from dkm.modelling.methods.dkm import DKMClustered

    dkm.compress_(model, plan, steps=100, init="random", impl="triton", **options)
    found: dict[Any, list[Any]] = {}
    for module in model.modules():
        if not isinstance(module, nn.utils.parametrize.ParametrizationList) or not isinstance(module[0], Clustered):
            continue
        assert isinstance(module[0], DKMClustered)
        with written_down() as launches:
            module[0].rehearse(module.original.detach())
        for launch in launches.values():
            found.setdefault(_specialisation(launch), []).append(launch)
    return [Kernel(launches[0], len(launches)) for launches in found.values()]


def _specialisation(launch: Any) -> tuple:
    """What Triton compiles a kernel of its own for."""
    *_, binder = launch.kernel.device_caches[0]
    _, specialisation, options = binder(**launch.arguments)
    return launch.kernel.__name__, tuple(specialisation), str(options)


def compile_one(kernel: Kernel) -> dict[str, Any]:
    """A row of the table: what compiling one kernel took, and what came out."""
    from triton import knobs

    stages: dict[str, float] = {}

    def listener(*, times: Any, cache_hit: bool, **_: Any) -> None:
        assert not cache_hit
        stages.update(front=times.ir_initialization / 1e6, **{k: v / 1e6 for k, v in times.lowering_stages})

    knobs.compilation.listener, before = listener, knobs.compilation.listener
    began, processor, children = time.perf_counter(), time.process_time(), _children()
    try:
        compiled = kernel.launch.kernel.warmup(grid=kernel.launch.grid, **kernel.launch.arguments)
    finally:
        knobs.compilation.listener = before
    wall, own, ptxas = time.perf_counter() - began, time.process_time() - processor, _children() - children
    parts = dict(front=stages["front"], middle=stages["ttir"] + stages["ttgir"], back=stages["llir"] + stages["ptx"])
    share = own / sum(parts.values())  # the stages are measured on the clock
    seconds = {name: share * part for name, part in parts.items()} | dict(ptxas=ptxas, all=own + ptxas, clock=wall)
    return dict(name=kernel.launch.kernel.__name__, seconds=seconds, **machine_code(compiled))


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def machine_code(compiled: Any) -> dict[str, int]:
    """Registers, stack and shared memory of a compiled kernel, and how many instructions it has."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    lines = [line.split("\t")[-1] for line in compiled.asm["sass"].splitlines()[1:]]
    loops = innermost_loops(lines)
    return dict(
        registers=used["REG"],
        stack=used["STACK"],
        shared=compiled.metadata.shared,
        sass=sum(not line.endswith(":") for line in lines),
        loops=sum(len(loop) for loop in loops),
        mma=sum("MMA." in line for loop in loops for line in loop),
    )


def innermost_loops(lines: list[str]) -> list[list[str]]:
    """The instructions of each loop that holds no other loop: from a label to the last branch back to it."""
    labels = {line.rstrip(":"): at for at, line in enumerate(lines) if line.endswith(":")}
    ends: dict[int, int] = {}
    for at, line in enumerate(lines):
        target = labels.get(line.rstrip(";").split()[-1].strip("`()")) if " BRA " in f" {line}" else None
        if target is not None and target < at:
            ends[target] = at
    inner = [
        (first, last)
        for first, last in ends.items()
        if not any(first < other and end <= last for other, end in ends.items() if (other, end) != (first, last))
    ]
    return [[line for line in lines[first : last + 1] if not line.endswith(":")] for first, last in sorted(inner)]


def text(kernels: Iterable[Kernel], rows: list[dict[str, Any]]) -> str:
    """The kernels as Markdown; without rows, only what they are."""
    cells = []
    for kernel in kernels:
        arguments = kernel.launch.arguments
        kind = " ".join(f"{name}={arguments[name]}" for name in SHOWN if name in arguments)
        cells.append([f"{kernel.launch.kernel.__name__.removesuffix('_kernel')} {kind}", str(kernel.weights)])
    header, parts = ["kernel", "weights"], ("front", "middle", "back", "ptxas", "all")
    if rows:
        header += [*parts, "registers", "stack", "shared", "sass", "loops", "mma"]
        for cell, row in zip(cells, rows, strict=True):
            cell += [digits(row["seconds"][part]) for part in parts]
            cell += [str(row[name]) for name in header[-6:]]
    return table(header, cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compilation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="resnet50", help="one of torchvision.models, or small (%(default)s)")
    parser.add_argument("--plan", default="cv:8/8, fc:8/4")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--architecture", type=int, choices=list(PROCESSORS), default=90)
    parser.add_argument("--list", action="store_true", help="only say which kernels there are")
    arguments = parser.parse_args()
    from triton import knobs

    with stand_in(arguments.architecture), tempfile.TemporaryDirectory() as cache:
        knobs.cache.dir = cache
        model = build(arguments.model).to(getattr(torch, arguments.dtype))
        kernels, rows = kernels_of(model, arguments.plan), []
        for kernel in [] if arguments.list else kernels:
            note(f"compiling kernel {len(rows) + 1} of {len(kernels)}")
            rows.append(compile_one(kernel))
    what = f"{arguments.model}, {arguments.dtype}, {arguments.plan}, sm_{arguments.architecture}"
    print(f"{what}: {len(kernels)} kernels")
    print(text(kernels, rows))
    if rows:
        spent = {part: sum(row["seconds"][part] for row in rows) for part in ("all", "clock")}
        print(f"{spent['all']:.1f} s of the processor, {spent['clock']:.1f} s on the clock")


if __name__ == "__main__":
    main()
