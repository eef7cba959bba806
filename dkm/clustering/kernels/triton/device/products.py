"""Matrix products on the tensor cores: for the squared distance, d > 1 and more than a few centroids.

`product_rows.py` explains the rows that are multiplied, of vectors and of centroids, and the frame that all is in.

Tiles are `(vectors, centroids)` for what a vector needs, and enter the next product from registers.  For what a
centroid needs, the forward pass computes them again as `(centroids, vectors)`.  The backward pass, where a tile is more
work, transposes them instead.

`w_first`, `w_second` and `w_whole` are the first four, the next four and the last two segments of the rows of the
vectors w, and `w_terms` are their terms.  dA is the product of a table, `dA_table`, with the rows `dA_first`,
`dA_second` and `dA_whole` of some vectors: through an update these are the H table and w, through the output the logit
table and g / unit.  Other names are explained in the glossary of `triton/__init__.py`.
"""

import triton
import triton.language as tl

from .frame import inverse, load_frame
from .product_rows import (
    distances_by_centroid,
    distances_by_vector,
    fold_segments,
    load_vectors,
    load_x,
    product_dA,
    rows_of_g,
    rows_of_x,
    table_four,
    times,
    transposed_times,
)


@triton.jit
def _deposit(acc, partial, offs_k, center, unit, add, D: tl.constexpr, D_SEGMENT: tl.constexpr):
    """Write `(BLOCK_K, 4 D_SEGMENT)` sums in the frame to a row of `partial`, as they are outside, or add them to what
    is there."""
    values, last = fold_segments(acc, D_SEGMENT)
    values = values * unit + last[:, None] * center
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
def _online_softmax(distances, logit_scale, largest, denominator):
    """Take in a tile of `distances_by_vector`.

    Returns the numerators relative to the largest logit so far, the factor that makes what was added up before relative
    to that as well, this largest logit, and the denominator.
    """
    larger = tl.maximum(largest, tl.max(distances, 1) * logit_scale)
    numerators = tl.exp2(distances * logit_scale - larger[:, None])
    rescale = tl.exp2(largest - larger)
    return numerators, rescale, larger, denominator * rescale + tl.sum(numerators, 1)


@triton.jit
def _largest(largest, n, offs_n):
    """The largest logit of each vector, and so much past the last vector that the attention there is zero."""
    return tl.where(offs_n < n, largest, 1e38)


@triton.jit
def _attention(distances, logit_scale, largest, share):
    """A.  The largest logit and the share are not put into one logarithm: it would be as large as the logits, and its
    rounding would be an error of all of a vector's attention."""
    return tl.exp2(distances * logit_scale - largest) * share


@triton.jit
def _statistics(
    w_first, w_second, w_whole, dA_first, dA_second, dA_whole, logit_table, logit_scale, n, offs_n,
    MEAN: tl.constexpr, D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
):  # fmt: skip
    """The largest logit of each vector, its share of the attention and, with MEAN, the mean of dA through the output,
    in which the logit table makes dA: `(BLOCK_N,)` each."""
    largest = tl.full((BLOCK_N,), -1e38, tl.float32)
    denominator = tl.zeros((BLOCK_N,), tl.float32)
    mean = tl.zeros((BLOCK_N,), tl.float32)
    for tile in range(K_TILES):
        offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        distances = distances_by_vector(
            first=w_first, second=w_second, whole=w_whole, table=logit_table, offs_k=offs_k, D_SEGMENT=D_SEGMENT,
            BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N,
        )  # fmt: skip
        numerators, rescale, largest, denominator = _online_softmax(distances, logit_scale, largest, denominator)
        if MEAN:
            dA = product_dA(dA_first, dA_second, dA_whole, logit_table, offs_k, D_SEGMENT, BLOCK_K, BLOCK_N)
            mean = mean * rescale + tl.sum(numerators * dA, 1)
    return _largest(largest, n, offs_n), 1.0 / denominator, mean / denominator


@triton.jit
def _average(
    w_first, w_second, w_whole, logit_table, averaged_table, logit_scale, n, offs_n, D_SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
):  # fmt: skip
    """The same largest logit and its share, and the average of the rows of `averaged_table` (their first halves),
    weighted with the attention: `(BLOCK_N, 4 D_SEGMENT)`."""
    largest = tl.full((BLOCK_N,), -1e38, tl.float32)
    denominator = tl.zeros((BLOCK_N,), tl.float32)
    acc = tl.zeros((BLOCK_N, 4 * D_SEGMENT), tl.float32)
    for tile in range(K_TILES):
        offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        distances = distances_by_vector(
            first=w_first, second=w_second, whole=w_whole, table=logit_table, offs_k=offs_k, D_SEGMENT=D_SEGMENT,
            BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N,
        )  # fmt: skip
        numerators, rescale, largest, denominator = _online_softmax(distances, logit_scale, largest, denominator)
        acc = acc * rescale[:, None] + times(numerators, table_four(averaged_table, offs_k, 0, D_SEGMENT))
    return _largest(largest, n, offs_n), 1.0 / denominator, acc / denominator[:, None]


