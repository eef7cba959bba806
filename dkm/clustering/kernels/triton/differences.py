"""Distances by differences, coordinate by coordinate: any metric; the fastest for d = 1 and for few centroids.

Tiles are `(centroids, vectors)` or, with coordinates, `(DP, centroids, vectors)`: a thread owns whole columns, so
that sums over centroids and coordinates stay in its registers.  Sums over vectors are taken once, at the end.
More than BK centroids are walked in tiles, with an online softmax.
"""

import triton
import triton.language as tl

FAR = tl.constexpr(1e18)  # where centroids past the last one are: attention to them is exactly zero


@triton.jit
def _vectors(X, N, rows, D: tl.constexpr, DP: tl.constexpr):
    """The vectors as columns, `(DP, BN)`, zero past the last coordinate and the last value."""
    i = tl.arange(0, DP)[:, None]
    at = rows[None, :] * D + i
    return tl.load(X + at, mask=(i < D) & (at < N), other=0.0).to(tl.float32)


@triton.jit
def _centroids(C, ks, K, STRIDE: tl.constexpr, other, D: tl.constexpr, DP: tl.constexpr):
    """The centroids `ks` as columns, `(DP, BK)`; past the last one, `other`."""
    i = tl.arange(0, DP)[:, None]
    c = tl.load(C + ks[None, :] * STRIDE + i, mask=(i < D) & (ks < K)[None, :], other=0.0)
    return tl.where((i < D) & (ks >= K)[None, :], other, c)


@triton.jit
def _distance(w, c, EUCLIDEAN: tl.constexpr):
    """`(BK, BN)`; where `_logits` squares them, not yet squared."""
    difference = w[:, None, :] - c[:, :, None]
    if w.shape[0] == 1:
        return tl.sum(tl.abs(difference), 0)
    result = tl.sum(difference * difference, 0)
    if EUCLIDEAN:
        result = tl.sqrt(result)
    return result


@triton.jit
def _logits(near, L, scale, EUCLIDEAN: tl.constexpr, D: tl.constexpr):
    """Relative to that of the nearest, in units of log 2."""
    if D == 1 and not EUCLIDEAN:
        # near^2 - L^2, without rounding the squares: of near ones and low temperatures, it is all that matters
        return (near - L) * scale * (near + L)
    return (near - L) * scale


@triton.jit
def _statistics(w, c0, C, K, scale, D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, NK, EUCLIDEAN: tl.constexpr):
    """Of each vector: the distance to the nearest centroid, and the softmax denominator relative to it."""
    L = _distance(w, c0, EUCLIDEAN)
    near = tl.min(L, 0)
    z = tl.sum(tl.exp2(_logits(near[None, :], L, scale, EUCLIDEAN, D)), 0)
    for tile in range(1, NK):
        L = _distance(w, _centroids(C, tile * BK + tl.arange(0, BK), K, D + 1, FAR, D, DP), EUCLIDEAN)
        nearer = tl.minimum(near, tl.min(L, 0))
        fade = tl.exp2(_logits(nearer, near, scale, EUCLIDEAN, D))
        z = z * fade + tl.sum(tl.exp2(_logits(nearer[None, :], L, scale, EUCLIDEAN, D)), 0)
        near = nearer
    return near, z


@triton.jit
def _deposit(received, mass, partial, ks, add, D: tl.constexpr, DP: tl.constexpr):
    """`(DP, BK)` and `(BK,)` into this program's rows of `partial`, `(KP, D + 1)`."""
    i = tl.arange(0, DP)[:, None]
    at = partial + ks[None, :] * (D + 1) + i
    end = partial + ks * (D + 1) + D
    if add:
        received += tl.load(at, mask=i < D, other=0.0)
        mass += tl.load(end)
    tl.store(at, received, mask=i < D)
    tl.store(end, mass)


