"""Distances as differences, coordinate by coordinate: any metric, and the fastest way for d = 1 or few centroids.

Tiles are `(centroids, vectors)` or, with coordinates, `(coordinates, centroids, vectors)`.  A thread owns whole columns
of a tile, so that sums over centroids and coordinates stay in its registers.  Sums over vectors, which need all
threads, are taken once, at the end.  More than BLOCK_K centroids are walked tile by tile, with an online softmax.

`c0`, `h0` and `offset0` belong to the first tile of centroids, which stays in registers during the walk over vectors.
K_TILES may be known only at run time where it is not declared as a constant: `windows` uses it that way.

Names are explained in the glossary of `triton/__init__.py`.
"""

import triton
import triton.language as tl

FAR = tl.constexpr(1e18)  # where the centroids that fill up the last tile are: attention to them is exactly zero


@triton.jit
def load_vectors(X, N, offs_n, D: tl.constexpr, D_PADDED: tl.constexpr):
    """The vectors as columns, `(D_PADDED, BLOCK_N)`, zero past the last coordinate and past the last value."""
    offs_d = tl.arange(0, D_PADDED)[:, None]
    offs = offs_n[None, :] * D + offs_d
    return tl.load(X + offs, mask=(offs_d < D) & (offs < N), other=0.0).to(tl.float32)


@triton.jit
def load_centroids(C, offs_k, K, STRIDE: tl.constexpr, other, D: tl.constexpr, D_PADDED: tl.constexpr):
    """The centroids `offs_k` as columns, `(D_PADDED, BLOCK_K)`; `other` past the last centroid."""
    offs_d = tl.arange(0, D_PADDED)[:, None]
    c = tl.load(C + offs_k[None, :] * STRIDE + offs_d, mask=(offs_d < D) & (offs_k < K)[None, :], other=0.0)
    return tl.where((offs_d < D) & (offs_k >= K)[None, :], other, c)


@triton.jit
def distances(w, c, EUCLIDEAN: tl.constexpr):
    """`(BLOCK_K, BLOCK_N)`.  For d = 1 they are never squared, which `logits` does; else as the metric says."""
    difference = w[:, None, :] - c[:, :, None]
    if w.shape[0] == 1:
        return tl.sum(tl.abs(difference), 0)
    result = tl.sum(difference * difference, 0)
    if EUCLIDEAN:
        result = tl.sqrt(result)
    return result


@triton.jit
def logits(nearest, distance, scale, EUCLIDEAN: tl.constexpr, D: tl.constexpr):
    """Logits in units of log 2, relative to the logit of the nearest centroid."""
    if D == 1 and not EUCLIDEAN:
        # nearest^2 - distance^2, without rounding the squares: at low temperatures their difference decides
        return (nearest - distance) * scale * (nearest + distance)
    return (nearest - distance) * scale