@triton.jit
def _store(values, target, offs_n, N, D: tl.constexpr, D_SEGMENT: tl.constexpr):
    """Write `(BLOCK_N, D_SEGMENT)` to the vectors `offs_n` of `target`."""
    offs_d = tl.arange(0, D_SEGMENT)[None, :]
    offs = offs_n[:, None] * D + offs_d
    tl.store(target + offs, values.to(target.dtype.element_ty), mask=(offs_d < D) & (offs < N))


@triton.jit
def sums(
    W, logit_table, frame, scale, partial, W_tilde, N, n, K_PADDED, program, programs, FIRST: tl.constexpr,
    D: tl.constexpr, D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
):  # fmt: skip
    """A^T [W, 1] of this program's vectors; if FIRST, also W_tilde = A C."""
    partial += program * K_PADDED * (D + 1)
    center, unit = load_frame(frame, D, D_SEGMENT, D_SEGMENT)
    logit_scale = 2 * scale * unit * unit
    acc = tl.zeros((BLOCK_K, 4 * D_SEGMENT), tl.float32)
    for first in range(program * BLOCK_N, n, programs * BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        x = load_x(W, N, offs_n, center, unit, D, D_SEGMENT)
        w_first, w_second, w_whole, w_terms = rows_of_x(x)
        if FIRST:
            largest, share, average = _average(
                w_first=w_first, w_second=w_second, w_whole=w_whole, logit_table=logit_table,
                averaged_table=logit_table, logit_scale=logit_scale, n=n, offs_n=offs_n, D_SEGMENT=D_SEGMENT,
                BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
            )  # fmt: skip
            _store(fold_segments(average, D_SEGMENT)[0] * unit + center, W_tilde, offs_n, N, D, D_SEGMENT)
        else:
            largest, share, _mean = _statistics(
                w_first=w_first, w_second=w_second, w_whole=w_whole, dA_first=w_first, dA_second=w_second,
                dA_whole=w_whole, logit_table=logit_table, logit_scale=logit_scale, n=n, offs_n=offs_n, MEAN=False,
                D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
            )  # fmt: skip
        for tile in range(K_TILES):
            offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
            distances = distances_by_centroid(
                first=w_first, second=w_second, whole=w_whole, table=logit_table, offs_k=offs_k, D_SEGMENT=D_SEGMENT,
                BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N,
            )  # fmt: skip
            contributions = times(_attention(distances, logit_scale, largest[None, :], share[None, :]), w_terms)
            if K_TILES == 1:
                acc += contributions
            else:
                _deposit(contributions, partial, offs_k, center, unit, first != program * BLOCK_N, D, D_SEGMENT)
    if K_TILES == 1:
        _deposit(acc, partial, tl.arange(0, BLOCK_K), center, unit, False, D, D_SEGMENT)


@triton.jit
def averages(
    W, logit_table, frame, scale, W_tilde, N, n, program, programs, D: tl.constexpr, D_SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
):  # fmt: skip
    """W_tilde = A C."""
    center, unit = load_frame(frame, D, D_SEGMENT, D_SEGMENT)
    for first in range(program * BLOCK_N, n, programs * BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        x = load_x(W, N, offs_n, center, unit, D, D_SEGMENT)
        w_first, w_second, w_whole, _w_terms = rows_of_x(x)
        _largest_logit, _share, average = _average(
            w_first=w_first, w_second=w_second, w_whole=w_whole, logit_table=logit_table, averaged_table=logit_table,
            logit_scale=2 * scale * unit * unit, n=n, offs_n=offs_n, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K,
            BLOCK_N=BLOCK_N, K_TILES=K_TILES,
        )  # fmt: skip
        _store(fold_segments(average, D_SEGMENT)[0] * unit + center, W_tilde, offs_n, N, D, D_SEGMENT)


# The backward pass.  With UPDATE it goes through C' = (A^T W) / mass, where dA = h (w - c'), otherwise through the
# output W_tilde = A C, where dA = g c.


@triton.jit
def _through_softmax(
    w_first, w_second, w_whole, dA_first, dA_second, dA_whole, logit_table, dA_table, logit_scale, offs_k, largest,
    share, mean, slope, D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A and dlogits = A (dA - mean) slope, `(BLOCK_N, BLOCK_K)`; `mean` and `slope` are in the unit of dA."""
    distances = distances_by_vector(
        first=w_first, second=w_second, whole=w_whole, table=logit_table, offs_k=offs_k, D_SEGMENT=D_SEGMENT,
        BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    A = _attention(distances, logit_scale, largest[:, None], share[:, None])
    dA = product_dA(dA_first, dA_second, dA_whole, dA_table, offs_k, D_SEGMENT, BLOCK_K, BLOCK_N)
    return A, A * ((dA - mean[:, None]) * slope)


@triton.jit
def _outside_softmax(
    w_first, w_second, w_whole, dA_first, dA_second, dA_whole, x, logit_table, dA_table, logit_scale, n, offs_n,
    UPDATE: tl.constexpr, D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    K_TILES: tl.constexpr,
):  # fmt: skip
    """The largest logit, its share of the attention and the mean of dA, `(BLOCK_N,)` each, and what the vectors receive
    on other ways than through the softmax, `(BLOCK_N, 4 D_SEGMENT)`, in the unit of the tables."""
    if UPDATE:  # the mean of h (w - c') is w (A h) plus the mean of the offsets
        largest, share, average = _average(
            w_first=w_first, w_second=w_second, w_whole=w_whole, logit_table=logit_table, averaged_table=dA_table,
            logit_scale=logit_scale, n=n, offs_n=offs_n, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N,
            K_TILES=K_TILES,
        )  # fmt: skip
        values, offset = fold_segments(average, D_SEGMENT)
        # in place of the offsets, the sum of dlogits is added up
        values_only = tl.where((tl.arange(0, 4 * D_SEGMENT) < 3 * D_SEGMENT)[None, :], average, 0.0)
        return largest, share, tl.sum(values * x, 1) + offset, values_only
    else:
        largest, share, mean = _statistics(
            w_first=w_first, w_second=w_second, w_whole=w_whole, dA_first=dA_first, dA_second=dA_second,
            dA_whole=dA_whole, logit_table=logit_table, logit_scale=logit_scale, n=n, offs_n=offs_n, MEAN=True,
            D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
        )  # fmt: skip
        return largest, share, mean, tl.zeros((BLOCK_N, 4 * D_SEGMENT), tl.float32)


@triton.jit
def _received(acc, x, unit, D_SEGMENT: tl.constexpr):
    """dW `(BLOCK_N, D_SEGMENT)`, from the sums over centroids in the unit of the tables.

    The dlogits of a vector add up to zero, but for rounding.  Without their sum, their errors would count with the
    length of the centroids, and not with their distance from the vector.
    """
    values, total = fold_segments(acc, D_SEGMENT)
    return (values - total[:, None] * x) * unit


@triton.jit
def gradient_sums(
    G, W, logit_table, H_table, frame, scale, slope, partial, dW, N, n, K_PADDED, PARTIAL_ROWS, program, programs,
    UPDATE: tl.constexpr, ADD_TO_DW: tl.constexpr, SUM_DC: tl.constexpr, D: tl.constexpr, D_SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
):  # fmt: skip
    """SUM_DC: what the centroids receive from this program's vectors, added to one of the rows of `partial`.  It is the
    sum of dlogits (w - center) over the vectors and, through the output, of A g; in the last column the sum of dlogits.

    ADD_TO_DW: what the vectors receive.  The output, which comes first, writes it to dW, the updates add to that.
    """
    partial += program % PARTIAL_ROWS * K_PADDED * (D + 1)
    dA_table = H_table if UPDATE else logit_table
    center, unit = load_frame(frame, D, D_SEGMENT, D_SEGMENT)
    logit_scale = 2 * scale * unit * unit
    slope = slope * unit * unit
    zero = tl.zeros_like(center)
    acc = tl.zeros((BLOCK_K, 4 * D_SEGMENT), tl.float32)
    for first in range(program * BLOCK_N, n, programs * BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        x = load_x(W, N, offs_n, center, unit, D, D_SEGMENT)
        w_first, w_second, w_whole, w_terms = rows_of_x(x)
        dA_first, dA_second, dA_whole, g_terms = w_first, w_second, w_whole, w_terms
        if not UPDATE:
            g = load_vectors(G, N, offs_n, D, D_SEGMENT)
            dA_first, dA_second, dA_whole, g_terms = rows_of_g(g * inverse(unit))
        largest, share, mean, dw = _outside_softmax(
            w_first=w_first, w_second=w_second, w_whole=w_whole, dA_first=dA_first, dA_second=dA_second,
            dA_whole=dA_whole, x=x, logit_table=logit_table, dA_table=dA_table, logit_scale=logit_scale, n=n,
            offs_n=offs_n, UPDATE=UPDATE, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
        )  # fmt: skip
        before = tl.zeros((BLOCK_N, D_SEGMENT), tl.float32)
        if ADD_TO_DW and UPDATE:
            # read here, early: when it is needed, everything would wait for the memory
            before = load_vectors(dW, N, offs_n, D, D_SEGMENT)
        for tile in range(K_TILES):
            offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
            A, dlogits = _through_softmax(
                w_first=w_first, w_second=w_second, w_whole=w_whole, dA_first=dA_first, dA_second=dA_second,
                dA_whole=dA_whole, logit_table=logit_table, dA_table=dA_table, logit_scale=logit_scale, offs_k=offs_k,
                largest=largest, share=share, mean=mean, slope=slope, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K,
                BLOCK_N=BLOCK_N,
            )  # fmt: skip
            if ADD_TO_DW:
                dw += times(dlogits, table_four(logit_table, offs_k, 0, D_SEGMENT))
            if SUM_DC:
                received = transposed_times(dlogits, w_terms)
                if not UPDATE:
                    received += transposed_times(A, g_terms)
                if K_TILES == 1:
                    acc += received
                else:
                    _deposit(received, partial, offs_k, zero, unit, True, D, D_SEGMENT)
        if ADD_TO_DW:
            _store(_received(dw, x, unit, D_SEGMENT) + before, dW, offs_n, N, D, D_SEGMENT)
    if SUM_DC and K_TILES == 1:
        _deposit(acc, partial, tl.arange(0, BLOCK_K), zero, unit, True, D, D_SEGMENT)


@triton.jit
def _vector_gradients(
    w_first, w_second, w_whole, dA_first, dA_second, dA_whole, x, logit_table, dA_table, logit_scale, n, offs_n,
    slope, UPDATE: tl.constexpr, D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    K_TILES: tl.constexpr,
):  # fmt: skip
    """What the vectors receive from all centroids, `(BLOCK_N, 4 D_SEGMENT)`, in the unit of the tables."""
    largest, share, mean, result = _outside_softmax(
        w_first=w_first, w_second=w_second, w_whole=w_whole, dA_first=dA_first, dA_second=dA_second,
        dA_whole=dA_whole, x=x, logit_table=logit_table, dA_table=dA_table, logit_scale=logit_scale, n=n,
        offs_n=offs_n, UPDATE=UPDATE, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
    )  # fmt: skip
    for tile in range(K_TILES):
        offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        _A, dlogits = _through_softmax(
            w_first=w_first, w_second=w_second, w_whole=w_whole, dA_first=dA_first, dA_second=dA_second,
            dA_whole=dA_whole, logit_table=logit_table, dA_table=dA_table, logit_scale=logit_scale, offs_k=offs_k,
            largest=largest, share=share, mean=mean, slope=slope, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K,
            BLOCK_N=BLOCK_N,
        )  # fmt: skip
        result += times(dlogits, table_four(logit_table, offs_k, 0, D_SEGMENT))
    return result


@triton.jit
def gradient(
    G, W, logit_tables, H_tables, frame, scale, slope, dW, N, n, output_row, first_update, end_update, slot_shift,
    table_size, program, programs, D: tl.constexpr, D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
):  # fmt: skip
    """dW: through W_tilde, which row `output_row` of the trail made, and through the updates of the iterations
    first_update ... end_update - 1."""
    center, unit = load_frame(frame, D, D_SEGMENT, D_SEGMENT)
    logit_scale = 2 * scale * unit * unit
    slope = slope * unit * unit
    for first in range(program * BLOCK_N, n, programs * BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        x = load_x(W, N, offs_n, center, unit, D, D_SEGMENT)
        w_first, w_second, w_whole, _w_terms = rows_of_x(x)
        g = load_vectors(G, N, offs_n, D, D_SEGMENT)
        g_first, g_second, g_whole, _g_terms = rows_of_g(g * inverse(unit))
        logit_table = logit_tables + output_row * table_size
        acc = _vector_gradients(
            w_first=w_first, w_second=w_second, w_whole=w_whole, dA_first=g_first, dA_second=g_second,
            dA_whole=g_whole, x=x, logit_table=logit_table, dA_table=logit_table, logit_scale=logit_scale, n=n,
            offs_n=offs_n, slope=slope, UPDATE=False, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N,
            K_TILES=K_TILES,
        )  # fmt: skip
        for t in range(first_update, end_update):
            acc += _vector_gradients(
                w_first=w_first, w_second=w_second, w_whole=w_whole, dA_first=w_first, dA_second=w_second,
                dA_whole=w_whole, x=x, logit_table=logit_tables + t * table_size, dA_table=H_tables + (t + slot_shift)
                * table_size, logit_scale=logit_scale, n=n, offs_n=offs_n, slope=slope, UPDATE=True,
                D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
            )  # fmt: skip
        _store(_received(acc, x, unit, D_SEGMENT), dW, offs_n, N, D, D_SEGMENT)
