"""What `windows` needs: the weights of a tile in order, and for each part of a tile the window of centroids near to it.

The head of `windows.py` explains tiles, parts and windows, the glossary of `triton/__init__.py` all other names.
"""

import triton
import triton.language as tl

from .differences import FAR, load_centroids

LAST = tl.constexpr(0x7FFFFFFF)  # the key that comes after all others
ZERO = tl.constexpr(127.0)  # 2^-127, and what is smaller, is zero on a GPU
PART = tl.constexpr(32)  # weights of a part: one for each thread of a warp


@triton.jit
def _exchange(x, STRIDE: tl.constexpr):
    """Of two elements STRIDE apart, put the smaller first.  Pairs within a thread or a warp need no shared memory."""
    pairs = tl.reshape(x, (x.numel // (2 * STRIDE), 2, STRIDE))
    other = tl.sum(pairs, 1, keep_dims=True) - pairs
    second = tl.arange(0, 2)[None, :, None] == 1
    return tl.reshape(tl.where((pairs > other) != second, other, pairs), x.shape)


@triton.jit
def put_in_order(W, order, N, program, programs, WINDOWS_TILE: tl.constexpr):
    """Write the order of each of this program's tiles: the places of its weights in the tile, from the smallest weight
    to the largest.  They are in the lowest bits of integers.

    A place overwrites the lowest bits of its weight, and both are sorted as one integer.  Weights that differ only in
    these bits are therefore sorted by their place, not by their value.
    """
    place = tl.arange(0, WINDOWS_TILE)
    for first in range(program * WINDOWS_TILE, N, programs * WINDOWS_TILE):
        exists = first + place < N
        bits = tl.load(W.to(tl.pointer_type(tl.int32), bitcast=True) + first + place, mask=exists, other=0)
        key = bits ^ ((bits >> 31) & LAST)  # integers that are in the same order as the floats
        x = (tl.where(first + place < N, key, LAST) & (-WINDOWS_TILE)) | place
        # A bitonic sort, with a loop over the sizes: tl.sort is unrolled, and takes a minute to compile.
        x ^= -(place & 1)  # runs that are to descend are complemented, so that all of them ascend
        size = 2
        while size <= WINDOWS_TILE:
            x ^= tl.where(((place ^ (place >> 1)) & (size // 2)) == 0, 0, -1)
            for i in tl.static_range(1, 14):
                if WINDOWS_TILE >> i > 0:
                    if WINDOWS_TILE >> i < size:
                        x = _exchange(x, WINDOWS_TILE >> i)
            size *= 2
        tl.store(order + first + place, x, mask=first + place < N)
    tl.debug_barrier()


# The workspace of `windows`.  First, for each program, the places of the weights of one tile, 16 bit each.  Then, for
# each level and each program, one int32 for every part of a tile: the first centroid of its window and, above 16 bits,
# how many tiles of centroids the window has.  A level belongs to a row of the trail.


@triton.jit
def places_of(workspace, program, WINDOWS_TILE: tl.constexpr):
    """The memory for this program's places, int16."""
    return (workspace + program * (WINDOWS_TILE // 2)).to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def windows_of(workspace, level, program, programs, WINDOWS_TILE: tl.constexpr):
    """The memory for this program's windows of a level, int32."""
    offset = programs * (WINDOWS_TILE // 2) + (level * programs + program) * (WINDOWS_TILE // PART)
    return (workspace + offset).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _value(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & LAST)).to(tl.float32, bitcast=True)


@triton.jit
def find_windows(
    order, C, scale, windows, N, K, program, programs, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWS_TILE: tl.constexpr,
):  # fmt: skip
    """Write the windows of all parts of a tile, the same for all of this program's tiles.

    Where BLOCK_K centroids suffice for each of the parts that are processed together (BLOCK_N weights), these have one
    window each, of one tile.  Otherwise they share one window of several tiles.
    """
    part = tl.arange(0, WINDOWS_TILE // PART) * PART
    # the smallest and the largest weight of each part, of all tiles of this program
    smallest = tl.full((WINDOWS_TILE // PART,), LAST, tl.int32)
    largest = -smallest
    for start in range(program * WINDOWS_TILE, N, programs * WINDOWS_TILE):
        some = start + part < N
        smallest = tl.minimum(smallest, tl.load(order + start + part, mask=some, other=LAST))
        largest = tl.maximum(largest, tl.load(order + tl.minimum(start + part + PART, N) - 1, mask=some, other=-LAST))
    smallest = _value(smallest & (-WINDOWS_TILE))[None, :]
    largest = _value(largest | (WINDOWS_TILE - 1))[None, :]
    # A distance within which every weight of the part has a centroid: some centroid is that close to both ends.
    farthest = tl.full((WINDOWS_TILE // PART,), FAR, tl.float32)
    for begin in range(0, K, BLOCK_K):
        c = load_centroids(C, begin + tl.arange(0, BLOCK_K), K, 2, FAR, 1, 1).trans(1, 0)
        farthest = tl.minimum(farthest, tl.min(tl.maximum(tl.abs(c - smallest), tl.abs(c - largest)), 0))
    # Centroids farther than that by so much that their attention underflows to zero do not matter.
    reach = (farthest * farthest * 1.0001 + ZERO / scale)[None, :]
    low = tl.full((WINDOWS_TILE // PART,), K - BLOCK_K, tl.int32)
    high = tl.zeros((WINDOWS_TILE // PART,), tl.int32)
    for begin in range(0, K, BLOCK_K):
        offs_k = begin + tl.arange(0, BLOCK_K)
        c = load_centroids(C, offs_k, K, 2, FAR, 1, 1).trans(1, 0)
        nearest = tl.maximum(tl.maximum(smallest - c, c - largest), 0.0)
        matters = nearest * nearest <= reach
        low = tl.minimum(low, tl.min(tl.where(matters, offs_k[:, None], K), 0))
        high = tl.maximum(high, tl.max(tl.where(matters, offs_k[:, None] + 1, 0), 0))
    exists = program * WINDOWS_TILE + part < N
    low = tl.reshape(tl.where(exists, low, K - BLOCK_K), (WINDOWS_TILE // BLOCK_N, BLOCK_N // PART))
    high = tl.reshape(tl.where(exists, high, 0), (WINDOWS_TILE // BLOCK_N, BLOCK_N // PART))
    first = tl.min(low, 1)[:, None]
    one_tile = tl.max(high - low, 1)[:, None] <= BLOCK_K
    tiles = tl.where(one_tile, 1, tl.cdiv(tl.max(high, 1)[:, None] - first, BLOCK_K))
    block, part_of_block = tl.arange(0, WINDOWS_TILE // BLOCK_N), tl.arange(0, BLOCK_N // PART)
    offs = block[:, None] * (BLOCK_N // PART) + part_of_block[None, :]
    tl.store(windows + offs, tl.where(one_tile, low, first) + (tiles << 16))
    tl.debug_barrier()


@triton.jit
def load_window(windows, part, BLOCK_N: tl.constexpr):
    """The first centroid of the window of each weight, `(BLOCK_N,)`, the first centroid of the first window, and how
    many tiles the windows have."""
    low = tl.load(windows + (part + tl.arange(0, BLOCK_N)) // PART) & 0xFFFF
    first = tl.load(windows + part // PART)
    return low, first & 0xFFFF, first >> 16


@triton.jit
def load_order(order, start, part, N, BLOCK_N: tl.constexpr, WINDOWS_TILE: tl.constexpr):
    """`(BLOCK_N,)`: where the weights of these parts of the tile at `start` are in W; N for those that do not exist."""
    offs_n = start + part + tl.arange(0, BLOCK_N)
    place = tl.load(order + offs_n, mask=offs_n < N, other=0) & (WINDOWS_TILE - 1)
    return tl.where(offs_n < N, start + place, N)


@triton.jit
def move_order_to_workspace(order, places, start, N, WINDOWS_TILE: tl.constexpr):
    """Copy the order of the tile at `start`, so that its memory may take the result."""
    place = tl.arange(0, WINDOWS_TILE)
    x = tl.load(order + start + place, mask=start + place < N, other=0)
    tl.debug_barrier()  # all threads must have read the places of the tile before
    tl.store(places + place, (x & (WINDOWS_TILE - 1)).to(tl.int16))
    tl.debug_barrier()


@triton.jit
def load_order_from_workspace(places, start, part, N, BLOCK_N: tl.constexpr, WINDOWS_TILE: tl.constexpr):
    """`load_order` of a tile whose order is in the workspace."""
    offs = part + tl.arange(0, BLOCK_N)
    exists = (offs < WINDOWS_TILE) & (start + offs < N)
    return tl.where(exists, start + tl.load(places + offs, mask=exists, other=0).to(tl.int32), N)
