"""Groups of weights, each with centroids of its own: a program runs all iterations of one group, without barriers.

Distances are differences, as in `differences.py`.  Tiles are `(coordinates, centroids, PER_LANE, LANES)`: each of LANES
threads holds all coordinates and centroids of PER_LANE vectors, so that sums over these stay in its registers.  Sums
over lanes are taken once per walk over the vectors of the group.  The vectors are read anew in each walk, from the
cache.  More than BLOCK_K centroids are walked tile by tile, with an online softmax, and their sums over vectors are in
`partial`.

A group is a tile of the matrix `(rows, columns)`, see `Grouping`, of `tile_rows` x `tile_columns` weights.  `base` is
where its first weight is, and `height` and `width` say how much of it is inside the matrix.  With CONTIGUOUS, the
weights of a group follow one another.  With ALIGNED, the columns of the matrix and of the tiles are whole vectors, and
all of these numbers count vectors instead of weights.

Other names are explained in the glossary of `triton/__init__.py`; here n is the number of vectors of a group, and every
tensor but W, W_tilde, G and dW has one axis more, the first: the group.  The trail has no column for the mass.
"""

import triton
import triton.language as tl

from ..launch import quick
from .differences import FAR, load_centroids
from .steps import LOG2E


@triton.jit
def place(group, rows, columns, tile_rows, tile_columns, across):
    """base, height and width of a group."""
    row = group // across * tile_rows
    column = group % across * tile_columns
    return row * columns + column, tl.minimum(tile_rows, rows - row), tl.minimum(tile_columns, columns - column)


