"""d = 1 in float32 with many centroids: only near ones matter.

In float32 the attention of a weight to a centroid some way off is zero, exactly.  A tile of weights is put in order, so
that those next to each other attend to the same few centroids, a window of them.  Tiles are not put in one order with
the others: their distributions are alike, and so are the windows of a part (the smallest weights, the next ones, ...)
of all the tiles of a program.

A part is the weights of a warp, one a thread: BN of them are BN / 32 parts, each with a window of its own, and of the
`(BK, BN)` attention a thread has a column.  Parts that some window of BK centroids does not do for, where temperatures
are high or weights are few, have one window of several tiles for all BN: the way of `differences`.

The order is kept where the result will be, W_tilde or dW, until it comes: the places of a tile's weights, from the
smallest weight to the largest.  A tile that gets its result has them in the `room` of the program, meanwhile.

A window covers what it must whatever the order of the centroids; it is small if the centroids are in order, too.
"""

import triton
import triton.language as tl

from .differences import (
    FAR,
    _centroids,
    _deposit,
    _distance,
    _logits,
    _mean,
    _pushed,
    _statistics,
    _tables,
    _through_softmax,
)

LAST = tl.constexpr(0x7FFFFFFF)  # the key after all others
ZERO = tl.constexpr(127.0)  # a GPU's 2^-127 is zero
PART = tl.constexpr(32)  # weights, those of a warp


