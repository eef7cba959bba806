"""Everything as matrix products on the tensor cores: the squared distance, d > 1, more than a few centroids.

The tensor cores multiply bfloat16 and add float32.  A float32 is the sum of three bfloat16, high, middle and low,
and six of the nine products of two such sums matter.  So a vector and a centroid become rows of eight parts, of DS
columns each (d, rounded up to a power of two), in two halves,

    [ l | h | m | 0 ]  [ m | h | 1 | h ]         a vector
    [ h | l | m | o ]  [ h | m | o | h ]         a centroid, written to a table once an iteration

where the one meets an offset o.  Small products come first: the tensor cores cut off what does not fit, at every
step, and so lose little.  For the same reason their sums start from zero, and are added up outside.

The table holds q = s c with the offset -s |c|^2 / 2, where s = 2 log2(e) / tau: the product is a logit in units of
log 2 (|w|^2 cancels in the softmax).  It also holds s h, where h = dC' / mass, with the offset -s h . c', so that
[s h, offset] [w, 1] = s dA.
In sums over centroids, attention, split in three, meets the first half; in sums over vectors

    [ h | m | l | 1 ]

Tiles are `(vectors, centroids)` for what a vector needs, and enter the next product from registers.  For what a
centroid needs they are made again as `(centroids, vectors)` in the forward pass, and turned around in the backward
pass, where there is more to make.
"""

import os

import triton
import triton.language as tl

# numpy, which the interpreter computes with, has no bfloat16
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
NEVER = tl.constexpr(-1e30)  # the offset of centroids past the last one: attention to them is exactly zero


@triton.jit
def _upper(x):
    """The upper 16 bits of a float32, still a float32: cutting off is faster than rounding."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def split(x):
    """Three bfloat16 that add up to a float32."""
    high = _upper(x)
    rest = x - high
    middle = _upper(rest)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


@triton.jit
def dot(a, b, acc):
    """a b + acc."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _times(x, b):
    """x b, for a float32 x: `(M, K), (K, N) -> (M, N)`."""
    high, middle, low = split(x)
    result = dot(low, b, tl.zeros((x.shape[0], b.shape[1]), tl.float32))
    result = dot(middle, b, result)
    return dot(high, b, result)


@triton.jit
def _turned(x, b):
    """x^T b, for a float32 x: `(K, M), (K, N) -> (M, N)`."""
    return _times(tl.trans(x), b)


@triton.jit
def _load(X, N, rows, D: tl.constexpr, DS: tl.constexpr):
    """The vectors `rows`, `(BN, DS)`."""
    i = tl.arange(0, DS)[None, :]
    at = rows[:, None] * D + i
    return tl.load(X + at, mask=(i < D) & (at < N), other=0.0).to(tl.float32)


@triton.jit
def _row(a, b, c, d):
    """`[a | b | c | d]`."""
    parts = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.permute(parts, (0, 3, 2, 1)), (a.shape[0], 4 * a.shape[1]))


@triton.jit
def _vectors(w, ONES: tl.constexpr):
    """`(BN, DS) -> (BN, 4 DS)`: the halves of the vectors' rows, and the row that attention meets."""
    high, middle, low = split(w)
    zero = tl.zeros_like(high)
    one, ones = zero, zero
    if ONES:
        i = tl.arange(0, w.shape[1])[None, :]
        one = tl.where(i == 0, 1.0, zero.to(tl.float32)).to(tl.bfloat16)
        ones = tl.where(i < 3, 1.0, zero.to(tl.float32)).to(tl.bfloat16)  # the offset has three parts too
    return _row(low, high, middle, zero), _row(middle, high, ones, high), _row(high, middle, low, one)


@triton.jit
def _half(table, ks, HALF: tl.constexpr, DS: tl.constexpr):
    """`(BK, 4 DS)`: the first or the second half of the rows of the centroids `ks`."""
    return tl.load(table + ks[:, None] * (8 * DS) + HALF * 4 * DS + tl.arange(0, 4 * DS)[None, :])


