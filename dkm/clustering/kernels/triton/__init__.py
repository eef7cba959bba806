"""The loop on an NVIDIA GPU: attention never leaves the chip, and the host never waits.

Usually a pass is one launch.  It is several for sharded weights, for gradient="last" and "implicit", for tables of
values, and in Triton's interpreter.

On the host:

    forward_pass.py       the forward pass: memory, arguments, launches
    backward_pass.py      the backward pass
    temperature_pass.py   the gradient of tau, where it is wanted
    value_table.py        d = 1 in 16 bit: the loop on a table of all values
    tiles.py              which way a weight is computed, tile sizes, the number of programs
    groups.py             groups of weights with centroids of their own: both passes
    support.py            what the kernels need: which GPU, which Triton, which weights
    launch.py             launches that take little time
    ahead.py              kernels are compiled together, before they are launched

Compiled by Triton, in `device/`: `forward.py` and `backward.py` hold the two kernels and their iterations, `steps.py`
what both share, `moment.py` the checksum, the step and the temperature of a pass with a state, and `temperature.py` the
kernel for the gradient of tau, which goes by `differences`.  The two call one of three ways to compute attention, which
have a file each; `tiles.py` chooses:

    differences.py   distances as differences.  For d = 1; for d > 1 if there are few centroids or more than 6^d, if the
                     distance is the plain one, or if d > 32
    windows.py       differences with near centroids only.  For d = 1 with at least 2^22 float32 weights and more than
                     32 centroids (`order.py` sorts the weights and finds the windows)
    products.py      matrix products on the tensor cores.  For all other d > 1 (`product_rows.py` explains the rows that
                     are multiplied, `product_tables.py` writes those of centroids, and `frame.py` finds a unit)

For d = 1 in 16 bit with at least 2^20 weights (2^23 for up to 8 centroids), `value_table.py` counts equal weights, runs
the loop by `differences` on the table of values, and looks the results up (`device/value_kernels.py`).

Groups of weights have kernels of their own, `device/groups.py` and `device/group_gradients.py`: a program runs all
iterations of a group.

Results are float32, whatever the dtype of the weight.  Inside, `products` multiplies triples of bfloat16 that add up to
a float32, and `value_kernels` adds gradients as 64-bit integers.

Glossary
--------

These names mean the same in all files of this folder.  A capital name of a size that is an argument of a kernel is
either a compile-time constant or, where the table says so, known at run time.

Sizes:

    N              weights (run time)
    n              vectors, N / d rounded up (run time)
    K              centroids, k elsewhere (run time)
    K_PADDED       K rounded up to whole tiles of BLOCK_K; for windows one tile more (run time)
    D              values per vector, d elsewhere
    D_PADDED       D rounded up to a power of two
    D_SEGMENT      columns of a segment of a row of `products`: D_PADDED, and at least 8
    ROW_WIDTH      D + 1 rounded up to a power of two; for `products` at least D_SEGMENT
    BLOCK_K        centroids of a tile
    BLOCK_N        vectors of a tile
    K_TILES        tiles of centroids: K / BLOCK_K rounded up
    PARTIAL_ROWS   rows of `partial` (run time)
    GROUP_K        centroids that a program takes at once where it works on centroids only, without vectors
    FOLD_ROWS      rows of `partial` that are read at once
    WINDOWS_TILE   weights that `windows` puts in order together; 0 if the way is another one
    PART           weights that have a window of their own: 32, those of a warp
    program        the number of this program; `programs` is how many there are (run time)

Compile-time flags:

    PRODUCTS       the way is `products`; otherwise it is `windows` if WINDOWS_TILE > 0, else `differences`
    EUCLIDEAN      the plain distance instead of the squared one
    STATEFUL       the pass starts from a state (`backend.State`), which it brings up to date
    CHANNELS_LAST  the weights are in channels-last order: `channels` values for each of `pixels` places
    COUNTS         every weight counts `counts` times: the weights are a table of values
    PHASE          which part of a pass this launch does; see `device/steps.py`
    UPDATE         the gradient goes through C' = (A^T W) / mass; otherwise through W_tilde = A C
    SUM_DC         add up what the centroids receive
    ADD_TO_DW      add up dW on the way, instead of in a last walk through all iterations
    WANT_DC        the gradient of the first centroids is asked for

Offsets are called `offs`, with the axis they run along: `offs_n` (vectors), `offs_k` (centroids), `offs_d`
(coordinates).  Addresses are called `ptrs`.

Tensors.  A small letter is a tile, in registers, of the tensor with the capital letter: w of W, g of G, c of C.

    W, W_tilde        (N,): the weight and its clustering
    G, dW             (N,): the gradients of W_tilde and W
    counts            (N,): how often each weight counts, if COUNTS
    C, C_next         (k, d): centroids before and after an iteration; c' in formulas is a row of C_next
    A, dA             attention, `softmax(-distance / tau)` over the centroids, and its gradient
    numerators        2^(logit - largest logit of the vector), so that A = numerators / denominator
    dlogits           A (dA - mean of dA), the gradient of the logits but for the factor `slope`
    mass              (k,): the attention that a centroid receives from all vectors
    dC, H             (k, d): the gradient of the centroids that an iteration made, and H = dC / mass; rows are h
    trail             (max_iter + 1, k, d + 1): see `Trace`; the last column is the mass
    trail_gradients   (max_iter + 1, k, d): the gradients of the rows of the trail
    H_slots           several H, one per slot; see `device/backward.py`
    partial           (PARTIAL_ROWS, K_PADDED, d + 1): sums over the vectors of a program, for each centroid
    frame             (D_SEGMENT + 1,): the origin and the unit of `products`, in the first row of its workspace
    workspace         the logit tables of `products` (`product_rows.py` explains their rows), or for `windows` the order
                      of a tile and the windows of its parts (`device/order.py`)
    progress          (4 + max_iter,): the notes of the passes, in words of 4 bytes

                      0, 1   checksum of the weight, one int64
                      2      counter of the forward pass's barrier, int32
                      3      counter of the backward pass's barrier, int32; zero after a forward pass
                      4 ...  per iteration, how far a centroid has moved at most, float32

Numbers:

    scale    log2(e) / tau: a logit in units of log 2 is -distance * scale
    slope    2 / tau, or 1 / tau for the plain distance: the factor of a gradient through the distance
    t        an iteration; it starts from row t of the trail and makes row t + 1
    used     how many iterations were used; W_tilde is made from row used - 1
    share    1 / denominator, times `counts`; zero for vectors that do not exist
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...options import ClusterOptions
from ..backend import Gradients, Reduce, State, Trace
from . import support
from .backward_pass import BackwardPass
from .forward_pass import ForwardPass
from .groups import backward_groups, fits_groups, forward_groups
from .launch import expect, written_down
from .temperature_pass import temperature_gradient
from .tiles import INTERPRETED, by_value_table
from .value_table import look_up, look_up_gradient, population

__all__ = [
    "advance",
    "backward",
    "backward_groups",
    "can_advance",
    "fits",
    "fits_groups",
    "forward",
    "forward_groups",
    "rehearse",
]


def fits(W: Tensor, d: int) -> bool:
    """Whether these kernels are for this weight, and run with this Triton."""
    return support.runs_here() and support.computes(W, d)


def forward(
    W: Tensor, C: Tensor, tau: Tensor, options: ClusterOptions, reduce: Reduce | None = None
) -> tuple[Tensor, Trace]:
    """W_tilde `(N,)` and the trace; see `backend.Backend`."""
    support.check(W, C)
    if not by_value_table(W, *C.shape):
        return ForwardPass(W, C, tau, options, reduce=reduce).run()
    found = population(W)
    table, trace = ForwardPass(found.values, C, tau, options, counts=found.counts, reduce=reduce).run()
    return look_up(W, table), trace


def backward(
    G: Tensor,
    W: Tensor,
    tau: Tensor,
    trace: Trace,
    options: ClusterOptions,
    *,
    reduce: Reduce | None = None,
    centroids: bool = True,
    temperature: bool = False,
) -> Gradients:
    """From the gradient of W_tilde to those of W and, where asked for, of the centroids and of tau; see
    `backend.Backend`."""
    _, k, columns = trace.trail.shape
    if not by_value_table(W, k, columns - 1):
        whole = BackwardPass(G, W, tau, trace, options, reduce=reduce, centroids=centroids)
        gradients = whole.run()
        trail_gradients = whole.trail_gradients
    else:
        # The gradient of a weight w is g * slope(w) + offset(w).  The offsets come through the updates of the
        # centroids, to which equal weights contribute with the sum of their gradients; the slopes are the derivative of
        # W_tilde for fixed centroids.  Both are functions of the value alone, so they are computed on the table.
        found = population(W, G)
        assert found.gradients is not None
        through_updates = BackwardPass(
            found.gradients,
            found.values,
            tau,
            trace,
            options,
            counts=found.counts,
            reduce=reduce,
            centroids=centroids,
            output=False,
        )
        offsets, dC, _ = through_updates.run()
        gradients = Gradients(look_up_gradient(W, G, through_updates.slopes(), offsets), dC)
        trail_gradients = through_updates.trail_gradients
    if temperature:
        dtau = temperature_gradient(G, W, tau, trace, trail_gradients, options)
        gradients = gradients._replace(dtau=dtau)
    return gradients


def rehearse(step: Callable[[], None]) -> None:
    """Let the kernels that `step` launches be compiled together when one of them is needed; see
    `backend.CompiledBackend`."""
    if INTERPRETED:  # nothing is compiled, and launches cannot be written down
        return
    with written_down() as launches:
        step()
    expect(launches)


def can_advance(W: Tensor, C: Tensor) -> bool:
    """Whether one launch is enough: not where a table of all values is made, which takes launches of its own."""
    return not by_value_table(W, *C.shape)


def advance(
    W: Tensor, state: State, options: ClusterOptions, *, channels: int = 1, pixels: int = 1
) -> tuple[Tensor, Tensor, Trace]:
    """`forward` from a state, which is brought up to date in place: W_tilde `(N,)`, tau and the trace."""
    support.check(W, state.C)
    tau = torch.empty((), device=W.device)
    W_tilde, trace = ForwardPass(W, state.C, tau, options, state=state, channels=channels, pixels=pixels).run()
    return W_tilde, tau, trace