@triton.jit
def sums(
    W, counts, C, scale, partial, W_tilde, N, n, K, KP, program, programs, FIRST: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr, EUCLIDEAN: tl.constexpr,
    COUNTS: tl.constexpr,
):  # fmt: skip
    """A^T [W, 1] of this program's vectors, each counted `counts` times; FIRST: and W_tilde."""
    partial += program * KP * (D + 1)
    c0 = _centroids(C, tl.arange(0, BK), K, D + 1, FAR, D, DP)
    acc = tl.zeros((DP, BK, BN), tl.float32)
    mass = tl.zeros((BK, BN), tl.float32)
    for first in range(program * BN, n, programs * BN):
        rows = first + tl.arange(0, BN)
        w = _vectors(W, N, rows, D, DP)
        near, z = _statistics(w, c0, C, K, scale, D, DP, BK, NK, EUCLIDEAN)
        share = tl.where(rows < n, 1.0 / z, 0.0)
        if COUNTS:
            share *= tl.load(counts + rows, mask=rows < n, other=0).to(tl.float32)
        average = tl.zeros((DP, BN), tl.float32)
        for tile in range(NK):
            ks = tile * BK + tl.arange(0, BK)
            if NK == 1:
                c = c0
            else:
                c = _centroids(C, ks, K, D + 1, FAR, D, DP)
            P = tl.exp2(_logits(near[None, :], _distance(w, c, EUCLIDEAN), scale, EUCLIDEAN, D))
            if FIRST:
                average += tl.sum(P[None, :, :] * c[:, :, None], 1)
            received = P[None, :, :] * (w * share[None, :])[:, None, :]
            if NK == 1:
                acc += received
                mass += P * share[None, :]
            else:
                _deposit(tl.sum(received, 2), tl.sum(P * share[None, :], 1), partial, ks, first != program * BN, D, DP)
        if FIRST:
            _store(average / z[None, :], W_tilde, rows, N, False, D, DP)
    if NK == 1:
        _deposit(tl.sum(acc, 2), tl.sum(mass, 1), partial, tl.arange(0, BK), False, D, DP)


