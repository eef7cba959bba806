"""The loop for the groups of a weight, compiled: all iterations of a group, then the next group, in each thread."""

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...groups import Grouping
from ...options import ClusterOptions
from ...threads import spread
from ...vectors import compute_dtype
from .. import blocked_groups
from ..backend import Gradients, GroupTrace
from ..reference import no_mass
from .compiling import pointer, required, weight_type

PIECE = 1 << 15  # weights, about, that a thread takes at a time


class _Groups(ctypes.Structure):
    """`Groups` in groups.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("groups", "max_iter")),
        *((name, ctypes.c_double) for name in ("eps", "no_mass")),
        *((name, ctypes.c_void_p) for name in ("tau", "counts")),
    ]


def forward_groups(
    W: Tensor, C: Tensor, tau: Tensor, grouping: Grouping, options: ClusterOptions
) -> tuple[Tensor, GroupTrace]:
    """W_tilde `(N,)` and the trace; see `backend.GroupedBackend`.  Row t of the trail: after t iterations."""
    if options.metric != "sqeuclidean":
        return blocked_groups.forward_groups(W, C, tau, grouping, options)
    dtype = compute_dtype(W.dtype)
    trail = C.new_zeros(grouping.count, options.max_iter + 1, *C.shape[1:], dtype=dtype)
    trail[:, 0] = C
    iterations = torch.empty(grouping.count, dtype=torch.int64)
    V = grouping.split(W)
    V_tilde = torch.empty_like(V, memory_format=torch.contiguous_format)

    def piece(at: slice, call: Callable[..., None]) -> None:
        W_tilde = _as(dtype, V_tilde[at])
        call("dkm_groups", V[at], trail[at], W_tilde, iterations[at])
        V_tilde[at] = W_tilde

    _each(V, tau, grouping, options, dtype, C.shape[1], piece)
    return grouping.join(V_tilde), GroupTrace(iterations, trail)


def backward_groups(
    G: Tensor,
    W: Tensor,
    tau: Tensor,
    trace: GroupTrace,
    grouping: Grouping,
    options: ClusterOptions,
    *,
    centroids: bool = True,
    temperature: bool = False,
) -> Gradients:
    """The gradients of W and, where asked for, of the centroids and of tau; see `backend.GroupedBackend`."""
    if options.metric != "sqeuclidean" or options.gradient == "implicit":
        wanted = dict(centroids=centroids, temperature=temperature)
        return blocked_groups.backward_groups(G, W, tau, trace, grouping, options, **wanted)
    dtype, trail = trace.trail.dtype, trace.trail.contiguous()
    V, upstream = grouping.split(W), grouping.split(G)
    dV = torch.empty_like(V, memory_format=torch.contiguous_format)
    dC, dtau = torch.empty_like(trail[:, 0]), torch.empty(grouping.count, dtype=torch.float64)
    unrolled = ctypes.c_int(options.gradient == "unrolled")

    def piece(at: slice, call: Callable[..., None]) -> None:
        # in float32 for weights of 16 bits, too, because every iteration adds to it
        dW, into = torch.zeros_like(dV[at], dtype=dtype), (dC[at], dtau[at])
        call("dkm_groups_back", V[at], trail[at], _as(dtype, upstream[at]), dW, *into, trace.iterations[at], unrolled)
        dV[at] = dW

    _each(V, tau, grouping, options, dtype, trail.shape[2], piece)
    dtau = (dtau / tau.double().square()).to(dtype)
    return Gradients(grouping.join(dV), dC if centroids else None, dtau if temperature else None)


def _each(
    V: Tensor,
    tau: Tensor,
    grouping: Grouping,
    options: ClusterOptions,
    dtype: torch.dtype,
    k: int,
    piece: Callable[[slice, Callable[..., None]], None],
) -> None:
    """Call `piece` for some groups at a time, with a function that calls one of the library for these.

    That one gets the name, the groups' vectors `(g, n, d)`, and the arguments of the function after the groups.
    """
    library, kind = required(dtype, grouping.dim, "groups.c"), weight_type(dtype)
    tau = tau.to(dtype).contiguous()
    counts = None if grouping.all_count else grouping.counted(V.device).to(torch.uint8).contiguous()
    values = grouping.vectors * grouping.dim
    empty = no_mass(dtype)
    step = max(1, PIECE // values)

    def work(first: int) -> None:
        at = slice(first, min(first + step, grouping.count))

        def call(name: str, vectors: Tensor, *arguments: Tensor | ctypes.c_int) -> None:
            # each stays referenced until the call returns
            vectors, mask = _as(dtype, vectors), None if counts is None else counts[at]
            weight = kind(vectors.data_ptr(), values, grouping.dim, k, grouping.vectors, 0.0, math.log2(empty))
            some = _Groups(len(vectors), options.max_iter, options.eps, empty, pointer(tau[at]), pointer(mask))
            passed = [pointer(X) if isinstance(X, Tensor) else X for X in arguments]
            if getattr(library, name)(ctypes.byref(weight), ctypes.byref(some), *passed):
                raise MemoryError(f"no memory is left to cluster groups of {grouping.vectors} vectors")

        piece(at, call)

    spread(work, range(0, grouping.count, step))


def _as(dtype: torch.dtype, X: Tensor) -> Tensor:
    """X, or a copy of it that is of this dtype and contiguous."""
    return X.to(dtype).contiguous()
