"""Matrix products on the tensor cores: for the squared distance, d > 1 and more than a few centroids.

The tensor cores multiply bfloat16 and add float32.  A float32 is the sum of three bfloat16, called high, middle and
low, and of the nine products of two such sums six matter.  So a vector and a centroid become rows of eight segments
with D_SEGMENT columns each, in two halves:

    [ low  | high | middle |   0    ]  [ middle |  high  |  ones  | high ]    a vector
    [ high | low  | middle | offset ]  [  high  | middle | offset | high ]    a centroid

The rows of the centroids are written to a table once per iteration (`product_tables.py`).  The product of a vector's
row with a centroid's row is the scalar product of the two plus the centroid's offset: the offset, which is split in
three as well, meets three ones.  Small products come first, because the tensor cores cut off what does not fit into
their sum, at every step.  For the same reason their sums start from zero, and are added up outside.

There are two kinds of tables, with s = 2 log2(e) / tau:

    the logit table     s c, with the offset -s |c|^2 / 2: a product is a logit in units of log 2 (|w|^2 cancels in the
                        softmax)
    the H table         s h, with the offset -s h . c': a product is s dA of an update

Sums over centroids multiply the attention, split in three, with the first half of a table.  Sums over vectors multiply
it with the `terms` of the vectors, whose one adds up the attention itself:

    [ high | middle | low | one ]

Tiles are `(vectors, centroids)` for what a vector needs, and enter the next product from registers.  For what a
centroid needs, the forward pass computes them again as `(centroids, vectors)`.  The backward pass, where a tile is more
work, transposes them instead.

`w_half0`, `w_half1` and `w_terms` are such rows of the vectors w.  dA is the product of a table, `dA_table`, with the
rows `dA_half0` and `dA_half1` of some vectors: through an update these are the H table and w, through the output the
logit table and g.  Other names are explained in the glossary of `triton/__init__.py`.
"""

import os

import triton
import triton.language as tl

# numpy, which the interpreter computes with, has no bfloat16
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
NEVER = tl.constexpr(-1e30)  # the offset of the centroids that fill up the last tile: attention to them is exactly zero


@triton.jit
def _upper(x):
    """The upper 16 bits of a float32, still as a float32: cutting off is faster than rounding."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def split(x):
    """Three bfloat16 that add up to a float32."""
    high = _upper(x)
    rest = x - high
    middle = _upper(rest)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


@triton.jit
def _dot(a, b, acc):
    """a b + acc."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _times(x, b):
    """x b for a float32 x, which is split in three: `(i, j), (j, l) -> (i, l)`."""
    high, middle, low = split(x)
    result = _dot(low, b, tl.zeros((x.shape[0], b.shape[1]), tl.float32))
    result = _dot(middle, b, result)
    return _dot(high, b, result)


@triton.jit
def _transposed_times(x, b):
    """x^T b for a float32 x: `(j, i), (j, l) -> (i, l)`."""
    return _times(tl.trans(x), b)


@triton.jit
def _load_vectors(X, N, offs_n, D: tl.constexpr, D_SEGMENT: tl.constexpr):
    """The vectors `offs_n`, `(BLOCK_N, D_SEGMENT)`, zero past the last coordinate and past the last value."""
    offs_d = tl.arange(0, D_SEGMENT)[None, :]
    offs = offs_n[:, None] * D + offs_d
    return tl.load(X + offs, mask=(offs_d < D) & (offs < N), other=0.0).to(tl.float32)


@triton.jit
def _four_segments(a, b, c, d):
    """`[a | b | c | d]`."""
    parts = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.permute(parts, (0, 3, 2, 1)), (a.shape[0], 4 * a.shape[1]))


@triton.jit
def _vector_rows(w, ONES: tl.constexpr):
    """Both halves of the vectors' rows, and their terms: `(BLOCK_N, D_SEGMENT) -> (BLOCK_N, 4 D_SEGMENT)` each.

    Without ONES there are zeros instead of ones: offsets and the attention itself are left out.
    """
    high, middle, low = split(w)
    zero = tl.zeros_like(high)
    one, ones = zero, zero
    if ONES:
        i = tl.arange(0, w.shape[1])[None, :]
        one = tl.where(i == 0, 1.0, zero.to(tl.float32)).to(tl.bfloat16)
        ones = tl.where(i < 3, 1.0, zero.to(tl.float32)).to(tl.bfloat16)  # three, as the offset has three parts
    return (
        _four_segments(low, high, middle, zero),
        _four_segments(middle, high, ones, high),
        _four_segments(high, middle, low, one),
    )