@triton.jit
def averages(
    W, C, scale, W_tilde, N, n, K, program, programs, D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, NK: tl.constexpr, EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """W_tilde = A C."""
    c0 = _centroids(C, tl.arange(0, BK), K, D + 1, FAR, D, DP)
    for first in range(program * BN, n, programs * BN):
        rows = first + tl.arange(0, BN)
        w = _vectors(W, N, rows, D, DP)
        near, z = _statistics(w, c0, C, K, scale, D, DP, BK, NK, EUCLIDEAN)
        P = tl.exp2(_logits(near[None, :], _distance(w, c0, EUCLIDEAN), scale, EUCLIDEAN, D))
        result = tl.sum(P[None, :, :] * c0[:, :, None], 1)
        for tile in range(1, NK):
            c = _centroids(C, tile * BK + tl.arange(0, BK), K, D + 1, FAR, D, DP)
            P = tl.exp2(_logits(near[None, :], _distance(w, c, EUCLIDEAN), scale, EUCLIDEAN, D))
            result += tl.sum(P[None, :, :] * c[:, :, None], 1)
        _store(result / z[None, :], W_tilde, rows, N, False, D, DP)


# Backward.  UPDATE: through C' = (A^T W) / mass, where dA = h (w - c'); else through W_tilde = A C, where dA = g c.
# `H` is `(k, d + 1)`: h, and in the last column h . c'.


@triton.jit
def _tables(C, C_next, H, ks, K, UPDATE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """`(DP, BK)` c and h, and `(BK,)` what dA is relative to."""
    c = _centroids(C, ks, K, D + 1, FAR, D, DP)
    if UPDATE:
        h = _centroids(H, ks, K, D + 1, 0.0, D, DP)
        if D == 1:
            return c, h, tl.load(C_next + ks * (D + 1), mask=ks < K, other=0.0)
        return c, h, tl.load(H + ks * (D + 1) + D, mask=ks < K, other=0.0)
    else:
        return c, c, tl.zeros_like(ks).to(tl.float32)


@triton.jit
def _dA(w, g, c, h, o, UPDATE: tl.constexpr, D: tl.constexpr):
    if UPDATE:
        if D == 1:  # by differences: neighbouring levels are close to each other, and the products cancel
            return tl.sum(h[:, :, None] * (w[:, None, :] - o[None, :, None]), 0)
        return tl.sum(h[:, :, None] * w[:, None, :], 0) - o[:, None]
    return tl.sum(g[:, None, :] * c[:, :, None], 0)


@triton.jit
def _mean(
    w, g, near, z, c0, h0, o0, C, C_next, H, K, scale, UPDATE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BK: tl.constexpr, NK, EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """`(BN,)`: sum_j A dA."""
    P = tl.exp2(_logits(near[None, :], _distance(w, c0, EUCLIDEAN), scale, EUCLIDEAN, D))
    total = tl.sum(P * _dA(w, g, c0, h0, o0, UPDATE, D), 0)
    for tile in range(1, NK):
        c, h, o = _tables(C, C_next, H, tile * BK + tl.arange(0, BK), K, UPDATE, D, DP)
        P = tl.exp2(_logits(near[None, :], _distance(w, c, EUCLIDEAN), scale, EUCLIDEAN, D))
        total += tl.sum(P * _dA(w, g, c, h, o, UPDATE, D), 0)
    return total / z


@triton.jit
def _through_softmax(w, g, near, mean, c, h, o, scale, UPDATE: tl.constexpr, D: tl.constexpr, EUCLIDEAN: tl.constexpr):
    """P, and P (dA - mean) over the plain distance where that is the metric."""
    L = _distance(w, c, EUCLIDEAN)
    P = tl.exp2(_logits(near[None, :], L, scale, EUCLIDEAN, D))
    e = P * (_dA(w, g, c, h, o, UPDATE, D) - mean[None, :])
    if EUCLIDEAN:
        e = tl.where(L > 0, e / L, 0.0)
    return P, e


@triton.jit
def gradient_sums(
    G, W, counts, C, C_next, H, scale, slope, partial, dW, N, n, K, KP, program, programs, UPDATE: tl.constexpr,
    PUSH: tl.constexpr, RECEIVE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    NK: tl.constexpr, EUCLIDEAN: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """RECEIVE: what the centroids receive, sum_i e (w - c) and, from the output, A g.  The last column is zero.

    PUSH: what the vectors receive, added to dW but from the output, which comes first.
    """
    partial += program * KP * (D + 1)
    c0, h0, o0 = _tables(C, C_next, H, tl.arange(0, BK), K, UPDATE, D, DP)
    acc = tl.zeros((DP, BK, BN), tl.float32)
    for first in range(program * BN, n, programs * BN):
        rows = first + tl.arange(0, BN)
        w = _vectors(W, N, rows, D, DP)
        g = w
        if not UPDATE:
            g = _vectors(G, N, rows, D, DP)
        near, z = _statistics(w, c0, C, K, scale, D, DP, BK, NK, EUCLIDEAN)
        mean = _mean(w, g, near, z, c0, h0, o0, C, C_next, H, K, scale, UPDATE, D, DP, BK, NK, EUCLIDEAN)
        share = tl.where(rows < n, 1.0 / z, 0.0)
        if COUNTS and UPDATE:  # G is a sum over equal weights already
            share *= tl.load(counts + rows, mask=rows < n, other=0).to(tl.float32)
        pushed = tl.zeros((DP, BN), tl.float32)
        for tile in range(NK):
            ks = tile * BK + tl.arange(0, BK)
            if NK == 1:
                c, h, o = c0, h0, o0
            else:
                c, h, o = _tables(C, C_next, H, ks, K, UPDATE, D, DP)
            P, e = _through_softmax(w, g, near, mean, c, h, o, scale, UPDATE, D, EUCLIDEAN)
            if PUSH:
                pushed += _push(P, e * slope, w, c, h, UPDATE)
            if RECEIVE:
                e = e * (share * slope)[None, :]
                received = e[None, :, :] * (w[:, None, :] - c[:, :, None])
                if not UPDATE:
                    received += P[None, :, :] * (g * share[None, :])[:, None, :]
                if NK == 1:
                    acc += received
                else:
                    none = tl.zeros((BK,), tl.float32)
                    _deposit(tl.sum(received, 2), none, partial, ks, first != program * BN, D, DP)
        if PUSH:
            _store(pushed / z[None, :], dW, rows, N, UPDATE, D, DP)
    if RECEIVE and NK == 1:
        _deposit(tl.sum(acc, 2), tl.zeros((BK,), tl.float32), partial, tl.arange(0, BK), False, D, DP)


@triton.jit
def _push(P, e, w, c, h, UPDATE: tl.constexpr):
    """`(DP, BN)`: what the vectors receive from a tile of centroids: e (c - w) and, through an update, A h."""
    pushed = tl.sum(e[None, :, :] * (c[:, :, None] - w[:, None, :]), 1)
    if UPDATE:
        pushed += tl.sum(P[None, :, :] * h[:, :, None], 1)
    return pushed


@triton.jit
def _store(values, target, rows, N, add, D: tl.constexpr, DP: tl.constexpr):
    i = tl.arange(0, DP)[:, None]
    at = rows[None, :] * D + i
    mask = (i < D) & (at < N)
    if add:
        values += tl.load(target + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + at, values.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _pushed(
    w, g, C, C_next, H, K, scale, slope, UPDATE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr,
    NK, EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """`(DP, BN)`: what the vectors receive from all centroids."""
    c, h, o = _tables(C, C_next, H, tl.arange(0, BK), K, UPDATE, D, DP)
    near, z = _statistics(w, c, C, K, scale, D, DP, BK, NK, EUCLIDEAN)
    mean = _mean(w, g, near, z, c, h, o, C, C_next, H, K, scale, UPDATE, D, DP, BK, NK, EUCLIDEAN)
    P, e = _through_softmax(w, g, near, mean, c, h, o, scale, UPDATE, D, EUCLIDEAN)
    pushed = _push(P, e * slope, w, c, h, UPDATE)
    for tile in range(1, NK):
        c, h, o = _tables(C, C_next, H, tile * BK + tl.arange(0, BK), K, UPDATE, D, DP)
        P, e = _through_softmax(w, g, near, mean, c, h, o, scale, UPDATE, D, EUCLIDEAN)
        pushed += _push(P, e * slope, w, c, h, UPDATE)
    return pushed / z[None, :]


@triton.jit
def gradient(
    G, W, trail, Hs, scale, slope, dW, N, n, K, last, low, high, shift, program, programs, OUTPUT: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr,
    EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """dW: through the output, made by row `last` of the trail, and through the iterations low ... high - 1."""
    stride = K * (D + 1)
    for first in range(program * BN, n, programs * BN):
        rows = first + tl.arange(0, BN)
        w = _vectors(W, N, rows, D, DP)
        dw = tl.zeros((DP, BN), tl.float32)
        if OUTPUT:
            C = trail + last * stride
            g = _vectors(G, N, rows, D, DP)
            dw = _pushed(w, g, C, C, Hs, K, scale, slope, False, D, DP, BK, NK, EUCLIDEAN)
        for t in range(low, high):
            C = trail + t * stride
            H = Hs + (t + shift) * stride
            dw += _pushed(w, w, C, C + stride, H, K, scale, slope, True, D, DP, BK, NK, EUCLIDEAN)
        _store(dw, dW, rows, N, False, D, DP)