@triton.jit
def addresses(
    first, base, height, width, columns, tile_columns, D: tl.constexpr, D_PADDED: tl.constexpr,
    PER_LANE: tl.constexpr, LANES: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Where the values of the vectors from `first` on are, and which of them exist, both `(D_PADDED, PER_LANE, LANES)`;
    and which vectors count, `(PER_LANE, LANES)`."""
    offs_n = first + tl.arange(0, PER_LANE)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    offs_d = tl.arange(0, D_PADDED)[:, None, None]
    if ALIGNED:
        element = offs_n
    else:
        element = offs_n[None, :, :] * D + offs_d
    if CONTIGUOUS:
        offs = base + element
        exists = element < height * width
    else:
        row = element // tile_columns
        column = element - row * tile_columns
        offs = base + row * columns + column
        exists = (row < height) & (column < width)
    if ALIGNED:
        return (offs * D)[None, :, :] + offs_d, exists[None, :, :] & (offs_d < D), exists
    else:
        exists = exists & (offs_d < D)
        return offs, exists, tl.max(exists.to(tl.int32), 0) > 0


@triton.jit
def load_values(X, offs, exists):
    """Values in float32, zero where none exist."""
    return tl.load(X + offs, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def attend(w, c, EUCLIDEAN: tl.constexpr):
    """w - c, and the distances as `logits` takes them: not squared for d = 1, else as the metric says."""
    difference = w[:, None, :, :] - c[:, :, None, None]
    if w.shape[0] == 1:
        return difference, tl.sum(tl.abs(difference), 0)
    distance = tl.sum(difference * difference, 0)
    if EUCLIDEAN:
        distance = tl.sqrt(distance)
    return difference, distance


@triton.jit
def logits(nearest, distance, scale, EUCLIDEAN: tl.constexpr, D: tl.constexpr):
    """As in `differences.py`, with one operation less for d = 1: the sum of two distances may be rounded."""
    if D == 1 and not EUCLIDEAN:
        return (nearest - distance) * (distance * scale + nearest * scale)
    return (nearest - distance) * scale


@triton.jit
def _statistics(
    w, c0, C, K, scale, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr, K_TILES: tl.constexpr,
    EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """Of each vector, the distance to the nearest centroid and the softmax denominator relative to it."""
    _, distance = attend(w, c0, EUCLIDEAN)
    nearest = tl.min(distance, 0)
    denominator = tl.sum(tl.exp2(logits(nearest[None, :, :], distance, scale, EUCLIDEAN, D)), 0)
    for tile in range(1, K_TILES):
        c = load_centroids(C, tile * BLOCK_K + tl.arange(0, BLOCK_K), K, D, FAR, D, D_PADDED)
        _, distance = attend(w, c, EUCLIDEAN)
        nearer = tl.minimum(nearest, tl.min(distance, 0))
        added = tl.sum(tl.exp2(logits(nearer[None, :, :], distance, scale, EUCLIDEAN, D)), 0)
        denominator = denominator * tl.exp2(logits(nearer, nearest, scale, EUCLIDEAN, D)) + added
        nearest = nearer
    return nearest, denominator


@triton.jit
def over_vectors(x):
    """The sum over all vectors of a tile, the last two axes."""
    return tl.sum(tl.sum(x, len(x.shape) - 2), len(x.shape) - 2)


@triton.jit
def deposit(received, mass, partial, offs_k, first, D: tl.constexpr, D_PADDED: tl.constexpr):
    """Add `(D_PADDED, BLOCK_K)` and `(BLOCK_K,)` to this group's `partial`; the first vectors write them."""
    offs_d = tl.arange(0, D_PADDED)[:, None]
    ptrs = partial + offs_k[None, :] * (D + 1) + offs_d
    mass_ptrs = partial + offs_k * (D + 1) + D
    if first > 0:
        received += tl.load(ptrs, mask=offs_d < D, other=0.0)
        mass += tl.load(mass_ptrs)
    tl.store(ptrs, received, mask=offs_d < D)
    tl.store(mass_ptrs, mass)


@triton.jit
def withdraw(partial, offs_k, D: tl.constexpr, D_PADDED: tl.constexpr):
    """What was deposited for the centroids `offs_k`."""
    offs_d = tl.arange(0, D_PADDED)[:, None]
    received = tl.load(partial + offs_k[None, :] * (D + 1) + offs_d, mask=offs_d < D, other=0.0)
    return received, tl.load(partial + offs_k * (D + 1) + D)


@triton.jit
def store_centroids(values, target, offs_k, K, D: tl.constexpr, D_PADDED: tl.constexpr):
    """Write `(D_PADDED, BLOCK_K)` to the rows `offs_k` of `target` `(K, D)`."""
    offs_d = tl.arange(0, D_PADDED)[:, None]
    tl.store(target + offs_k[None, :] * D + offs_d, values, mask=(offs_d < D) & (offs_k < K)[None, :])


@triton.jit
def sums(
    W, W_tilde, C, partial, scale, write, base, height, width, columns, tile_columns, n, K,
    SUM_W: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr, K_TILES: tl.constexpr,
    PER_LANE: tl.constexpr, LANES: tl.constexpr, EUCLIDEAN: tl.constexpr, CONTIGUOUS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """A^T [W, 1] of the group's vectors, `(D_PADDED, BLOCK_K)` and `(BLOCK_K,)`; without SUM_W, only the mass.

    If `write`, also W_tilde = A C.  With several tiles of centroids, the sums are in `partial`.
    """
    c0 = load_centroids(C, tl.arange(0, BLOCK_K), K, D, FAR, D, D_PADDED)
    received_sum = tl.zeros((D_PADDED, BLOCK_K, PER_LANE, LANES), tl.float32)
    mass_sum = tl.zeros((BLOCK_K, PER_LANE, LANES), tl.float32)
    for first in range(0, n, PER_LANE * LANES):
        offs, exists, counts = addresses(
            first=first, base=base, height=height, width=width, columns=columns, tile_columns=tile_columns,
            D=D, D_PADDED=D_PADDED, PER_LANE=PER_LANE, LANES=LANES, CONTIGUOUS=CONTIGUOUS,
            ALIGNED=ALIGNED,
        )  # fmt: skip
        w = load_values(W, offs, exists)
        nearest, denominator = _statistics(
            w=w, c0=c0, C=C, K=K, scale=scale, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES,
            EUCLIDEAN=EUCLIDEAN,
        )  # fmt: skip
        share = tl.where(counts, 1.0 / denominator, 0.0)
        average = tl.zeros((D_PADDED, PER_LANE, LANES), tl.float32)
        for tile in range(K_TILES):
            offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
            c = c0
            if K_TILES > 1:
                c = load_centroids(C, offs_k, K, D, FAR, D, D_PADDED)
            _, distance = attend(w, c, EUCLIDEAN)
            numerators = tl.exp2(logits(nearest[None, :, :], distance, scale, EUCLIDEAN, D))
            if write:
                average += tl.sum(numerators[None, :, :, :] * c[:, :, None, None], 1)
            mass = numerators * share[None, :, :]
            received = numerators[None, :, :, :] * (w * share[None, :, :])[:, None, :, :]
            if K_TILES == 1:
                mass_sum += mass
                if SUM_W:
                    received_sum += received
            else:
                deposit(over_vectors(received), over_vectors(mass), partial, offs_k, first, D, D_PADDED)
        if write:
            tl.store(W_tilde + offs, (average / denominator[None, :, :]).to(W_tilde.dtype.element_ty), mask=exists)
    return over_vectors(received_sum), over_vectors(mass_sum)


@triton.jit
def _update(
    received, mass, C, C_next, partial, K, no_mass, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr,
    K_TILES: tl.constexpr,
):  # fmt: skip
    """Write the next centroids; how far one has moved at most."""
    moved = 0.0
    for tile in range(K_TILES):
        offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        if K_TILES > 1:
            received, mass = withdraw(partial, offs_k, D, D_PADDED)
        c = load_centroids(C, offs_k, K, D, 0.0, D, D_PADDED)
        empty = mass <= no_mass
        c_next = tl.where(empty[None, :], c, received / tl.where(empty, 1.0, mass)[None, :])
        store_centroids(c_next, C_next, offs_k, K, D, D_PADDED)
        moved = tl.maximum(moved, tl.max(tl.max(tl.abs(c_next - c), 1), 0))
    return moved


@triton.jit
def _copy(source, target, K, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr, K_TILES: tl.constexpr):
    """Copy centroids."""
    for tile in range(K_TILES):
        offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        c = load_centroids(source, offs_k, K, D, 0.0, D, D_PADDED).to(tl.float32)
        store_centroids(c, target, offs_k, K, D, D_PADDED)


@quick
@triton.jit(
    do_not_specialize=[
        "rows", "columns", "tile_rows", "tile_columns", "across", "n", "K", "K_PADDED", "max_iter"
    ]
)  # fmt: skip
def forward_groups_kernel(
    W, C, tau, W_tilde, trail, iterations, partial, rows, columns, tile_rows, tile_columns, across, n, K,
    K_PADDED, eps, no_mass, max_iter, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr,
    K_TILES: tl.constexpr, PER_LANE: tl.constexpr, LANES: tl.constexpr, EUCLIDEAN: tl.constexpr,
    CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """All iterations of one group per program: its W_tilde, its trail, and how many iterations it used."""
    group = tl.program_id(0)
    base, height, width = place(group, rows, columns, tile_rows, tile_columns, across)
    scale = LOG2E / tl.load(tau + group)
    trail += group.to(tl.int64) * (max_iter + 1) * K * D
    partial += group.to(tl.int64) * K_PADDED * (D + 1)
    _copy(C + group.to(tl.int64) * K * D, trail, K, D, D_PADDED, BLOCK_K, K_TILES)
    tl.debug_barrier()  # what one thread has written, others will read
    t = 0
    settled = max_iter < 1  # no: there is at least one iteration, and a loop changes only what is not a constant
    going = max_iter > 0
    while going:
        # The last iteration writes W_tilde.  If the centroids turn out to have settled before, one more walk does it.
        write = settled | (t == max_iter - 1)
        received, mass = sums(
            W=W, W_tilde=W_tilde, C=trail + t * K * D, partial=partial, scale=scale, write=write, base=base,
            height=height, width=width, columns=columns, tile_columns=tile_columns, n=n, K=K,
            SUM_W=True, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES, PER_LANE=PER_LANE, LANES=LANES,
            EUCLIDEAN=EUCLIDEAN, CONTIGUOUS=CONTIGUOUS, ALIGNED=ALIGNED,
        )  # fmt: skip
        if K_TILES > 1:
            tl.debug_barrier()
        if not settled:
            moved = _update(
                received=received, mass=mass, C=trail + t * K * D, C_next=trail + (t + 1) * K * D, partial=partial, K=K,
                no_mass=no_mass, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES,
            )  # fmt: skip
            settled = moved <= eps
        tl.debug_barrier()
        going = not write
        if going and not settled:
            t += 1
    tl.store(iterations + group, (t + 1).to(tl.int64))
    if t + 1 < max_iter:
        _copy(trail + (t + 1) * K * D, trail + max_iter * K * D, K, D, D_PADDED, BLOCK_K, K_TILES)