@triton.jit
def _table_half(table, offs_k, HALF: tl.constexpr, D_SEGMENT: tl.constexpr):
    """The first (0) or the second (1) half of the rows of the centroids `offs_k`: `(BLOCK_K, 4 D_SEGMENT)`."""
    column = tl.arange(0, 4 * D_SEGMENT)[None, :]
    return tl.load(table + offs_k[:, None] * (8 * D_SEGMENT) + HALF * 4 * D_SEGMENT + column)


@triton.jit
def _by_vector(
    half0, half1, table, offs_k, D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The products of vectors with the centroids `offs_k`, `(BLOCK_N, BLOCK_K)`."""
    small = _dot(half0, tl.trans(_table_half(table, offs_k, 0, D_SEGMENT)), tl.zeros((BLOCK_N, BLOCK_K), tl.float32))
    return _dot(half1, tl.trans(_table_half(table, offs_k, 1, D_SEGMENT)), small)


@triton.jit
def _by_centroid(
    half0, half1, table, offs_k, D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The same products, `(BLOCK_K, BLOCK_N)`.

    The same to the last bit: attention is their distance from the largest of `_by_vector`, and the rounding of logits
    is much coarser than that of attention.  The tensor cores add up in the same order both ways; numpy does not.
    """
    if INTERPRETED:
        return tl.trans(_by_vector(half0, half1, table, offs_k, D_SEGMENT, BLOCK_K, BLOCK_N))
    small = _dot(_table_half(table, offs_k, 0, D_SEGMENT), tl.trans(half0), tl.zeros((BLOCK_K, BLOCK_N), tl.float32))
    return _dot(_table_half(table, offs_k, 1, D_SEGMENT), tl.trans(half1), small)


@triton.jit
def _fold_segments(acc, D_SEGMENT: tl.constexpr):
    """From sums of rows of four segments to the values, the sum of the first three segments `(rows, D_SEGMENT)`, and to
    the sum of the last segment `(rows,)`."""
    parts = tl.reshape(acc, (acc.shape[0], 4, D_SEGMENT))
    values = tl.sum(tl.where((tl.arange(0, 4) < 3)[None, :, None], parts, 0.0), 1)
    return values, tl.sum(tl.where((tl.arange(0, 4 * D_SEGMENT) >= 3 * D_SEGMENT)[None, :], acc, 0.0), 1)


@triton.jit
def _deposit(acc, partial, offs_k, add, D: tl.constexpr, D_SEGMENT: tl.constexpr):
    """Write `(BLOCK_K, 4 D_SEGMENT)` sums to a row of `partial`, or add them to what is there."""
    values, last = _fold_segments(acc, D_SEGMENT)
    offs_d = tl.arange(0, D_SEGMENT)[None, :]
    ptrs = partial + offs_k[:, None] * (D + 1) + offs_d
    last_ptrs = partial + offs_k * (D + 1) + D
    # The memory does the addition, so that no thread waits for what is there.  The same thread always adds to an
    # element: where a program has the row for itself, the order of the additions is fixed.
    if add:
        tl.atomic_add(ptrs, values, mask=offs_d < D, sem="relaxed")
        tl.atomic_add(last_ptrs, last, sem="relaxed")
    else:
        tl.store(ptrs, values, mask=offs_d < D)
        tl.store(last_ptrs, last)


@triton.jit
def _online_softmax(tile_logits, largest, denominator):
    """Take in a tile of logits, `(BLOCK_N, BLOCK_K)`.

    Returns the numerators relative to the largest logit so far, the factor that makes what was added up before relative
    to that as well, this largest logit, and the denominator.
    """
    larger = tl.maximum(largest, tl.max(tile_logits, 1))
    numerators = tl.exp2(tile_logits - larger[:, None])
    rescale = tl.exp2(largest - larger)
    return numerators, rescale, larger, denominator * rescale + tl.sum(numerators, 1)


@triton.jit
def _largest(largest, n, offs_n):
    """The largest logit of each vector, and so much past the last vector that the attention there is zero."""
    return tl.where(offs_n < n, largest, 1e38)


@triton.jit
def _attention(tile_logits, largest, share):
    """A.  The largest logit and the share are not put into one logarithm: it would be as large as the logits, and its
    rounding would be an error of all of a vector's attention."""
    return tl.exp2(tile_logits - largest) * share


@triton.jit
def _statistics(
    w_half0, w_half1, dA_half0, dA_half1, logit_table, n, offs_n, MEAN: tl.constexpr, D_SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
):  # fmt: skip
    """The largest logit of each vector, its share of the attention and, with MEAN, the mean of dA through the output,
    in which the logit table makes dA: `(BLOCK_N,)` each."""
    largest = tl.full((BLOCK_N,), -1e38, tl.float32)
    denominator = tl.zeros((BLOCK_N,), tl.float32)
    mean = tl.zeros((BLOCK_N,), tl.float32)
    for tile in range(K_TILES):
        offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        tile_logits = _by_vector(w_half0, w_half1, logit_table, offs_k, D_SEGMENT, BLOCK_K, BLOCK_N)
        numerators, rescale, largest, denominator = _online_softmax(tile_logits, largest, denominator)
        if MEAN:
            dA = _by_vector(dA_half0, dA_half1, logit_table, offs_k, D_SEGMENT, BLOCK_K, BLOCK_N)
            mean = mean * rescale + tl.sum(numerators * dA, 1)
    return _largest(largest, n, offs_n), 1.0 / denominator, mean / denominator


@triton.jit
def _average(
    w_half0, w_half1, logit_table, averaged_table, n, offs_n, D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
):  # fmt: skip
    """The same largest logit and its share, and the average of the rows of `averaged_table` (their first halves),
    weighted with the attention: `(BLOCK_N, 4 D_SEGMENT)`."""
    largest = tl.full((BLOCK_N,), -1e38, tl.float32)
    denominator = tl.zeros((BLOCK_N,), tl.float32)
    acc = tl.zeros((BLOCK_N, 4 * D_SEGMENT), tl.float32)
    for tile in range(K_TILES):
        offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        tile_logits = _by_vector(w_half0, w_half1, logit_table, offs_k, D_SEGMENT, BLOCK_K, BLOCK_N)
        numerators, rescale, largest, denominator = _online_softmax(tile_logits, largest, denominator)
        acc = acc * rescale[:, None] + _times(numerators, _table_half(averaged_table, offs_k, 0, D_SEGMENT))
    return _largest(largest, n, offs_n), 1.0 / denominator, acc / denominator[:, None]


@triton.jit
def _store(values, target, offs_n, N, D: tl.constexpr, D_SEGMENT: tl.constexpr):
    """Write `(BLOCK_N, D_SEGMENT)` to the vectors `offs_n` of `target`."""
    offs_d = tl.arange(0, D_SEGMENT)[None, :]
    offs = offs_n[:, None] * D + offs_d
    tl.store(target + offs, values.to(target.dtype.element_ty), mask=(offs_d < D) & (offs < N))


@triton.jit
def sums(
    W, logit_table, scale, partial, W_tilde, N, n, K_PADDED, program, programs, FIRST: tl.constexpr, D: tl.constexpr,
    D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
):  # fmt: skip
    """A^T [W, 1] of this program's vectors; if FIRST, also W_tilde = A C."""
    partial += program * K_PADDED * (D + 1)
    acc = tl.zeros((BLOCK_K, 4 * D_SEGMENT), tl.float32)
    for first in range(program * BLOCK_N, n, programs * BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        w_half0, w_half1, w_terms = _vector_rows(_load_vectors(W, N, offs_n, D, D_SEGMENT), True)
        if FIRST:
            largest, share, average = _average(
                w_half0=w_half0, w_half1=w_half1, logit_table=logit_table, averaged_table=logit_table, n=n,
                offs_n=offs_n, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
            )  # fmt: skip
            _store(_fold_segments(average, D_SEGMENT)[0] * (0.5 / scale), W_tilde, offs_n, N, D, D_SEGMENT)
        else:
            largest, share, _mean = _statistics(
                w_half0=w_half0, w_half1=w_half1, dA_half0=w_half0, dA_half1=w_half1, logit_table=logit_table, n=n,
                offs_n=offs_n, MEAN=False, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
            )  # fmt: skip
        for tile in range(K_TILES):
            offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
            tile_logits = _by_centroid(w_half0, w_half1, logit_table, offs_k, D_SEGMENT, BLOCK_K, BLOCK_N)
            A = _attention(tile_logits, largest[None, :], share[None, :])
            contributions = _times(A, w_terms)
            if K_TILES == 1:
                acc += contributions
            else:
                _deposit(contributions, partial, offs_k, first != program * BLOCK_N, D, D_SEGMENT)
    if K_TILES == 1:
        _deposit(acc, partial, tl.arange(0, BLOCK_K), False, D, D_SEGMENT)


@triton.jit
def averages(
    W, logit_table, scale, W_tilde, N, n, program, programs, D: tl.constexpr, D_SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
):  # fmt: skip
    """W_tilde = A C."""
    for first in range(program * BLOCK_N, n, programs * BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        w_half0, w_half1, _w_terms = _vector_rows(_load_vectors(W, N, offs_n, D, D_SEGMENT), True)
        _largest_logit, _share, average = _average(
            w_half0=w_half0, w_half1=w_half1, logit_table=logit_table, averaged_table=logit_table, n=n, offs_n=offs_n,
            D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
        )  # fmt: skip
        _store(_fold_segments(average, D_SEGMENT)[0] * (0.5 / scale), W_tilde, offs_n, N, D, D_SEGMENT)


# The backward pass.  With UPDATE it goes through C' = (A^T W) / mass, where dA = h (w - c'), otherwise through the
# output W_tilde = A C, where dA = g c.


@triton.jit
def _through_softmax(
    w_half0, w_half1, dA_half0, dA_half1, logit_table, dA_table, offs_k, largest, share, mean, slope,
    D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A and dlogits = A (dA - mean) slope, `(BLOCK_N, BLOCK_K)`; `mean` and `slope` are in the unit of `dA_table`."""
    tile_logits = _by_vector(w_half0, w_half1, logit_table, offs_k, D_SEGMENT, BLOCK_K, BLOCK_N)
    A = _attention(tile_logits, largest[:, None], share[:, None])
    dA = _by_vector(dA_half0, dA_half1, dA_table, offs_k, D_SEGMENT, BLOCK_K, BLOCK_N)
    return A, A * ((dA - mean[:, None]) * slope)


@triton.jit
def _outside_softmax(
    w_half0, w_half1, dA_half0, dA_half1, w, logit_table, dA_table, n, offs_n, UPDATE: tl.constexpr,
    D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
):  # fmt: skip
    """The largest logit, its share of the attention and the mean of dA, `(BLOCK_N,)` each, and what the vectors receive
    on other ways than through the softmax, `(BLOCK_N, 4 D_SEGMENT)`, in the unit of the tables."""
    if UPDATE:  # the mean of h (w - c') is w (A h) plus the mean of the offsets
        largest, share, average = _average(
            w_half0=w_half0, w_half1=w_half1, logit_table=logit_table, averaged_table=dA_table, n=n, offs_n=offs_n,
            D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
        )  # fmt: skip
        values, offset = _fold_segments(average, D_SEGMENT)
        return largest, share, tl.sum(values * w, 1) + offset, average
    else:
        largest, share, mean = _statistics(
            w_half0=w_half0, w_half1=w_half1, dA_half0=dA_half0, dA_half1=dA_half1, logit_table=logit_table, n=n,
            offs_n=offs_n, MEAN=True, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
        )  # fmt: skip
        return largest, share, mean, tl.zeros((BLOCK_N, 4 * D_SEGMENT), tl.float32)


@triton.jit
def gradient_sums(
    G, W, logit_table, H_table, scale, slope, partial, dW, N, n, K_PADDED, PARTIAL_ROWS, program, programs,
    UPDATE: tl.constexpr, ADD_TO_DW: tl.constexpr, SUM_DC: tl.constexpr, D: tl.constexpr, D_SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
):  # fmt: skip
    """SUM_DC: what the centroids receive from this program's vectors, added to one of the rows of `partial`.  It is the
    sum of dlogits w over the vectors and, through the output, of A g; in the last column the sum of dlogits.

    ADD_TO_DW: what the vectors receive.  The output, which comes first, writes it to dW, the updates add to that.
    """
    partial += program % PARTIAL_ROWS * K_PADDED * (D + 1)
    dA_table = H_table if UPDATE else logit_table
    slope = slope / (2 * scale)
    acc = tl.zeros((BLOCK_K, 4 * D_SEGMENT), tl.float32)
    for first in range(program * BLOCK_N, n, programs * BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        w = _load_vectors(W, N, offs_n, D, D_SEGMENT)
        w_half0, w_half1, w_terms = _vector_rows(w, True)
        dA_half0, dA_half1, g_terms = w_half0, w_half1, w_terms
        if not UPDATE:
            dA_half0, dA_half1, g_terms = _vector_rows(_load_vectors(G, N, offs_n, D, D_SEGMENT), False)
        largest, share, mean, dw = _outside_softmax(
            w_half0=w_half0, w_half1=w_half1, dA_half0=dA_half0, dA_half1=dA_half1, w=w, logit_table=logit_table,
            dA_table=dA_table, n=n, offs_n=offs_n, UPDATE=UPDATE, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K,
            BLOCK_N=BLOCK_N, K_TILES=K_TILES,
        )  # fmt: skip
        before = tl.zeros((BLOCK_N, D_SEGMENT), tl.float32)
        if ADD_TO_DW and UPDATE:
            # read here, early: when it is needed, everything would wait for the memory
            before = _load_vectors(dW, N, offs_n, D, D_SEGMENT)
        for tile in range(K_TILES):
            offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
            A, dlogits = _through_softmax(
                w_half0=w_half0, w_half1=w_half1, dA_half0=dA_half0, dA_half1=dA_half1, logit_table=logit_table,
                dA_table=dA_table, offs_k=offs_k, largest=largest, share=share, mean=mean, slope=slope,
                D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N,
            )  # fmt: skip
            if ADD_TO_DW:  # dlogits add up to zero over the centroids: dlogits c is dlogits (c - w)
                dw += _times(dlogits, _table_half(logit_table, offs_k, 0, D_SEGMENT))
            if SUM_DC:
                received = _transposed_times(dlogits, w_terms)
                if not UPDATE:
                    received += _transposed_times(A, g_terms)
                if K_TILES == 1:
                    acc += received
                else:
                    _deposit(received, partial, offs_k, True, D, D_SEGMENT)
        if ADD_TO_DW:
            _store(_fold_segments(dw, D_SEGMENT)[0] * (0.5 / scale) + before, dW, offs_n, N, D, D_SEGMENT)
    if SUM_DC and K_TILES == 1:
        _deposit(acc, partial, tl.arange(0, BLOCK_K), True, D, D_SEGMENT)


@triton.jit
def _vector_gradients(
    w_half0, w_half1, dA_half0, dA_half1, w, logit_table, dA_table, n, offs_n, slope, UPDATE: tl.constexpr,
    D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
):  # fmt: skip
    """What the vectors receive from all centroids, `(BLOCK_N, 4 D_SEGMENT)`, in the unit of the tables."""
    largest, share, mean, result = _outside_softmax(
        w_half0=w_half0, w_half1=w_half1, dA_half0=dA_half0, dA_half1=dA_half1, w=w, logit_table=logit_table,
        dA_table=dA_table, n=n, offs_n=offs_n, UPDATE=UPDATE, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N,
        K_TILES=K_TILES,
    )  # fmt: skip
    for tile in range(K_TILES):
        offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        _A, dlogits = _through_softmax(
            w_half0=w_half0, w_half1=w_half1, dA_half0=dA_half0, dA_half1=dA_half1, logit_table=logit_table,
            dA_table=dA_table, offs_k=offs_k, largest=largest, share=share, mean=mean, slope=slope,
            D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N,
        )  # fmt: skip
        result += _times(dlogits, _table_half(logit_table, offs_k, 0, D_SEGMENT))
    return result


@triton.jit
def gradient(
    G, W, logit_tables, H_tables, scale, slope, dW, N, n, output_row, first_update, end_update, slot_shift, table_size,
    program, programs, D: tl.constexpr, D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    K_TILES: tl.constexpr,
):  # fmt: skip
    """dW: through W_tilde, which row `output_row` of the trail made, and through the updates of the iterations
    first_update ... end_update - 1."""
    slope = slope / (2 * scale)
    for first in range(program * BLOCK_N, n, programs * BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        w = _load_vectors(W, N, offs_n, D, D_SEGMENT)
        w_half0, w_half1, _w_terms = _vector_rows(w, True)
        g_half0, g_half1, _g_terms = _vector_rows(_load_vectors(G, N, offs_n, D, D_SEGMENT), False)
        logit_table = logit_tables + output_row * table_size
        acc = _vector_gradients(
            w_half0=w_half0, w_half1=w_half1, dA_half0=g_half0, dA_half1=g_half1, w=w, logit_table=logit_table,
            dA_table=logit_table, n=n, offs_n=offs_n, slope=slope, UPDATE=False, D_SEGMENT=D_SEGMENT,
            BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
        )  # fmt: skip
        for t in range(first_update, end_update):
            acc += _vector_gradients(
                w_half0=w_half0, w_half1=w_half1, dA_half0=w_half0, dA_half1=w_half1, w=w,
                logit_table=logit_tables + t * table_size, dA_table=H_tables + (t + slot_shift) * table_size, n=n,
                offs_n=offs_n, slope=slope, UPDATE=True, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N,
                K_TILES=K_TILES,
            )  # fmt: skip
        _store(_fold_segments(acc, D_SEGMENT)[0] * (0.5 / scale), dW, offs_n, N, D, D_SEGMENT)
