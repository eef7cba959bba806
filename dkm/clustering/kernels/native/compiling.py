"""C files as libraries for this processor: compiled by the user's C compiler at first use, and kept."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

from ....foundation.errors import DKMError

FOLDER = Path(__file__).parent
FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math"]
# the first that the compiler knows: this processor's instructions, with their widest registers where there is a choice
TARGETS = [["-march=native", "-mprefer-vector-width=512"], ["-march=native"], ["-mcpu=native"], []]
KNOWN = 8  # up to this dimension the compiler is told it


class CompileError(DKMError, RuntimeError):
    """Raised where there is no library, by what cannot do without one."""


class _Single(ctypes.Structure):
    """`Weight` in vectors.h, for float."""

    _fields_ = [
        ("W", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("N", "d", "k", "chunk")),
        *((name, ctypes.c_float) for name in ("scale", "cutoff", "slope")),
        ("counts", ctypes.c_void_p),
    ]


class _Double(ctypes.Structure):
    """`Weight` in vectors.h, for double."""

    _fields_ = [
        *_Single._fields_[:5],
        *((name, ctypes.c_double) for name in ("scale", "cutoff", "slope")),
        ("counts", ctypes.c_void_p),
    ]


def weight_type(dtype: torch.dtype) -> type[ctypes.Structure]:
    """`Weight` in vectors.h for this dtype, float32 or float64."""
    return _Single if dtype == torch.float32 else _Double


def pointer(X: Tensor | None) -> ctypes.c_void_p:
    """Where the values of a contiguous tensor are; NULL for None."""
    return ctypes.c_void_p(None if X is None else X.data_ptr())


def passes(dtype: torch.dtype, d: int, source: str = "passes.c") -> ctypes.CDLL | None:
    """`passes.c`, or `groups.c`, for float32 or float64 and for this dimension of vectors; or None, see `library`."""
    single = dtype == torch.float32
    dimension = [f"DIM={d}"] if d <= KNOWN else []
    return library(source, f"REAL={'float' if single else 'double'}", f"SINGLE={int(single)}", *dimension)


def required(dtype: torch.dtype, d: int, source: str = "passes.c") -> ctypes.CDLL:
    """`passes`, or an error where there is no library."""
    found = passes(dtype, d, source)
    if found is None:
        raise CompileError(
            'impl="native" needs a C compiler (cc, gcc or clang), and DKM_COMPILE other than 0; or use impl="auto"'
        )
    return found


@functools.cache
def library(source: str, *defines: str) -> ctypes.CDLL | None:
    """A C file of this folder, compiled with these macros.

    None if that is switched off by `DKM_COMPILE=0`, if there is no compiler, or if it failed, of which there is a
    warning.
    """
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler, FOLDER / source, [f"-D{define}" for define in defines])))
    except (CompileError, OSError) as error:
        warnings.warn(
            f"dkm clusters in plain PyTorch, which takes several times as long, because its C code could not be "
            f"compiled: {error}.  DKM_COMPILE=0 does so without this warning.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _compiler() -> str | None:
    if os.environ.get("DKM_COMPILE") == "0" or sys.platform == "win32":
        return None
    chosen = os.environ.get("CC")
    names = [chosen] if chosen else ["cc", "gcc", "clang"]
    return next(filter(None, map(shutil.which, names)), None)


def _compiled(compiler: str, source: Path, defines: list[str]) -> Path:
    """The library's file, from the cache or from the compiler."""
    version = _run([compiler, "--version"])
    texts = [path.read_text(encoding="utf-8") for path in (source, *sorted(FOLDER.glob("*.h")))]
    facts = [*texts, *FLAGS, *map(str, TARGETS), *defines, compiler, version, _processor()]
    name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32] + ".so"
    folder = _folder()
    if not (folder / name).exists():
        # Under another name first: a process that is killed, or another one at the same time, leaves no broken file.
        with tempfile.TemporaryDirectory(dir=folder) as place:
            new = Path(place, name)
            _compile([compiler, *FLAGS, *defines, str(source)], new)
            os.replace(new, folder / name)
    return folder / name


def _compile(command: list[str], new: Path) -> None:
    for target in TARGETS:
        try:
            _run([*command, *target, "-o", str(new)])
            return
        except CompileError:
            if target == TARGETS[-1]:
                raise


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(str(error)) from error
    if done.returncode:
        raise CompileError(f"{command[0]} said: {done.stderr.strip()[-500:]}")
    return done.stdout


def _processor() -> str:
    """What this processor can do: a home folder may be shared by machines of several kinds."""
    described = Path("/proc/cpuinfo")
    if described.exists():
        lines = described.read_text(encoding="utf-8", errors="replace").splitlines()
        kinds = {line for line in lines if line.partition(":")[0].strip() in ("model name", "flags", "Features")}
        return "\n".join(sorted(kinds))
    return f"{platform.machine()} {platform.processor()}"


@functools.cache
def _folder() -> Path:
    """Where libraries are kept: in the user's cache or, if that cannot be written, for this process only."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dkm")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(_temporary().name)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="dkm-")  # kept until the process ends, which removes it
