"""How the clustering loop is computed: the only place that knows devices.

    backend.py     the contract of a backend
    reference.py   the paper, literally: the definition of correct, slow and large
    loop.py        the iterations of the backends that make one pass over all vectors after another, which are:
    native/        CPUs: passes in C, which the user's compiler compiles
    blocked.py     plain PyTorch on any device, in memory proportional to the weight; blocked_groups.py for groups,
                   columns.py its blocks, nodes.py a few places that stand for many single weights
    triton/        NVIDIA GPUs: attention never leaves the chip
    implicit.py    the linear system of gradient="implicit", which the backends share

`reference` is no backend: it materialises the attention and leaves the gradient to autograd.
"""

import functools
import importlib
import importlib.util
from typing import cast

from torch import Tensor

from ..backends import BACKENDS
from .backend import Backend, CompiledBackend, GroupedBackend, StatefulBackend


def choose(impl: str, W: Tensor, d: int) -> Backend:
    """The backend that `impl` names or, for "auto", the first one that is for this weight and dimension."""
    if impl != "auto":
        return _load(impl)
    for name, registered in BACKENDS.items():
        right_device = registered.device in (None, W.device.type)
        if right_device and _is_installed(name) and (backend := _load(name)).fits(W, d):
            return backend
    raise RuntimeError(f"no backend is for a weight of {W.dtype} on {W.device}")


def stateful(backend: Backend) -> StatefulBackend | None:
    """The backend, if it can make a whole step in one launch."""
    return cast(StatefulBackend, backend) if hasattr(backend, "advance") else None


def grouped(backend: Backend) -> GroupedBackend | None:
    """The backend, if it can cluster the groups of a weight in one go."""
    return cast(GroupedBackend, backend) if hasattr(backend, "fits_groups") else None


def compiled(backend: Backend) -> CompiledBackend | None:
    """The backend, if its kernels are compiled at their first launch."""
    return cast(CompiledBackend, backend) if hasattr(backend, "rehearse") else None


@functools.cache
def _load(name: str) -> Backend:
    return cast(Backend, importlib.import_module(f".{name}", __name__))


@functools.cache
def _is_installed(name: str) -> bool:
    package = BACKENDS[name].package
    return package is None or importlib.util.find_spec(package) is not None
