"""Everything as matrix products on the tensor cores: the squared distance, d > 1, more than a few centroids.

The tensor cores multiply bfloat16 and add float32.  A float32 is the sum of three bfloat16, high, middle and low,
and six of the nine products of two such sums matter.  So a vector and a centroid become rows of eight parts, of DS
columns each (d, rounded up to a power of two),

    [ l | h | m | 0 | m | h | 1 | h ]         a vector
    [ h | l | m | 0 | h | m | o | h ]         a centroid, written to a table once an iteration

where the one meets an offset o.  Small products come first: the tensor cores cut off what does not fit, at every
step, and so lose little.  For the same reason their sums start from zero, and are added up outside.

The table holds q = s c with the offset -s |c|^2 / 2, where s = 2 log2(e) / tau: the product is a logit in units of
log 2 (|w|^2 cancels in the softmax).  It also holds s h, where h = dC' / mass, with the offset -s h . c', so that
[s h, offset] [w, 1] = s dA.
In sums over vectors or centroids, attention, split in three, meets shorter rows (for DS = 8, centroids keep the long
ones: tiles of 32 columns that come from memory make Triton 3.6 compute nonsense),

    [ h | m | l | 1 ]    and    [ h | m | l | 0 ]

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
def _vectors(X, N, rows, ONES: tl.constexpr, D: tl.constexpr, DS: tl.constexpr, BN: tl.constexpr):
    """The vectors as rows, for products with centroids, `(BN, 8 DS)`, and with attention, `(BN, 4 DS)`."""
    i = tl.arange(0, DS)[None, :]
    at = rows[:, None] * D + i
    high, middle, low = split(tl.load(X + at, mask=(i < D) & (at < N), other=0.0).to(tl.float32))
    zero = tl.zeros_like(high)
    one = zero
    if ONES:
        one = tl.where(i < 3, 1.0, zero.to(tl.float32)).to(tl.bfloat16)  # the offset has three parts too
    parts = tl.join(
        tl.join(tl.join(low, high), tl.join(middle, zero)), tl.join(tl.join(middle, high), tl.join(one, high))
    )
    eight = tl.reshape(tl.permute(parts, (0, 4, 3, 2, 1)), (BN, 8 * DS))
    four = tl.join(tl.join(high, middle), tl.join(low, one))
    return eight, tl.reshape(tl.permute(four, (0, 3, 2, 1)), (BN, 4 * DS))


@triton.jit
def _eight(table, ks, DS: tl.constexpr):
    """`(BK, 8 DS)`: the centroids `ks` for products with vectors."""
    return tl.load(table + ks[:, None] * (12 * DS) + tl.arange(0, 8 * DS)[None, :])


@triton.jit
def _summands(table, ks, DS: tl.constexpr):
    """`(BK, VS)`: the centroids `ks` for products with attention."""
    if DS == 8:
        return _eight(table, ks, DS)
    else:
        return tl.load(table + ks[:, None] * (12 * DS) + 8 * DS + tl.arange(0, 4 * DS)[None, :])


@triton.jit
def _by_vector(x, table, ks, DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """Products of the vectors with the centroids `ks`, `(BN, BK)`."""
    return dot(x, tl.trans(_eight(table, ks, DS)), tl.zeros((BN, BK), tl.float32))


@triton.jit
def _by_centroid(x, table, ks, DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """The same, `(BK, BN)`."""
    return dot(_eight(table, ks, DS), tl.trans(x), tl.zeros((BK, BN), tl.float32))


@triton.jit
def _folded(acc, PARTS: tl.constexpr, ROWS: tl.constexpr, DS: tl.constexpr):
    """Sums of rows of four parts, or of a centroid's eight, to their values `(ROWS, DS)`."""
    parts = tl.reshape(acc, (ROWS, PARTS, DS))
    part = tl.arange(0, PARTS)[None, :, None]
    if PARTS == 8:
        counts = (part == 1) | (part == 2) | (part == 7)
    else:
        counts = part < 3
    return tl.sum(tl.where(counts, parts, 0.0), 1)