@triton.jit
def _exchange(x, STRIDE: tl.constexpr):
    """Of the elements STRIDE apart, the smaller first: pairs in a thread or in a warp need no shared memory."""
    pairs = tl.reshape(x, (x.numel // (2 * STRIDE), 2, STRIDE))
    other = tl.sum(pairs, 1, keep_dims=True) - pairs
    second = tl.arange(0, 2)[None, :, None] == 1
    return tl.reshape(tl.where((pairs > other) != second, other, pairs), x.shape)


@triton.jit
def _put_in_order(W, order, N, program, programs, TILE: tl.constexpr):
    """The places of the weights of each of this program's tiles, in the last bits of integers.

    A place is written over the last bits of its weight, and both are sorted as one integer: weights of which all other
    bits are equal are in any order.
    """
    place = tl.arange(0, TILE)
    for first in range(program * TILE, N, programs * TILE):
        bits = tl.load(W.to(tl.pointer_type(tl.int32), bitcast=True) + first + place, mask=first + place < N, other=0)
        key = bits ^ ((bits >> 31) & LAST)  # integers in the order of the floats
        x = (tl.where(first + place < N, key, LAST) & (-TILE)) | place
        # bitonic, the sizes as a loop: tl.sort is unrolled, which takes a minute to compile
        x ^= -(place & 1)  # runs that are to descend are turned round, and so ascend
        size = 2
        while size <= TILE:
            x ^= tl.where(((place ^ (place >> 1)) & (size // 2)) == 0, 0, -1)
            for i in tl.static_range(1, 14):
                if TILE >> i > 0:
                    if TILE >> i < size:
                        x = _exchange(x, TILE >> i)
            size *= 2
        tl.store(order + first + place, x, mask=first + place < N)
    tl.debug_barrier()


# A program's room: the places in a tile, 16 bit each.  Past all of these, for each row of the trail in question and
# each program, the windows of its parts: where they begin, and above 16 bits how many tiles they have.


@triton.jit
def _places(room, program, TILE: tl.constexpr):
    return (room + program * (TILE // 2)).to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def _windows(room, level, program, programs, TILE: tl.constexpr):
    at = programs * (TILE // 2) + (level * programs + program) * (TILE // PART)
    return (room + at).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & LAST)).to(tl.float32, bitcast=True)


@triton.jit
def _find_windows(
    order, C, scale, windows, N, K, program, programs, BK: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr
):
    """The windows of all parts of this program's tiles: those of BN weights are one tile each, or one for all."""
    part = tl.arange(0, TILE // PART) * PART
    smallest = tl.full((TILE // PART,), LAST, tl.int32)
    largest = -smallest
    for start in range(program * TILE, N, programs * TILE):
        some = start + part < N
        smallest = tl.minimum(smallest, tl.load(order + start + part, mask=some, other=LAST))
        largest = tl.maximum(largest, tl.load(order + tl.minimum(start + part + PART, N) - 1, mask=some, other=-LAST))
    smallest = _value(smallest & (-TILE))[None, :]
    largest = _value(largest | (TILE - 1))[None, :]
    farthest = tl.full((TILE // PART,), FAR, tl.float32)
    for begin in range(0, K, BK):
        c = _centroids(C, begin + tl.arange(0, BK), K, 2, FAR, 1, 1).trans(1, 0)
        # none of the weights has none nearer
        farthest = tl.minimum(farthest, tl.min(tl.maximum(tl.abs(c - smallest), tl.abs(c - largest)), 0))
    reach = (farthest * farthest * 1.0001 + ZERO / scale)[None, :]
    low = tl.full((TILE // PART,), K - BK, tl.int32)
    high = tl.zeros((TILE // PART,), tl.int32)
    for begin in range(0, K, BK):
        ks = begin + tl.arange(0, BK)
        c = _centroids(C, ks, K, 2, FAR, 1, 1).trans(1, 0)
        nearest = tl.maximum(tl.maximum(smallest - c, c - largest), 0.0)
        matters = nearest * nearest <= reach
        low = tl.minimum(low, tl.min(tl.where(matters, ks[:, None], K), 0))
        high = tl.maximum(high, tl.max(tl.where(matters, ks[:, None] + 1, 0), 0))
    exists = program * TILE + part < N
    low = tl.reshape(tl.where(exists, low, K - BK), (TILE // BN, BN // PART))
    high = tl.reshape(tl.where(exists, high, 0), (TILE // BN, BN // PART))
    first = tl.min(low, 1)[:, None]
    one = tl.max(high - low, 1)[:, None] <= BK
    tiles = tl.where(one, 1, tl.cdiv(tl.max(high, 1)[:, None] - first, BK))
    at = tl.arange(0, TILE // BN)[:, None] * (BN // PART) + tl.arange(0, BN // PART)[None, :]
    tl.store(windows + at, tl.where(one, low, first) + (tiles << 16))
    tl.debug_barrier()


@triton.jit
def _window(windows, part, BN: tl.constexpr):
    """`(BN,)`: where the windows of these weights begin; that of the first one; and how many tiles they have."""
    low = tl.load(windows + (part + tl.arange(0, BN)) // PART) & 0xFFFF
    first = tl.load(windows + part // PART)
    return low, first & 0xFFFF, first >> 16


@triton.jit
def _near(X, low, BK: tl.constexpr):
    """`(BK, BN)`: of `(k, 2)`, what begins at `low`; the first column."""
    at = 2 * (low[None, :] + tl.arange(0, BK)[:, None])
    # flat: the compiler would give the threads of a load rows, and everything after it, too
    return tl.reshape(tl.load(X + tl.reshape(at, (at.numel,))), at.shape)


@triton.jit
def _attention(difference, scale):
    """`(BK, BN)` and `(BN,)`: attention and its sum, relative to that of the nearest."""
    L = tl.abs(difference)
    P = tl.exp2(_logits(tl.min(L, 0)[None, :], L, scale, False, 1))
    return P, tl.sum(P, 0)


@triton.jit
def _prepare(
    W, order, C, scale, partial, windows, N, K, KP, program, programs, FIRST: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What a walk over this program's weights needs: zeros in `partial`, if it is the FIRST the order, and windows."""
    for first in range(0, 2 * KP, BK):
        tl.store(partial + first + tl.arange(0, BK), tl.zeros((BK,), tl.float32))
    tl.debug_barrier()
    if FIRST:
        _put_in_order(W, order, N, program, programs, TILE)
    _find_windows(order, C, scale, windows, N, K, program, programs, BK, BN, TILE)


@triton.jit
def _add(received, mass, partial, windows, part, BK: tl.constexpr, BN: tl.constexpr):
    """`(BK, BN)`, what the windows receive, to this program's rows of `partial`; of mass there may be None."""
    parts = tl.arange(0, BN // PART)
    low = tl.load(windows + part // PART + parts) & 0xFFFF
    at = partial + 2 * (low[None, :] + tl.arange(0, BK)[:, None])
    received = tl.sum(tl.reshape(received, (BK, BN // PART, PART)), 2)
    if mass is not None:
        mass = tl.sum(tl.reshape(mass, (BK, BN // PART, PART)), 2)
    for i in range(0, BN // PART):  # one after the other: windows overlap
        now = (parts == i)[None, :]
        tl.store(at, tl.load(at, mask=now, other=0.0) + received, mask=now)
        if mass is not None:
            tl.store(at + 1, tl.load(at + 1, mask=now, other=0.0) + mass, mask=now)
        tl.debug_barrier()


@triton.jit
def _part(order, start, part, N, BN: tl.constexpr, TILE: tl.constexpr):
    """`(BN,)`: where these weights are, N for none."""
    rows = start + part + tl.arange(0, BN)
    place = tl.load(order + rows, mask=rows < N, other=0) & (TILE - 1)
    return tl.where(rows < N, start + place, N)


@triton.jit
def _at(X, at, N):
    return tl.load(X + at, mask=at < N, other=0.0)


@triton.jit
def sums(
    W, W_tilde, C, scale, partial, room, N, K, KP, program, programs, FIRST: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A^T [W, 1] of this program's weights; FIRST puts them in order."""
    partial += program * KP * 2
    order = W_tilde.to(tl.pointer_type(tl.int32), bitcast=True)
    windows = _windows(room, 0, program, programs, TILE)
    begin = program * TILE
    step = programs * TILE
    _prepare(W, order, C, scale, partial, windows, N, K, KP, program, programs, FIRST, BK, BN, TILE)
    for part in range(0, tl.minimum(TILE, N - begin), BN):
        low, first, tiles = _window(windows, part, BN)
        if tiles == 1:
            c = _near(C, low, BK)
            acc = tl.zeros((BK, BN), tl.float32)
            mass = tl.zeros((BK, BN), tl.float32)
            # places are read two tiles ahead, weights one
            at = _part(order, begin, part, N, BN, TILE)
            next_at = _part(order, begin + step, part, N, BN, TILE)
            w = _at(W, at, N)
            for start in range(begin, N, step):
                ahead = _part(order, start + 2 * step, part, N, BN, TILE)
                next_w = _at(W, next_at, N)
                P, z = _attention(w[None, :] - c, scale)
                share = tl.where(at < N, 1.0 / z, 0.0)
                acc += P * (w * share)[None, :]
                mass += P * share[None, :]
                at, next_at, w = next_at, ahead, next_w
            _add(acc, mass, partial, windows, part, BK, BN)
        else:
            near_C = C + 2 * first
            c0 = _centroids(near_C, tl.arange(0, BK), K - first, 2, FAR, 1, 1)
            for start in range(begin, N, step):
                at = _part(order, start, part, N, BN, TILE)
                w = _at(W, at, N)[None, :]
                near, z = _statistics(w, c0, near_C, K - first, scale, 1, 1, BK, tiles, False)
                share = tl.where(at < N, 1.0 / z, 0.0)
                for tile in range(0, tiles):
                    ks = tile * BK + tl.arange(0, BK)
                    c = _centroids(near_C, ks, K - first, 2, FAR, 1, 1)
                    P = tl.exp2(_logits(near[None, :], _distance(w, c, False), scale, False, 1)) * share[None, :]
                    _deposit(tl.sum(P * w, 1)[None, :], tl.sum(P, 1), partial, first + ks, True, 1, 1)
            tl.debug_barrier()  # the next part adds to what this one has written


@triton.jit
def _put_in_room(order, places, start, N, TILE: tl.constexpr):
    place = tl.arange(0, TILE)
    x = tl.load(order + start + place, mask=start + place < N, other=0)
    tl.debug_barrier()  # of the tile before, everything has been read
    tl.store(places + place, (x & (TILE - 1)).to(tl.int16))
    tl.debug_barrier()


@triton.jit
def _part_in_room(places, start, part, N, BN: tl.constexpr, TILE: tl.constexpr):
    """`_part`, of a tile that is in the room."""
    rows = part + tl.arange(0, BN)
    exists = (rows < TILE) & (start + rows < N)
    return tl.where(exists, start + tl.load(places + rows, mask=exists, other=0).to(tl.int32), N)


@triton.jit
def averages(
    W, C, scale, W_tilde, room, N, K, program, programs, BK: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr
):
    """W_tilde = A C."""
    order = W_tilde.to(tl.pointer_type(tl.int32), bitcast=True)
    places = _places(room, program, TILE)
    windows = _windows(room, 0, program, programs, TILE)
    _find_windows(order, C, scale, windows, N, K, program, programs, BK, BN, TILE)
    for start in range(program * TILE, N, programs * TILE):
        _put_in_room(order, places, start, N, TILE)
        at = _part_in_room(places, start, 0, N, BN, TILE)
        next_at = _part_in_room(places, start, BN, N, BN, TILE)
        w = _at(W, at, N)
        for part in range(0, tl.minimum(N - start, TILE), BN):
            ahead = _part_in_room(places, start, part + 2 * BN, N, BN, TILE)
            next_w = _at(W, next_at, N)
            low, first, tiles = _window(windows, part, BN)
            if tiles == 1:
                c = _near(C, low, BK)
                P, z = _attention(w[None, :] - c, scale)
                total = tl.sum(P * c, 0)
            else:
                near_C = C + 2 * first
                c0 = _centroids(near_C, tl.arange(0, BK), K - first, 2, FAR, 1, 1)
                near, z = _statistics(w[None, :], c0, near_C, K - first, scale, 1, 1, BK, tiles, False)
                total = tl.zeros((BN,), tl.float32)
                for tile in range(0, tiles):
                    c = _centroids(near_C, tile * BK + tl.arange(0, BK), K - first, 2, FAR, 1, 1)
                    P = tl.exp2(_logits(near[None, :], _distance(w[None, :], c, False), scale, False, 1))
                    total += tl.sum(P * c.trans(1, 0), 0)
            tl.store(W_tilde + at, total / z, mask=at < N)
            at, next_at, w = next_at, ahead, next_w


@triton.jit
def _near_tables(C, C_next, H, low, UPDATE: tl.constexpr, BK: tl.constexpr):
    """`(BK, BN)`: c, h and c' of the windows."""
    c = _near(C, low, BK)
    if UPDATE:
        return c, _near(H, low, BK), _near(C_next, low, BK)
    return c, c, c


@triton.jit
def _through_attention(w, g, c, h, o, scale, UPDATE: tl.constexpr):
    """w - c, P and P (dA - mean), `(BK, BN)`, and the sum of P, `(BN,)`."""
    difference = w[None, :] - c
    P, z = _attention(difference, scale)
    if UPDATE:
        dA = h * (w[None, :] - o)
    else:
        dA = -g[None, :] * difference  # g c, less g w, that all have in common
    mean = tl.sum(P * dA, 0) / z
    return difference, P, P * (dA - mean[None, :]), z


@triton.jit
def gradient_sums(
    G, W, dW, C, C_next, H, scale, slope, partial, room, N, K, KP, program, programs, UPDATE: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What the centroids receive, sum_i e (w - c) and, from the output, A g; the last column is zero.

    What comes from the output is first, and puts the weights in order.
    """
    partial += program * KP * 2
    order = dW.to(tl.pointer_type(tl.int32), bitcast=True)
    windows = _windows(room, 0, program, programs, TILE)
    begin = program * TILE
    step = programs * TILE
    _prepare(W, order, C, scale, partial, windows, N, K, KP, program, programs, not UPDATE, BK, BN, TILE)
    for part in range(0, tl.minimum(TILE, N - begin), BN):
        low, first, tiles = _window(windows, part, BN)
        if tiles == 1:
            c, h, o = _near_tables(C, C_next, H, low, UPDATE, BK)
            acc = tl.zeros((BK, BN), tl.float32)
            at = _part(order, begin, part, N, BN, TILE)
            next_at = _part(order, begin + step, part, N, BN, TILE)
            w = _at(W, at, N)
            g = w if UPDATE else _at(G, at, N)
            for start in range(begin, N, step):
                ahead = _part(order, start + 2 * step, part, N, BN, TILE)
                next_w = _at(W, next_at, N)
                next_g = next_w if UPDATE else _at(G, next_at, N)
                difference, P, e, z = _through_attention(w, g, c, h, o, scale, UPDATE)
                share = tl.where(at < N, 1.0 / z, 0.0)
                acc += e * difference * (share * slope)[None, :]
                if not UPDATE:
                    acc += P * (g * share)[None, :]
                at, next_at, w, g = next_at, ahead, next_w, next_g
            _add(acc, None, partial, windows, part, BK, BN)
        else:
            near_C, near_next, near_H = C + 2 * first, C_next + 2 * first, H + 2 * first
            c0, h0, o0 = _tables(near_C, near_next, near_H, tl.arange(0, BK), K - first, UPDATE, 1, 1)
            for start in range(begin, N, step):
                at = _part(order, start, part, N, BN, TILE)
                w = _at(W, at, N)[None, :]
                g = w if UPDATE else _at(G, at, N)[None, :]
                near, z = _statistics(w, c0, near_C, K - first, scale, 1, 1, BK, tiles, False)
                mean = _mean(
                    w, g, near, z, c0, h0, o0, near_C, near_next, near_H, K - first, scale, UPDATE, 1, 1, BK, tiles,
                    False,
                )  # fmt: skip
                share = tl.where(at < N, 1.0 / z, 0.0)
                for tile in range(0, tiles):
                    ks = tile * BK + tl.arange(0, BK)
                    c, h, o = _tables(near_C, near_next, near_H, ks, K - first, UPDATE, 1, 1)
                    P, e = _through_softmax(w, g, near, mean, c, h, o, scale, UPDATE, 1, False)
                    received = e * (w - c.trans(1, 0)) * (share * slope)[None, :]
                    if not UPDATE:
                        received += P * (g * share[None, :])
                    none = tl.zeros((BK,), tl.float32)
                    _deposit(tl.sum(received, 1)[None, :], none, partial, first + ks, True, 1, 1)
            tl.debug_barrier()


@triton.jit
def _through(
    w, g, windows, part, C, C_next, H, K, scale, slope, UPDATE: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr
):
    """`(BN,)`: what the weights receive from their windows."""
    low, first, tiles = _window(windows, part, BN)
    if tiles == 1:
        c, h, o = _near_tables(C, C_next, H, low, UPDATE, BK)
        difference, P, e, z = _through_attention(w, g, c, h, o, scale, UPDATE)
        result = -slope * tl.sum(e * difference, 0)
        if UPDATE:
            result += tl.sum(P * h, 0)
        result /= z
    else:
        C, C_next, H = C + 2 * first, C_next + 2 * first, H + 2 * first
        pushed = _pushed(
            w[None, :], g[None, :], C, C_next, H, K - first, scale, slope, UPDATE, 1, 1, BK, tiles, False
        )  # fmt: skip
        result = tl.sum(pushed, 0)
    return result


@triton.jit
def gradient(
    G, W, trail, Hs, scale, slope, dW, room, N, K, last, low, high, shift, program, programs, BK: tl.constexpr,
    BN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dW: through the output, made by row `last` of the trail, and through the iterations low ... high - 1."""
    order = dW.to(tl.pointer_type(tl.int32), bitcast=True)
    places = _places(room, program, TILE)
    row = 2 * K
    windows = _windows(room, 0, program, programs, TILE)
    _find_windows(order, trail + last * row, scale, windows, N, K, program, programs, BK, BN, TILE)
    for t in range(low, high):
        windows = _windows(room, t - low + 1, program, programs, TILE)
        _find_windows(order, trail + t * row, scale, windows, N, K, program, programs, BK, BN, TILE)
    for start in range(program * TILE, N, programs * TILE):
        _put_in_room(order, places, start, N, TILE)
        at = _part_in_room(places, start, 0, N, BN, TILE)
        next_at = _part_in_room(places, start, BN, N, BN, TILE)
        w = _at(W, at, N)
        g = _at(G, at, N)
        for part in range(0, tl.minimum(N - start, TILE), BN):
            ahead = _part_in_room(places, start, part + 2 * BN, N, BN, TILE)
            next_w = _at(W, next_at, N)
            next_g = _at(G, next_at, N)
            C = trail + last * row
            windows = _windows(room, 0, program, programs, TILE)
            dw = _through(w, g, windows, part, C, C, C, K, scale, slope, False, BK, BN)
            for t in range(low, high):
                C = trail + t * row
                H = Hs + (t + shift) * row
                windows = _windows(room, t - low + 1, program, programs, TILE)
                dw += _through(w, w, windows, part, C, C + row, H, K, scale, slope, True, BK, BN)
            tl.store(dW + at, dw, mask=at < N)
            at, next_at, w, g = next_at, ahead, next_w, next_g
