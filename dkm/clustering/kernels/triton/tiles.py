"""Which way a weight is computed, how large the tiles are, and how many programs share the work.

The numbers are measured on an H200.  `Tiles.constants` uses the names of the glossary in `triton/__init__.py`.
"""

import functools
import os
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .device.order import PART
from .device.product_rows import SEGMENTS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# From this many 16-bit weights on, it pays to make a table of all values; the second number is for few centroids.
VALUE_TABLE, VALUE_TABLE_FOR_FEW, FEW_CENTROIDS = 1 << 20, 1 << 23, 8
# From this many float32 weights on, and with more centroids than two windows have, it pays to put the weights in order.
WINDOWS, WINDOW_SIZE = 1 << 22, 16
# With at most FINE^d centroids, `products` is as exact as `differences`.  With more, vectors are so close to their
# centroids that the squared distance is too small a difference of products.  That is so for d = 2, and for d = 3 or 4
# with many centroids.
FINE = 6
# Where programs share rows of partial sums, there are at least this many rows.
SHARED_ROWS = 8


def by_value_table(W: Tensor, k: int, d: int) -> bool:
    """Whether it pays to run the loop on a table of all values.

    Processes that hold shards of one weight may decide differently.  That is safe: with and without a table, they call
    the all-reduce equally often, with sums of the same shape.
    """
    return d == 1 and W.element_size() == 2 and W.numel() >= (VALUE_TABLE if k > FEW_CENTROIDS else VALUE_TABLE_FOR_FEW)


def by_windows(W: Tensor, k: int, d: int, metric: str) -> bool:
    """Whether it pays to look at near centroids only.  Processes that hold shards of one weight may differ in this,
    too."""
    enough = k > 2 * WINDOW_SIZE and WINDOWS <= W.numel() < 1 << 30  # below 2^31, as indices go past the last weight
    return enough and d == 1 and W.dtype == torch.float32 and metric == "sqeuclidean"


class Problem(NamedTuple):
    """What the choice depends on."""

    N: int  # weights
    k: int  # centroids
    d: int  # values per vector
    euclidean: bool  # the plain distance
    counts: bool  # the weights are values, each of which counts several times
    windows: bool  # see `by_windows`
    backward: bool  # which pass
    deterministic: bool  # the same bits every time
    device: torch.device


class Tiles(NamedTuple):
    """The choice."""

    n: int  # vectors
    k_padded: int  # centroids, rounded up to whole tiles; for windows, one tile more
    programs: int
    partial_rows: int  # rows of partial sums: one per program that has vectors, or fewer, which programs then share
    constants: dict[str, Any]  # compile-time arguments and options of the kernels


class Scratch(NamedTuple):
    """Memory that a pass needs."""

    partial: Tensor  # (partial_rows, k_padded, d + 1)
    workspace: Tensor  # of `products` the frame and the logit tables, of `windows` the orders and windows, or nothing


class _Way(NamedTuple):
    """One of the ways to compute attention, with its numbers."""

    BLOCK_K: int
    BLOCK_N: int
    per_processor: int  # programs that run on one processor of the GPU
    registers: int | None  # the most registers per thread that let so many programs run; None: no limit
    stages: int = 1  # tiles that are read ahead


def describe(W: Tensor, k: int, d: int, metric: str, *, counts: bool, backward: bool) -> Problem:
    """The problem of a pass over W `(N,)` with centroids `(k, d)`."""
    return Problem(
        N=W.numel(),
        k=k,
        d=d,
        euclidean=metric == "euclidean",
        counts=counts,
        windows=not counts and by_windows(W, k, d, metric),
        backward=backward,
        # The forward pass is always deterministic.  For the backward pass PyTorch's own setting decides.
        deterministic=not backward or torch.are_deterministic_algorithms_enabled(),
        device=W.device,
    )


