"""The passes over groups, as the host sees them: memory, arguments and launches of `device/groups.py` and
`device/group_gradients.py`.  A pass is one launch, and a group is one program."""

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from ...groups import Grouping
from ...options import ClusterOptions
from .. import blocked_groups
from ..backend import Gradients, GroupTrace
from ..reference import no_mass
from . import support
from .device.group_gradients import backward_groups_kernel
from .device.groups import forward_groups_kernel

MAX_K, MAX_D, MAX_WEIGHTS = 256, 16, 2**16  # of a group
NO_MASS = no_mass(torch.float32)


def fits_groups(W: Tensor, k: int, grouping: Grouping) -> bool:
    """Whether these kernels are for these groups: up to 256 centroids, d up to 16, and up to 2^16 weights in each."""
    small = k <= MAX_K and grouping.dim <= MAX_D and grouping.weights <= MAX_WEIGHTS
    return small and support.runs_here() and support.computes(W, grouping.dim)


def forward_groups(
    W: Tensor, C: Tensor, tau: Tensor, grouping: Grouping, options: ClusterOptions
) -> tuple[Tensor, GroupTrace]:
    """W_tilde `(N,)` and the trace; see `backend.GroupedBackend`."""
    groups, k, d = C.shape
    support.check(W, C[0])
    W = W.contiguous()
    constants = choose_constants(grouping, k, options.metric)
    W_tilde = torch.empty_like(W)
    trail = torch.empty(groups, options.max_iter + 1, k, d, device=W.device)
    iterations = torch.empty(groups, dtype=torch.int64, device=W.device)
    forward_groups_kernel[(groups,)](
        W=W,
        C=C.float().contiguous(),
        tau=tau.float().contiguous(),
        W_tilde=W_tilde,
        trail=trail,
        iterations=iterations,
        **_common(W, grouping, k, constants),
        eps=float(options.eps),
        no_mass=NO_MASS,
        max_iter=options.max_iter,
        **constants,
    )
    return W_tilde, GroupTrace(iterations, trail)


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
    """dW `(N,)` and, where asked for, dC `(groups, k, d)` and dtau `(groups,)`; see `backend.GroupedBackend`."""
    if options.gradient == "implicit":  # these kernels do not make it
        return blocked_groups.backward_groups(
            G, W, tau, trace, grouping, options, centroids=centroids, temperature=temperature
        )
    groups, rows, k, d = trace.trail.shape
    constants = choose_constants(grouping, k, options.metric)
    W = W.contiguous()
    # In float32, dW is added up on the way; for 16 bit, a last walk needs what the centroids of each iteration receive.
    add_to_dW = W.dtype == torch.float32
    slots = 1 if add_to_dW or rows <= 2 or options.gradient == "last" else rows - 2
    dW = torch.empty_like(W)
    dC = torch.empty(groups, k, d, device=W.device)
    dtau = torch.empty(groups if temperature else 1, device=W.device)
    backward_groups_kernel[(groups,)](
        G=G.contiguous(),
        W=W,
        tau=tau.float().contiguous(),
        trail=trace.trail.contiguous(),
        iterations=trace.iterations,
        dW=dW,
        dC=dC,
        dtau=dtau,
        H=torch.empty(groups, slots, k, d, device=W.device),
        **_common(W, grouping, k, constants),
        H_SLOTS=slots,
        no_mass=NO_MASS,
        max_iter=rows - 1,
        UNROLLED=options.gradient == "unrolled",
        WANT_DC=centroids,
        TEMPERATURE=temperature,
        ADD_TO_DW=add_to_dW,
        **constants,
    )
    return Gradients(dW, dC if centroids else None, dtau if temperature else None)


@functools.lru_cache(maxsize=4096)
def choose_constants(grouping: Grouping, k: int, metric: str) -> dict[str, Any]:
    """The compile-time arguments and options of both kernels."""
    d_padded = triton.next_power_of_2(grouping.dim)
    # A thread holds BLOCK_K centroids, and sums for each of them: as many as fit into its registers.
    block_k = min(max(2, triton.next_power_of_2(k)), 32 if d_padded == 1 else max(4, 64 // d_padded))
    # Threads add up what they have at the end of a walk.  With 16 vectors each, that takes little of the time; with one
    # warp, it needs no shared memory.
    warps = min(8, triton.next_power_of_2(-(-grouping.vectors // (32 * 16))))
    per_lane = min(4, max(1, 16 // (block_k * d_padded)), triton.next_power_of_2(-(-grouping.vectors // (32 * warps))))
    return dict(
        D=grouping.dim,
        D_PADDED=d_padded,
        BLOCK_K=block_k,
        K_TILES=-(-k // block_k),
        PER_LANE=per_lane,
        LANES=32 * warps,
        EUCLIDEAN=metric == "euclidean",
        CONTIGUOUS=grouping.tile_rows == 1 or grouping.tile_columns == grouping.columns,
        ALIGNED=grouping.columns % grouping.dim == 0 and grouping.tile_columns % grouping.dim == 0,
        num_warps=warps,
        num_stages=1,
    )


def _common(W: Tensor, grouping: Grouping, k: int, constants: dict[str, Any]) -> dict[str, Any]:
    """The arguments of both kernels: where the groups are, and memory for sums if there are several tiles."""
    k_padded, several = constants["K_TILES"] * constants["BLOCK_K"], constants["K_TILES"] > 1
    unit = grouping.dim if constants["ALIGNED"] else 1
    tile_columns = grouping.tile_columns // unit
    return dict(
        partial=torch.empty(grouping.count if several else 1, k_padded, grouping.dim + 1, device=W.device),
        rows=grouping.rows,
        columns=grouping.columns // unit,
        tile_rows=grouping.tile_rows,
        tile_columns=tile_columns,
        across=grouping.across,
        n=grouping.vectors,
        K=k,
        K_PADDED=k_padded,
    )
