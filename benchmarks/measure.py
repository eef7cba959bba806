"""The layer that is measured, and the instruments: clock, memory, patience."""

import ctypes
import gc
import os
import platform
import resource
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import date
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

import dkm
from dkm.clustering.vectors import to_vectors
from dkm.modelling.clustered import squared_error

MIB, GIB = 1 << 20, 1 << 30

# How to wait until the work on a device is done.  A new device needs an entry here.
DEVICES: dict[str, Callable[[], None]] = {"cpu": lambda: None, "cuda": torch.cuda.synchronize}


@dataclass(frozen=True)
class Layer:
    """A weight of `size` values at bits/dim, and everything that one training step of its clustering needs."""

    bits: int
    dim: int
    W: Tensor  # (size,)
    C: Tensor  # (2**bits, dim)
    G: Tensor  # (size,): the gradient of W_tilde
    tau: float

    @classmethod
    def make(cls, size: int, bits: int, dim: int, device: str = "cpu", seed: int = 0) -> "Layer":
        W = weights(size, seed)
        C = dkm.init_centroids(to_vectors(W[: 1 << 22], dim), 2**bits, seed=seed)  # a part of the weights is enough
        tau = 2 * float(squared_error(to_vectors(W, dim), C))
        G = torch.randn(size, generator=torch.Generator().manual_seed(1000 + seed))
        return cls(bits, dim, W.to(device), C.to(device), G.to(device), tau)

    def double(self) -> "Layer":
        return replace(self, W=self.W.double(), C=self.C.double(), G=self.G.double())

    def first(self, size: int) -> "Layer":
        """The same problem for a part of the weight."""
        return replace(self, W=self.W[:size].clone(), G=self.G[:size].clone())

    @property
    def name(self) -> str:
        return f"{self.bits}/{self.dim}"


def weights(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 0.05


def relative(value: Tensor, truth: Tensor) -> float:
    """|value - truth| / |truth|, in float64."""
    value, truth = value.detach().double().flatten(), truth.detach().double().flatten()
    return float((value - truth).norm() / truth.norm())


# --- time ----------------------------------------------------------------------------------------


def seconds(function: Callable[[], object], device: str) -> float:
    DEVICES[device]()
    start = time.perf_counter()
    result = function()
    DEVICES[device]()
    elapsed = time.perf_counter() - start
    del result  # freeing it is not part of the work
    return elapsed


def alternate(functions: dict[str, Callable[[], object]], device: str, rounds: int, slow: float) -> dict[str, float]:
    """The median seconds of each function.  They run in turns; one that takes more than `slow` seconds runs only twice.

    The caller has warmed them up.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            if len(times[name]) < 2 or min(times[name]) <= slow:
                times[name].append(seconds(function, device))
    return {name: statistics.median(values) for name, values in times.items()}


class OutOfPatience(Exception):
    """A measurement took too long."""


@contextmanager
def patience(limit: float) -> Iterator[None]:
    """Raise OutOfPatience in the code inside after `limit` seconds, between two of its Python statements."""

    def stop(*_):
        raise OutOfPatience

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- memory --------------------------------------------------------------------------------------


def available_memory() -> int | None:
    """The bytes that are available without swapping, or None where the system does not say."""
    try:
        return _kilobytes("/proc/meminfo", "MemAvailable")
    except OSError:
        return None


class OutOfMemory(Exception):
    """An allocation was refused."""


@contextmanager
def memory_limit(extra: int | None) -> Iterator[None]:
    """Raise OutOfMemory where the code inside allocates more than `extra` bytes on top of what is in use now.

    Without a limit the kernel would end this process or another one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        if extra is not None:
            resource.setrlimit(resource.RLIMIT_AS, (_kilobytes("/proc/self/status", "VmSize") + extra, hard))
    except (OSError, ValueError):
        pass  # not Linux: no limit
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error) or "not enough memory" in str(error):
            raise OutOfMemory from None
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def peak_extra(function: Callable[[], object]) -> tuple[int, int, str]:
    """Run the function, and return the peak resident bytes beyond those before, those before, and how it was measured.

    What the allocator wastes between blocks is counted.  With blocks of a few MiB this is much, and it varies from run
    to run.  From 32 MiB on, each block comes from the system directly, and the peak is accurate.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # memory that is freed but still held would hide new allocations
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        how = "VmHWM, reset"
    except OSError:
        how = "peak since the process started"
    before = _peak()
    result = function()
    peak = _peak()
    del result
    return peak - before, before, how


def resident() -> int:
    """The bytes that the process holds now, after giving back what it only keeps for later.  Linux only."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return _kilobytes("/proc/self/status", "VmRSS")


def _peak() -> int:
    """The peak in bytes.  VmHWM is that of this process alone; ru_maxrss may start at the parent's peak."""
    try:
        return _kilobytes("/proc/self/status", "VmHWM")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else peak * 1024


def _kilobytes(path: str, key: str) -> int:
    """The number of bytes in a line `key:  123 kB`."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {key}")


# --- the machine ---------------------------------------------------------------------------------


def environment(device: str) -> dict[str, str]:
    versions = {}
    for package in ("torch", "numpy", "coremltools"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": date.today().isoformat(),
        "device": device,
        "cpu": torch.cuda.get_device_name() if device == "cuda" else _cpu(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "dkm": dkm.__version__,
        **versions,
    }


def _cpu() -> str:
    """The processor's name, with family and model number, which say more where a virtual machine hides the name."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    except (OSError, ValueError):
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name