@functools.lru_cache(maxsize=4096)
def choose_tiles(problem: Problem) -> Tiles:
    """The tiles for a problem.  Cached: a network asks for every weight at every step."""
    k, d = problem.k, problem.d
    n = -(-problem.N // d)
    d_padded = triton.next_power_of_2(d)
    d_segment = max(8, d_padded)
    # beyond 32 dimensions, the tables of products do not fit into the shared memory
    products = 1 < d <= 32 and not problem.euclidean and d_padded * _padded(k) > 64 and k <= FINE**d
    if products:
        way = _products(problem, d_segment)
    elif problem.windows:
        way = _windows(problem)
    else:
        way = _differences(k, d)
    row_width = triton.next_power_of_2(d + 1)
    if products:
        row_width = max(d_segment, row_width)
    windows_tile = (256 if INTERPRETED else 8192) if problem.windows else 0
    k_tiles = -(-k // way.BLOCK_K)
    k_padded = (k_tiles + problem.windows) * way.BLOCK_K  # a window may begin at any centroid, also near the last
    tiles = max(1, -(-n // max(windows_tile, way.BLOCK_N)))
    programs = _programs(problem.device, way, tiles, k_padded if products and k_tiles > 1 else 0)
    group_k, fold_rows = _fold(products, programs, k_padded, row_width)
    constants = dict(
        PRODUCTS=products,
        EUCLIDEAN=problem.euclidean,
        COUNTS=problem.counts,
        D=d,
        D_PADDED=d_padded,
        D_SEGMENT=d_segment,
        ROW_WIDTH=row_width,
        BLOCK_K=way.BLOCK_K,
        BLOCK_N=way.BLOCK_N,
        K_TILES=k_tiles,
        WINDOWS_TILE=windows_tile,
        GROUP_K=group_k,
        FOLD_ROWS=fold_rows,
        num_warps=4,
        num_stages=way.stages,
    )
    if way.registers is not None and not INTERPRETED:
        constants["maxnreg"] = way.registers
    partial_rows, row = min(tiles, programs), k_padded * (d + 1)
    # In the backward pass, the sums for a small weight would take a good part of the memory that the weight itself
    # takes.  In the forward pass there is room for them.
    may_share = products and problem.backward and not problem.deterministic
    if may_share and partial_rows * row > problem.N // 20:
        partial_rows = min(partial_rows, max(SHARED_ROWS, problem.N // 48 // row))
    return Tiles(n, k_padded, programs, partial_rows, constants)


def choose_temperature_tiles(W: Tensor, k: int, d: int) -> tuple[int, dict[str, int]]:
    """The number of programs and the constants for `device/temperature.py`, which goes by differences."""
    way = _differences(k, d)
    programs = _programs(W.device, way, max(1, -(-W.numel() // (d * way.BLOCK_N))), 0)
    constants = dict(
        D=d,
        D_PADDED=triton.next_power_of_2(d),
        BLOCK_K=way.BLOCK_K,
        BLOCK_N=way.BLOCK_N,
        K_TILES=-(-k // way.BLOCK_K),
        num_warps=4,
    )
    return programs, constants


def allocate(tiles: Tiles, device: torch.device, levels: int) -> Scratch:
    """The memory for a pass.  `levels` is how many iterations have a logit table, or windows, at the same time."""
    constants = tiles.constants
    partial = torch.empty(tiles.partial_rows, tiles.k_padded, constants["D"] + 1, device=device)
    if windows_tile := constants["WINDOWS_TILE"]:
        per_program = windows_tile // 2 + windows_tile // PART.value * levels
        return Scratch(partial, torch.empty(tiles.programs * per_program, device=device))
    # The first row is for the frame of the tables.  It remains without tables: a kernel wants a pointer even where it
    # does not use it.
    rows = 1 + levels * tiles.k_padded if constants["PRODUCTS"] else 1
    width = SEGMENTS.value * constants["D_SEGMENT"]
    return Scratch(partial, torch.empty(rows, width, dtype=torch.bfloat16, device=device))


def is_hopper(device: torch.device) -> bool:
    """Whether this is a Hopper GPU, for whose shared memory the numbers of `_products` are."""
    return INTERPRETED or torch.cuda.get_device_properties(device).major == 9


def _padded(k: int) -> int:
    return max(2, triton.next_power_of_2(k))


def _products(problem: Problem, d_segment: int) -> _Way:
    """`device/products.py`.  The tensor cores take at least 64 rows at once.  The more programs run on a processor, the
    better they hide one another's waiting."""
    if not is_hopper(problem.device):
        return _Way(64, 64, per_processor=1, registers=None)
    # as many as there is room for; with one tile of centroids, it is the vectors that are read ahead
    stages = 1 if d_segment == 16 and problem.k <= 64 else 3 - problem.backward - (d_segment > 8)
    if d_segment == 8 or (d_segment == 16 and not problem.backward):
        return _Way(64, 64, per_processor=3, registers=168, stages=stages)
    return _Way(64, 64, per_processor=2 if d_segment == 16 else 1, registers=None, stages=stages)


def _windows(problem: Problem) -> _Way:
    """`device/windows.py`."""
    block_n = 64 if INTERPRETED else 128
    if problem.backward:
        return _Way(WINDOW_SIZE, block_n, per_processor=3, registers=168)
    return _Way(WINDOW_SIZE, block_n, per_processor=4, registers=128)


def _differences(k: int, d: int) -> _Way:
    """`device/differences.py`.  A thread holds whole columns of a tile, which must fit into its registers."""
    block_k, d_padded = _padded(k), triton.next_power_of_2(d)
    if d > 1:
        block_k = min(block_k, max(2, 128 // d_padded))
    elif block_k > 32:
        block_k = 16
    return _Way(block_k, 128 * max(1, min(8, 64 // (block_k * d_padded))), per_processor=2, registers=None)


def _programs(device: torch.device, way: _Way, tiles: int, k_shared: int) -> int:
    """How many programs share `tiles` tiles of vectors and, if there are few of these, `k_shared` centroids."""
    # as many as are on the chip at the same time
    processors = 3 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
    resident = processors if INTERPRETED else way.per_processor * processors
    working = -(-tiles // -(-tiles // resident))  # so that all take equally many tiles, or one less
    return max(working, min(k_shared // 4, resident))


def _fold(products: bool, programs: int, k_padded: int, row_width: int) -> tuple[int, int]:
    """GROUP_K and FOLD_ROWS: all programs take part in the sums over programs, and each reads as much at once as fits
    into its registers."""
    if INTERPRETED:
        return 64, 4
    if products:
        return (1, 256) if programs >= k_padded else (4, 64)
    return 4, min(512, 1024 // row_width)