@triton.jit
def _deposit(acc, partial, ks, add, D: tl.constexpr, DS: tl.constexpr, BK: tl.constexpr):
    """Into this program's rows of `partial`, `(KP, D + 1)`."""
    values = _folded(acc, 4, BK, DS)
    last = tl.sum(tl.where((tl.arange(0, 4 * DS) == 3 * DS)[None, :], acc, 0.0), 1)  # what the ones have met
    i = tl.arange(0, DS)[None, :]
    at = partial + ks[:, None] * (D + 1) + i
    end = partial + ks * (D + 1) + D
    if add:  # by the memory: nobody waits for what is there; in order, since an element is always the same thread's
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
def _statistics(
    x, y, Q, R, n, rows, MEAN: tl.constexpr, DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr
):
    """Of each vector: the log2 of the softmax denominator, and, where asked for, sum_j A (R y)_j."""
    top = tl.full((BN,), -1e38, tl.float32)
    z = tl.zeros((BN,), tl.float32)
    mean = tl.zeros((BN,), tl.float32)
    for tile in range(NK):
        ks = tile * BK + tl.arange(0, BK)
        P, fade, top, z = _online(_by_vector(x, Q, ks, DS, BK, BN), top, z)
        if MEAN:
            mean = mean * fade + tl.sum(P * _by_vector(y, R, ks, DS, BK, BN), 1)
    return _log_z(top, z, n, rows), mean / z


@triton.jit
def _log_z(top, z, n, rows):
    """A = 2^(logit - log_z); past the last vector zero."""
    return tl.where(rows < n, top + tl.log2(z), 1e38)


