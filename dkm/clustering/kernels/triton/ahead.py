"""Kernels that a model needs are compiled together, several at the same time, when the first of them is launched.

Triton compiles a kernel when it is launched for the first time.  A training step launches one after the other, and each
takes seconds to compile, on one core.  Most of that time is spent outside of Python, so threads can share it.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch

PATIENCE = 3.0  # seconds after which a line says what takes so long


class Launch(NamedTuple):
    """A launch that was written down instead of made.  Of its tensors only the dtypes are left."""

    kernel: Any  # Triton's
    grid: tuple[int]
    device: torch.device
    arguments: dict[str, Any]


class _Pool(ThreadPoolExecutor):
    """Threads that remember what they were asked for."""

    def __init__(self, threads: int):
        super().__init__(threads)
        self.asked: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.asked.append(future := super().submit(fn, *args, **kwargs))
        return future


def compile_together(launches: Sequence[Launch]) -> int:
    """Compile the kernels of all launches; returns how many different ones were not in this process's memory.

    After an error, which is a warning, the kernels that are missing are compiled when they are launched.  It is the
    same with a Triton that cannot compile in threads.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:
        return 0
    began, shown = time.monotonic(), False
    with _Pool(_threads()) as pool:
        try:
            with AsyncCompileMode(pool):
                for launch in launches:
                    with torch.cuda.device(launch.device):
                        launch.kernel.warmup(grid=launch.grid, **launch.arguments)
                shown = bool(wait(pool.asked, timeout=PATIENCE - (time.monotonic() - began)).not_done)
                if shown:
                    _say(f"compiling {len(pool.asked)} kernels for the GPU, once for this GPU and this version ...")
        except Exception as error:  # whatever Triton raises
            warnings.warn(
                f"compiling the GPU kernels ahead failed, so each is compiled at its first launch: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return len(pool.asked)
    if shown:
        _say(f"compiled in {time.monotonic() - began:.0f} s and kept in Triton's cache, see docs/training.md")
    return len(pool.asked)


def _threads() -> int:
    """As many as there are cores, divided among the processes of a training on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, cores // max(1, int(processes) if processes.isdecimal() else 1))


def _say(text: str) -> None:
    print(f"dkm: {text}", file=sys.stderr, flush=True)