@triton.jit
def statistics(
    w, c0, C, K, scale, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr, K_TILES,
    EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """Of each vector, the distance to the nearest centroid and the softmax denominator relative to it: `(BLOCK_N,)`."""
    distance = distances(w, c0, EUCLIDEAN)
    nearest = tl.min(distance, 0)
    denominator = tl.sum(tl.exp2(logits(nearest[None, :], distance, scale, EUCLIDEAN, D)), 0)
    for tile in range(1, K_TILES):
        c = load_centroids(C, tile * BLOCK_K + tl.arange(0, BLOCK_K), K, D + 1, FAR, D, D_PADDED)
        distance = distances(w, c, EUCLIDEAN)
        nearer = tl.minimum(nearest, tl.min(distance, 0))
        rescale = tl.exp2(logits(nearer, nearest, scale, EUCLIDEAN, D))
        denominator = denominator * rescale + tl.sum(tl.exp2(logits(nearer[None, :], distance, scale, EUCLIDEAN, D)), 0)
        nearest = nearer
    return nearest, denominator


@triton.jit
def deposit(received, mass, partial, offs_k, add, D: tl.constexpr, D_PADDED: tl.constexpr):
    """Write `(D_PADDED, BLOCK_K)` and `(BLOCK_K,)` to this program's row of `partial`, or add them to what is there."""
    offs_d = tl.arange(0, D_PADDED)[:, None]
    ptrs = partial + offs_k[None, :] * (D + 1) + offs_d
    mass_ptrs = partial + offs_k * (D + 1) + D
    if add:
        received += tl.load(ptrs, mask=offs_d < D, other=0.0)
        mass += tl.load(mass_ptrs)
    tl.store(ptrs, received, mask=offs_d < D)
    tl.store(mass_ptrs, mass)


@triton.jit
def sums(
    W, counts, C, scale, partial, W_tilde, N, n, K, K_PADDED, program, programs, FIRST: tl.constexpr, D: tl.constexpr,
    D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
    EUCLIDEAN: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """A^T [W, 1] of this program's vectors, with COUNTS each of them `counts` times; if FIRST, also W_tilde = A C."""
    partial += program * K_PADDED * (D + 1)
    c0 = load_centroids(C, tl.arange(0, BLOCK_K), K, D + 1, FAR, D, D_PADDED)
    acc = tl.zeros((D_PADDED, BLOCK_K, BLOCK_N), tl.float32)
    mass = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for first in range(program * BLOCK_N, n, programs * BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        w = load_vectors(W, N, offs_n, D, D_PADDED)
        nearest, denominator = statistics(
            w=w, c0=c0, C=C, K=K, scale=scale, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES,
            EUCLIDEAN=EUCLIDEAN,
        )  # fmt: skip
        share = tl.where(offs_n < n, 1.0 / denominator, 0.0)
        if COUNTS:
            share *= tl.load(counts + offs_n, mask=offs_n < n, other=0).to(tl.float32)
        average = tl.zeros((D_PADDED, BLOCK_N), tl.float32)
        for tile in range(K_TILES):
            offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
            if K_TILES == 1:
                c = c0
            else:
                c = load_centroids(C, offs_k, K, D + 1, FAR, D, D_PADDED)
            numerators = tl.exp2(logits(nearest[None, :], distances(w, c, EUCLIDEAN), scale, EUCLIDEAN, D))
            if FIRST:
                average += tl.sum(numerators[None, :, :] * c[:, :, None], 1)
            received = numerators[None, :, :] * (w * share[None, :])[:, None, :]
            if K_TILES == 1:
                acc += received
                mass += numerators * share[None, :]
            else:
                received = tl.sum(received, 2)
                added_mass = tl.sum(numerators * share[None, :], 1)
                deposit(received, added_mass, partial, offs_k, first != program * BLOCK_N, D, D_PADDED)
        if FIRST:
            _store(average / denominator[None, :], W_tilde, offs_n, N, False, D, D_PADDED)
    if K_TILES == 1:
        deposit(tl.sum(acc, 2), tl.sum(mass, 1), partial, tl.arange(0, BLOCK_K), False, D, D_PADDED)


@triton.jit
def averages(
    W, C, scale, W_tilde, N, n, K, program, programs, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, K_TILES: tl.constexpr, EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """W_tilde = A C."""
    c0 = load_centroids(C, tl.arange(0, BLOCK_K), K, D + 1, FAR, D, D_PADDED)
    for first in range(program * BLOCK_N, n, programs * BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        w = load_vectors(W, N, offs_n, D, D_PADDED)
        nearest, denominator = statistics(
            w=w, c0=c0, C=C, K=K, scale=scale, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES,
            EUCLIDEAN=EUCLIDEAN,
        )  # fmt: skip
        numerators = tl.exp2(logits(nearest[None, :], distances(w, c0, EUCLIDEAN), scale, EUCLIDEAN, D))
        result = tl.sum(numerators[None, :, :] * c0[:, :, None], 1)
        for tile in range(1, K_TILES):
            c = load_centroids(C, tile * BLOCK_K + tl.arange(0, BLOCK_K), K, D + 1, FAR, D, D_PADDED)
            numerators = tl.exp2(logits(nearest[None, :], distances(w, c, EUCLIDEAN), scale, EUCLIDEAN, D))
            result += tl.sum(numerators[None, :, :] * c[:, :, None], 1)
        _store(result / denominator[None, :], W_tilde, offs_n, N, False, D, D_PADDED)


# The backward pass.  With UPDATE it goes through C' = (A^T W) / mass, where dA = h (w - c'), otherwise through the
# output W_tilde = A C, where dA = g c.  `H` is `(k, d + 1)`: h, and h . c' in the last column.


@triton.jit
def load_gradient_tiles(C, C_next, H, offs_k, K, UPDATE: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr):
    """c and h, `(D_PADDED, BLOCK_K)`, and `(BLOCK_K,)` the offset of dA: h . c' or, for d = 1, c' itself."""
    c = load_centroids(C, offs_k, K, D + 1, FAR, D, D_PADDED)
    if UPDATE:
        h = load_centroids(H, offs_k, K, D + 1, 0.0, D, D_PADDED)
        if D == 1:
            return c, h, tl.load(C_next + offs_k * (D + 1), mask=offs_k < K, other=0.0)
        return c, h, tl.load(H + offs_k * (D + 1) + D, mask=offs_k < K, other=0.0)
    else:
        return c, c, tl.zeros_like(offs_k).to(tl.float32)


@triton.jit
def attention_gradient(w, g, c, h, offset, UPDATE: tl.constexpr, D: tl.constexpr):
    """dA, `(BLOCK_K, BLOCK_N)`."""
    if UPDATE:
        if D == 1:  # h (w - c') and not h w - h c': neighbouring centroids are close, and the products would cancel
            return tl.sum(h[:, :, None] * (w[:, None, :] - offset[None, :, None]), 0)
        return tl.sum(h[:, :, None] * w[:, None, :], 0) - offset[:, None]
    return tl.sum(g[:, None, :] * c[:, :, None], 0)


@triton.jit
def mean_attention_gradient(
    w, g, nearest, denominator, c0, h0, offset0, C, C_next, H, K, scale, UPDATE: tl.constexpr, D: tl.constexpr,
    D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr, K_TILES, EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """The sum of A dA over the centroids, `(BLOCK_N,)`."""
    numerators = tl.exp2(logits(nearest[None, :], distances(w, c0, EUCLIDEAN), scale, EUCLIDEAN, D))
    total = tl.sum(numerators * attention_gradient(w, g, c0, h0, offset0, UPDATE, D), 0)
    for tile in range(1, K_TILES):
        offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        c, h, offset = load_gradient_tiles(C, C_next, H, offs_k, K, UPDATE, D, D_PADDED)
        numerators = tl.exp2(logits(nearest[None, :], distances(w, c, EUCLIDEAN), scale, EUCLIDEAN, D))
        total += tl.sum(numerators * attention_gradient(w, g, c, h, offset, UPDATE, D), 0)
    return total / denominator


@triton.jit
def through_softmax(
    w, g, nearest, mean, c, h, offset, scale, UPDATE: tl.constexpr, D: tl.constexpr, EUCLIDEAN: tl.constexpr
):
    """The numerators of A, and with them A (dA - mean) before its division by the denominator; for the plain distance,
    the latter is divided by the distance."""
    distance = distances(w, c, EUCLIDEAN)
    numerators = tl.exp2(logits(nearest[None, :], distance, scale, EUCLIDEAN, D))
    dlogits = numerators * (attention_gradient(w, g, c, h, offset, UPDATE, D) - mean[None, :])
    if EUCLIDEAN:
        dlogits = tl.where(distance > 0, dlogits / distance, 0.0)
    return numerators, dlogits


@triton.jit
def gradient_sums(
    G, W, counts, C, C_next, H, scale, slope, partial, dW, N, n, K, K_PADDED, program, programs, UPDATE: tl.constexpr,
    ADD_TO_DW: tl.constexpr, SUM_DC: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, K_TILES: tl.constexpr, EUCLIDEAN: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """SUM_DC: what the centroids receive from this program's vectors, to `partial`, whose last column is zero.  It is
    the sum of dlogits (w - c) over the vectors and, through the output, of A g.

    ADD_TO_DW: what the vectors receive.  The output, which comes first, writes it to dW, the updates add to that.
    """
    partial += program * K_PADDED * (D + 1)
    c0, h0, offset0 = load_gradient_tiles(C, C_next, H, tl.arange(0, BLOCK_K), K, UPDATE, D, D_PADDED)
    acc = tl.zeros((D_PADDED, BLOCK_K, BLOCK_N), tl.float32)
    for first in range(program * BLOCK_N, n, programs * BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        w = load_vectors(W, N, offs_n, D, D_PADDED)
        g = w
        if not UPDATE:
            g = load_vectors(G, N, offs_n, D, D_PADDED)
        nearest, denominator = statistics(
            w=w, c0=c0, C=C, K=K, scale=scale, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES,
            EUCLIDEAN=EUCLIDEAN,
        )  # fmt: skip
        mean = mean_attention_gradient(
            w=w, g=g, nearest=nearest, denominator=denominator, c0=c0, h0=h0, offset0=offset0, C=C, C_next=C_next,
            H=H, K=K, scale=scale, UPDATE=UPDATE, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES,
            EUCLIDEAN=EUCLIDEAN,
        )  # fmt: skip
        share = tl.where(offs_n < n, 1.0 / denominator, 0.0)
        if COUNTS and UPDATE:  # through the output, G is already a sum over equal weights
            share *= tl.load(counts + offs_n, mask=offs_n < n, other=0).to(tl.float32)
        dw = tl.zeros((D_PADDED, BLOCK_N), tl.float32)
        for tile in range(K_TILES):
            offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
            if K_TILES == 1:
                c, h, offset = c0, h0, offset0
            else:
                c, h, offset = load_gradient_tiles(C, C_next, H, offs_k, K, UPDATE, D, D_PADDED)
            numerators, dlogits = through_softmax(
                w=w, g=g, nearest=nearest, mean=mean, c=c, h=h, offset=offset, scale=scale, UPDATE=UPDATE, D=D,
                EUCLIDEAN=EUCLIDEAN,
            )  # fmt: skip
            if ADD_TO_DW:
                dw += _vector_gradients_of_tile(numerators, dlogits * slope, w, c, h, UPDATE)
            if SUM_DC:
                dlogits = dlogits * (share * slope)[None, :]
                received = dlogits[None, :, :] * (w[:, None, :] - c[:, :, None])
                if not UPDATE:
                    received += numerators[None, :, :] * (g * share[None, :])[:, None, :]
                if K_TILES == 1:
                    acc += received
                else:
                    zeros = tl.zeros((BLOCK_K,), tl.float32)
                    deposit(tl.sum(received, 2), zeros, partial, offs_k, first != program * BLOCK_N, D, D_PADDED)
        if ADD_TO_DW:
            _store(dw / denominator[None, :], dW, offs_n, N, UPDATE, D, D_PADDED)
    if SUM_DC and K_TILES == 1:
        zeros = tl.zeros((BLOCK_K,), tl.float32)
        deposit(tl.sum(acc, 2), zeros, partial, tl.arange(0, BLOCK_K), False, D, D_PADDED)


@triton.jit
def _vector_gradients_of_tile(numerators, dlogits, w, c, h, UPDATE: tl.constexpr):
    """What the vectors receive from a tile of centroids, `(D_PADDED, BLOCK_N)`, before the division by the denominator:
    dlogits (c - w) and, through an update, A h."""
    dw = tl.sum(dlogits[None, :, :] * (c[:, :, None] - w[:, None, :]), 1)
    if UPDATE:
        dw += tl.sum(numerators[None, :, :] * h[:, :, None], 1)
    return dw


@triton.jit
def _store(values, target, offs_n, N, add, D: tl.constexpr, D_PADDED: tl.constexpr):
    """Write `(D_PADDED, BLOCK_N)` to the vectors `offs_n` of `target`, or add it to what is there."""
    offs_d = tl.arange(0, D_PADDED)[:, None]
    offs = offs_n[None, :] * D + offs_d
    mask = (offs_d < D) & (offs < N)
    if add:
        values += tl.load(target + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + offs, values.to(target.dtype.element_ty), mask=mask)


@triton.jit
def vector_gradients(
    w, g, C, C_next, H, K, scale, slope, UPDATE: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    BLOCK_K: tl.constexpr, K_TILES, EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """What the vectors receive from all centroids, `(D_PADDED, BLOCK_N)`."""
    c, h, offset = load_gradient_tiles(C, C_next, H, tl.arange(0, BLOCK_K), K, UPDATE, D, D_PADDED)
    nearest, denominator = statistics(
        w=w, c0=c, C=C, K=K, scale=scale, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES,
        EUCLIDEAN=EUCLIDEAN,
    )  # fmt: skip
    mean = mean_attention_gradient(
        w=w, g=g, nearest=nearest, denominator=denominator, c0=c, h0=h, offset0=offset, C=C, C_next=C_next, H=H, K=K,
        scale=scale, UPDATE=UPDATE, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES, EUCLIDEAN=EUCLIDEAN,
    )  # fmt: skip
    numerators, dlogits = through_softmax(
        w=w, g=g, nearest=nearest, mean=mean, c=c, h=h, offset=offset, scale=scale, UPDATE=UPDATE, D=D,
        EUCLIDEAN=EUCLIDEAN,
    )  # fmt: skip
    dw = _vector_gradients_of_tile(numerators, dlogits * slope, w, c, h, UPDATE)
    for tile in range(1, K_TILES):
        offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        c, h, offset = load_gradient_tiles(C, C_next, H, offs_k, K, UPDATE, D, D_PADDED)
        numerators, dlogits = through_softmax(
            w=w, g=g, nearest=nearest, mean=mean, c=c, h=h, offset=offset, scale=scale, UPDATE=UPDATE, D=D,
            EUCLIDEAN=EUCLIDEAN,
        )  # fmt: skip
        dw += _vector_gradients_of_tile(numerators, dlogits * slope, w, c, h, UPDATE)
    return dw / denominator[None, :]


@triton.jit
def gradient(
    G, W, trail, H_slots, scale, slope, dW, N, n, K, output_row, first_update, end_update, slot_shift, program,
    programs, OUTPUT: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, K_TILES: tl.constexpr, EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """dW: if OUTPUT, through W_tilde, which row `output_row` of the trail made; and through the updates of the
    iterations first_update ... end_update - 1."""
    stride = K * (D + 1)
    for first in range(program * BLOCK_N, n, programs * BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        w = load_vectors(W, N, offs_n, D, D_PADDED)
        dw = tl.zeros((D_PADDED, BLOCK_N), tl.float32)
        if OUTPUT:
            C = trail + output_row * stride
            g = load_vectors(G, N, offs_n, D, D_PADDED)
            dw = vector_gradients(
                w=w, g=g, C=C, C_next=C, H=H_slots, K=K, scale=scale, slope=slope, UPDATE=False, D=D,
                D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES, EUCLIDEAN=EUCLIDEAN,
            )  # fmt: skip
        for t in range(first_update, end_update):
            C = trail + t * stride
            dw += vector_gradients(
                w=w, g=w, C=C, C_next=C + stride, H=H_slots + (t + slot_shift) * stride, K=K, scale=scale,
                slope=slope, UPDATE=True, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES,
                EUCLIDEAN=EUCLIDEAN,
            )  # fmt: skip
        _store(dw, dW, offs_n, N, False, D, D_PADDED)