@triton.jit
def _by_vector(x0, x1, table, ks, DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """Products of the vectors with the centroids `ks`, `(BN, BK)`."""
    small = dot(x0, tl.trans(_half(table, ks, 0, DS)), tl.zeros((BN, BK), tl.float32))
    return dot(x1, tl.trans(_half(table, ks, 1, DS)), small)


@triton.jit
def _by_centroid(x0, x1, table, ks, DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """The same, `(BK, BN)`."""
    small = dot(_half(table, ks, 0, DS), tl.trans(x0), tl.zeros((BK, BN), tl.float32))
    return dot(_half(table, ks, 1, DS), tl.trans(x1), small)


@triton.jit
def _folded(acc, DS: tl.constexpr):
    """Sums of rows of four parts to `(ROWS, DS)` values, and `(ROWS,)` what was in the last part."""
    parts = tl.reshape(acc, (acc.shape[0], 4, DS))
    values = tl.sum(tl.where((tl.arange(0, 4) < 3)[None, :, None], parts, 0.0), 1)
    return values, tl.sum(tl.where((tl.arange(0, 4 * DS) >= 3 * DS)[None, :], acc, 0.0), 1)


@triton.jit
def _deposit(acc, partial, ks, add, D: tl.constexpr, DS: tl.constexpr):
    """Into the row of `partial`, `(KP, D + 1)`, that this program has, alone or with others."""
    values, last = _folded(acc, DS)
    i = tl.arange(0, DS)[None, :]
    at = partial + ks[:, None] * (D + 1) + i
    end = partial + ks * (D + 1) + D
    # Added by the memory: nobody waits for what is there.  An element is always the same thread's, and so in order
    # where the program is alone.
    if add:
        tl.atomic_add(at, values, mask=i < D, sem="relaxed")
        tl.atomic_add(end, last, sem="relaxed")
    else:
        tl.store(at, values, mask=i < D)
        tl.store(end, last)


@triton.jit
def _online(S, top, z):
    """A tile of logits `(BN, BK)` into a softmax: exponentials relative to the largest logit so far, the factor that
    makes what was added up before relative to it too, that logit, and the denominator."""
    higher = tl.maximum(top, tl.max(S, 1))
    P = tl.exp2(S - higher[:, None])
    fade = tl.exp2(top - higher)
    return P, fade, higher, z * fade + tl.sum(P, 1)


@triton.jit
def _log_z(top, z, n, rows):
    """A = 2^(logit - log_z); past the last vector zero."""
    return tl.where(rows < n, top + tl.log2(z), 1e38)


@triton.jit
def _statistics(
    x0, x1, y0, y1, Q, n, rows, MEAN: tl.constexpr, DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    NK: tl.constexpr,
):  # fmt: skip
    """The log2 of the softmax denominator of each vector, and, where asked for, sum_j A (Q y)_j."""
    top = tl.full((BN,), -1e38, tl.float32)
    z = tl.zeros((BN,), tl.float32)
    mean = tl.zeros((BN,), tl.float32)
    for tile in range(NK):
        ks = tile * BK + tl.arange(0, BK)
        P, fade, top, z = _online(_by_vector(x0, x1, Q, ks, DS, BK, BN), top, z)
        if MEAN:
            mean = mean * fade + tl.sum(P * _by_vector(y0, y1, Q, ks, DS, BK, BN), 1)
    return _log_z(top, z, n, rows), mean / z


@triton.jit
def _average(x0, x1, Q, R, n, rows, DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr):
    """The same denominator, and A R, `(BN, 4 DS)`."""
    top = tl.full((BN,), -1e38, tl.float32)
    z = tl.zeros((BN,), tl.float32)
    acc = tl.zeros((BN, 4 * DS), tl.float32)
    for tile in range(NK):
        ks = tile * BK + tl.arange(0, BK)
        P, fade, top, z = _online(_by_vector(x0, x1, Q, ks, DS, BK, BN), top, z)
        acc = acc * fade[:, None] + _times(P, _half(R, ks, 0, DS))
    return _log_z(top, z, n, rows), acc / z[:, None]


@triton.jit
def _store(values, target, rows, N, D: tl.constexpr, DS: tl.constexpr):
    i = tl.arange(0, DS)[None, :]
    at = rows[:, None] * D + i
    tl.store(target + at, values.to(target.dtype.element_ty), mask=(i < D) & (at < N))


@triton.jit
def sums(
    W, Q, scale, partial, W_tilde, N, n, KP, program, programs, FIRST: tl.constexpr, D: tl.constexpr,
    DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr,
):  # fmt: skip
    """A^T [W, 1] of this program's vectors; FIRST: and W_tilde."""
    partial += program * KP * (D + 1)
    acc = tl.zeros((BK, 4 * DS), tl.float32)
    for first in range(program * BN, n, programs * BN):
        rows = first + tl.arange(0, BN)
        x0, x1, v = _vectors(_load(W, N, rows, D, DS), True)
        if FIRST:
            log_z, AC = _average(x0, x1, Q, Q, n, rows, DS, BK, BN, NK)
            _store(_folded(AC, DS)[0] * (0.5 / scale), W_tilde, rows, N, D, DS)
        else:
            log_z, _ = _statistics(x0, x1, x0, x1, Q, n, rows, False, DS, BK, BN, NK)
        for tile in range(NK):
            ks = tile * BK + tl.arange(0, BK)
            A = tl.exp2(_by_centroid(x0, x1, Q, ks, DS, BK, BN) - log_z[None, :])
            contributions = _times(A, v)
            if NK == 1:
                acc += contributions
            else:
                _deposit(contributions, partial, ks, first != program * BN, D, DS)
    if NK == 1:
        _deposit(acc, partial, tl.arange(0, BK), False, D, DS)


@triton.jit
def averages(
    W, Q, scale, W_tilde, N, n, program, programs, D: tl.constexpr, DS: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, NK: tl.constexpr,
):  # fmt: skip
    """W_tilde = A C."""
    for first in range(program * BN, n, programs * BN):
        rows = first + tl.arange(0, BN)
        x0, x1, _v = _vectors(_load(W, N, rows, D, DS), True)
        _log, AC = _average(x0, x1, Q, Q, n, rows, DS, BK, BN, NK)
        _store(_folded(AC, DS)[0] * (0.5 / scale), W_tilde, rows, N, D, DS)


# Backward.  UPDATE: through C' = (A^T W) / mass, where dA = h (w - c') and R holds h; else through W_tilde = A C, where
# dA = g c and R is Q.


@triton.jit
def _through_softmax(
    x0, x1, y0, y1, Q, R, ks, log_z, mean, slope, DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """A and e = A (dA - mean) slope, `(BN, BK)`; `mean` and `slope` are in units of what R holds."""
    A = tl.exp2(_by_vector(x0, x1, Q, ks, DS, BK, BN) - log_z[:, None])
    return A, A * ((_by_vector(y0, y1, R, ks, DS, BK, BN) - mean[:, None]) * slope)


@triton.jit
def _outside_softmax(
    x0, x1, y0, y1, w, Q, R, n, rows, UPDATE: tl.constexpr, DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    NK: tl.constexpr,
):  # fmt: skip
    """The log2 of the softmax denominator and the mean of dA, `(BN,)`, and what the vectors receive not through the
    softmax, `(BN, 4 DS)`, times the factor of the tables."""
    if UPDATE:  # the mean of h (w - c') is w (A h) and the mean of the offsets
        log_z, AR = _average(x0, x1, Q, R, n, rows, DS, BK, BN, NK)
        values, offset = _folded(AR, DS)
        return log_z, tl.sum(values * w, 1) + offset, AR
    else:
        log_z, mean = _statistics(x0, x1, y0, y1, Q, n, rows, True, DS, BK, BN, NK)
        return log_z, mean, tl.zeros((BN, 4 * DS), tl.float32)


@triton.jit
def gradient_sums(
    G, W, Q, H, scale, slope, partial, dW, N, n, KP, P, program, programs, UPDATE: tl.constexpr,
    PUSH: tl.constexpr, RECEIVE: tl.constexpr, D: tl.constexpr, DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    NK: tl.constexpr,
):  # fmt: skip
    """RECEIVE: what the centroids receive, sum_i e w and, from the output, A g; in the last column sum_i e.  Added to
    one of the P rows of `partial`.

    PUSH: what the vectors receive, added to dW but from the output, which comes first.
    """
    partial += program % P * KP * (D + 1)
    R = H if UPDATE else Q
    slope = slope / (2 * scale)
    acc = tl.zeros((BK, 4 * DS), tl.float32)
    for first in range(program * BN, n, programs * BN):
        rows = first + tl.arange(0, BN)
        w = _load(W, N, rows, D, DS)
        x0, x1, v = _vectors(w, True)
        y0, y1, u = x0, x1, v
        if not UPDATE:
            y0, y1, u = _vectors(_load(G, N, rows, D, DS), False)
        log_z, mean, dw = _outside_softmax(x0, x1, y0, y1, w, Q, R, n, rows, UPDATE, DS, BK, BN, NK)
        before = tl.zeros((BN, DS), tl.float32)
        if PUSH and UPDATE:
            before = _load(dW, N, rows, D, DS)  # here: later, everything would wait for it
        for tile in range(NK):
            ks = tile * BK + tl.arange(0, BK)
            A, e = _through_softmax(x0, x1, y0, y1, Q, R, ks, log_z, mean, slope, DS, BK, BN)
            if PUSH:  # e sums to zero over the centroids: e c is e (c - w)
                dw += _times(e, _half(Q, ks, 0, DS))
            if RECEIVE:
                received = _turned(e, v)
                if not UPDATE:
                    received += _turned(A, u)
                if NK == 1:
                    acc += received
                else:
                    _deposit(received, partial, ks, True, D, DS)
        if PUSH:
            _store(_folded(dw, DS)[0] * (0.5 / scale) + before, dW, rows, N, D, DS)
    if RECEIVE and NK == 1:
        _deposit(acc, partial, tl.arange(0, BK), True, D, DS)


@triton.jit
def _through(
    x0, x1, y0, y1, w, Q, R, n, rows, slope, UPDATE: tl.constexpr, DS: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, NK: tl.constexpr,
):  # fmt: skip
    """What the vectors receive from all centroids, `(BN, 4 DS)`, times the factor of the tables."""
    log_z, mean, result = _outside_softmax(x0, x1, y0, y1, w, Q, R, n, rows, UPDATE, DS, BK, BN, NK)
    for tile in range(NK):
        ks = tile * BK + tl.arange(0, BK)
        _A, e = _through_softmax(x0, x1, y0, y1, Q, R, ks, log_z, mean, slope, DS, BK, BN)
        result += _times(e, _half(Q, ks, 0, DS))
    return result


@triton.jit
def gradient(
    G, W, Qs, Hs, scale, slope, dW, N, n, last, low, high, shift, table, program, programs, D: tl.constexpr,
    DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr,
):  # fmt: skip
    """dW: through the output, made by row `last` of the trail, and through the iterations low ... high - 1."""
    slope = slope / (2 * scale)
    for first in range(program * BN, n, programs * BN):
        rows = first + tl.arange(0, BN)
        w = _load(W, N, rows, D, DS)
        x0, x1, _v = _vectors(w, True)
        y0, y1, _u = _vectors(_load(G, N, rows, D, DS), False)
        Q = Qs + last * table
        acc = _through(x0, x1, y0, y1, w, Q, Q, n, rows, slope, False, DS, BK, BN, NK)
        for t in range(low, high):
            Q = Qs + t * table
            acc += _through(x0, x1, x0, x1, w, Q, Hs + (t + shift) * table, n, rows, slope, True, DS, BK, BN, NK)
        _store(_folded(acc, DS)[0] * (0.5 / scale), dW, rows, N, D, DS)