@triton.jit
def _contributions(x, v, Q, tile, log_z, acc, DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """Adds A^T [W, 1] of a tile of centroids: `(BK, 4 DS)`."""
    ks = tile * BK + tl.arange(0, BK)
    A = tl.exp2(_by_centroid(x, Q, ks, DS, BK, BN) - log_z[None, :])
    return acc + _times(A, v)


@triton.jit
def _average(
    x, Q, scale, W_tilde, N, rows, D: tl.constexpr, DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    NK: tl.constexpr,
):  # fmt: skip
    """W_tilde = A C of the vectors, in one walk; returns the largest logit and the softmax denominator of each."""
    VS: tl.constexpr = 64 if DS == 8 else 4 * DS
    top = tl.full((BN,), -1e38, tl.float32)
    z = tl.zeros((BN,), tl.float32)
    acc = tl.zeros((BN, VS), tl.float32)
    for tile in range(NK):
        ks = tile * BK + tl.arange(0, BK)
        P, fade, top, z = _online(_by_vector(x, Q, ks, DS, BK, BN), top, z)
        acc = acc * fade[:, None] + _times(P, _summands(Q, ks, DS))
    _store(acc * (1.0 / (z * 2 * scale))[:, None], W_tilde, rows, N, False, D, DS, BN)
    return top, z


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
        x, v = _vectors(W, N, rows, True, D, DS, BN)
        if FIRST:
            top, z = _average(x, Q, scale, W_tilde, N, rows, D, DS, BK, BN, NK)
            log_z = _log_z(top, z, n, rows)
        else:
            log_z, _ = _statistics(x, x, Q, Q, n, rows, False, DS, BK, BN, NK)
        for tile in range(NK):
            if NK == 1:
                acc = _contributions(x, v, Q, tile, log_z, acc, DS, BK, BN)
            else:
                acc = tl.zeros((BK, 4 * DS), tl.float32)
                acc = _contributions(x, v, Q, tile, log_z, acc, DS, BK, BN)
                _deposit(acc, partial, tile * BK + tl.arange(0, BK), first != program * BN, D, DS, BK)
    if NK == 1:
        _deposit(acc, partial, tl.arange(0, BK), False, D, DS, BK)


@triton.jit
def averages(
    W, Q, scale, W_tilde, N, n, program, programs, D: tl.constexpr, DS: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, NK: tl.constexpr,
):  # fmt: skip
    """W_tilde = A C."""
    for first in range(program * BN, n, programs * BN):
        rows = first + tl.arange(0, BN)
        x, _ = _vectors(W, N, rows, True, D, DS, BN)
        _average(x, Q, scale, W_tilde, N, rows, D, DS, BK, BN, NK)


@triton.jit
def _store(acc, target, rows, N, add, D: tl.constexpr, DS: tl.constexpr, BN: tl.constexpr):
    values = _folded(acc, 8 if DS == 8 else 4, BN, DS)
    i = tl.arange(0, DS)[None, :]
    at = rows[:, None] * D + i
    mask = (i < D) & (at < N)
    if add:
        values += tl.load(target + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + at, values.to(target.dtype.element_ty), mask=mask)


# Backward.  UPDATE: through C' = (A^T W) / mass, where dA = h (w - c') and R holds h; else through W_tilde = A C, where
# dA = g c and R is Q.


@triton.jit
def _through_softmax(
    x, y, Q, R, ks, log_z, mean, slope, DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """A and e = A (dA - mean) slope, `(BN, BK)`; `mean` and `slope` are in units of what R holds."""
    A = tl.exp2(_by_vector(x, Q, ks, DS, BK, BN) - log_z[:, None])
    return A, A * ((_by_vector(y, R, ks, DS, BK, BN) - mean[:, None]) * slope)


@triton.jit
def _pushed(A, e, Q, R, ks, UPDATE: tl.constexpr, DS: tl.constexpr):
    """What the vectors receive, times the factor of the tables: e C and, through an update, A H: `(BN, VS)`.

    e sums to zero over the centroids: e (c - w) is no different.
    """
    result = _times(e, _summands(Q, ks, DS))
    if UPDATE:
        result += _times(A, _summands(R, ks, DS))
    return result


@triton.jit
def gradient_sums(
    G, W, Q, H, scale, slope, partial, dW, N, n, KP, program, programs, UPDATE: tl.constexpr, PUSH: tl.constexpr,
    D: tl.constexpr, DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr,
):  # fmt: skip
    """What the centroids receive: sum_i e w and, from the output, A g; in the last column sum_i e.

    With PUSH also what the vectors receive, added to dW but from the output, which comes first.
    """
    VS: tl.constexpr = 64 if DS == 8 else 4 * DS
    partial += program * KP * (D + 1)
    R = H if UPDATE else Q
    slope = slope / (2 * scale)
    acc = tl.zeros((BK, 4 * DS), tl.float32)
    for first in range(program * BN, n, programs * BN):
        rows = first + tl.arange(0, BN)
        x, v = _vectors(W, N, rows, True, D, DS, BN)
        y, u = x, v
        if not UPDATE:
            y, u = _vectors(G, N, rows, False, D, DS, BN)
        log_z, mean = _statistics(x, y, Q, R, n, rows, True, DS, BK, BN, NK)
        dw = tl.zeros((BN, VS), tl.float32)
        for tile in range(NK):
            ks = tile * BK + tl.arange(0, BK)
            A, e = _through_softmax(x, y, Q, R, ks, log_z, mean, slope, DS, BK, BN)
            if PUSH:
                dw += _pushed(A, e, Q, R, ks, UPDATE, DS)
            received = _turned(e, v)
            if not UPDATE:
                received += _turned(A, u)
            if NK == 1:
                acc += received
            else:
                _deposit(received, partial, ks, first != program * BN, D, DS, BK)
        if PUSH:
            _store(dw * (0.5 / scale), dW, rows, N, UPDATE, D, DS, BN)
    if NK == 1:
        _deposit(acc, partial, tl.arange(0, BK), False, D, DS, BK)


@triton.jit
def _through(
    x, y, Q, R, n, rows, slope, UPDATE: tl.constexpr, DS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    NK: tl.constexpr,
):  # fmt: skip
    """`_pushed` from all centroids."""
    VS: tl.constexpr = 64 if DS == 8 else 4 * DS
    log_z, mean = _statistics(x, y, Q, R, n, rows, True, DS, BK, BN, NK)
    result = tl.zeros((BN, VS), tl.float32)
    for tile in range(NK):
        ks = tile * BK + tl.arange(0, BK)
        A, e = _through_softmax(x, y, Q, R, ks, log_z, mean, slope, DS, BK, BN)
        result += _pushed(A, e, Q, R, ks, UPDATE, DS)
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
        x, _ = _vectors(W, N, rows, True, D, DS, BN)
        y, _ = _vectors(G, N, rows, False, D, DS, BN)
        Q = Qs + last * table
        acc = _through(x, y, Q, Q, n, rows, slope, False, DS, BK, BN, NK)
        for t in range(low, high):
            Q = Qs + t * table
            acc += _through(x, x, Q, Hs + (t + shift) * table, n, rows, slope, True, DS, BK, BN, NK)
        _store(acc * (0.5 / scale), dW, rows, N, False, D, DS, BN)
