"""d = 1 in float32 with many centroids: only near ones matter.

In float32 the attention of a weight to a centroid some way off is zero, exactly.  A tile of weights is put in order, so
that those next to each other attend to the same few centroids, a window of them; the rest of the way is `differences`,
on windows instead of all centroids.  Tiles are not put in one order with the others: their distributions are alike, and
so are the windows of a part (the smallest weights, the next ones, ...) of all the tiles of a program.

The order is kept where the result will be, W_tilde or dW, until it comes: the places of a tile's weights, from the
smallest weight to the largest.  A tile that gets its result has them in the `room` of the program, meanwhile.

A window covers what it must whatever the order of the centroids; it is small if the centroids are in order, too.
"""

import triton
import triton.language as tl

from .differences import FAR, _centroids, _deposit, _distance, _mean, _pushed, _statistics, _tables, _through_softmax

LAST = tl.constexpr(0x7FFFFFFF)  # the key after all others
ZERO = tl.constexpr(151.0)  # 2^-151 is zero, also where there are subnormal numbers
MANY = tl.constexpr(64)  # tiles looked at together


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
        # bitonic, as a loop: tl.sort is unrolled, which takes a minute to compile
        size = 2
        while size <= TILE:
            stride = size // 2
            while stride > 0:
                y = tl.gather(x, place ^ stride, 0)
                x = tl.where(((place & stride) == 0) == ((place & size) == 0), tl.minimum(x, y), tl.maximum(x, y))
                stride //= 2
            size *= 2
        tl.store(order + first + place, x, mask=first + place < N)
    tl.debug_barrier()


@triton.jit
def _extremes(W, order, N, part, program, programs, BN: tl.constexpr, TILE: tl.constexpr):
    """The smallest and the largest weight in this part of this program's tiles."""
    smallest = float("inf")
    largest = -float("inf")
    for first in range(program, tl.cdiv(N, TILE), programs * MANY):
        start = (first + tl.arange(0, MANY) * programs) * TILE
        some = start + part < N
        place = tl.load(order + start + part, mask=some, other=0) & (TILE - 1)
        smallest = tl.minimum(smallest, tl.min(tl.load(W + start + place, mask=some, other=float("inf")), 0))
        place = tl.load(order + tl.minimum(start + part + BN, N) - 1, mask=some, other=0) & (TILE - 1)
        largest = tl.maximum(largest, tl.max(tl.load(W + start + place, mask=some, other=-float("inf")), 0))
    return smallest, largest


@triton.jit
def _window(C, K, smallest, largest, scale, BK: tl.constexpr, KB: tl.constexpr):
    """Where the centroids begin that a weight between these two may attend to, and how many tiles of them there are."""
    smallest -= tl.abs(smallest) * 2.0**-9 + 1e-30  # the order is that of at least 10 bits of the mantissa
    largest += tl.abs(largest) * 2.0**-9 + 1e-30
    ks = tl.arange(0, KB)
    c = tl.load(C + 2 * ks, mask=ks < K, other=FAR)
    farthest = tl.min(tl.maximum(tl.abs(c - smallest), tl.abs(c - largest)), 0)  # none of the weights has none nearer
    nearest = tl.maximum(tl.maximum(smallest - c, c - largest), 0.0)
    matters = (ks < K) & (nearest * nearest <= farthest * farthest * 1.0001 + ZERO / scale)
    low = tl.minimum(tl.min(tl.where(matters, ks, K), 0), K - BK)
    high = tl.max(tl.where(matters, ks, -1), 0) + 1
    return low, tl.maximum(tl.cdiv(high - low, BK), 1)


@triton.jit
def _clear(partial, KP, BK: tl.constexpr):
    for first in range(0, 2 * KP, BK):
        tl.store(partial + first + tl.arange(0, BK), tl.zeros((BK,), tl.float32))
    tl.debug_barrier()


@triton.jit
def _part(W, order, start, part, N, BN: tl.constexpr, TILE: tl.constexpr):
    """`(BN,)`: which of these weights exist, and where they are; and the weights, `(1, BN)`."""
    rows = start + part + tl.arange(0, BN)
    at = start + (tl.load(order + rows, mask=rows < N, other=0) & (TILE - 1))
    return rows < N, at, tl.load(W + at, mask=rows < N, other=0.0)[None, :]


@triton.jit
def sums(
    W, W_tilde, C, scale, partial, N, K, KP, program, programs, FIRST: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, TILE: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """A^T [W, 1] of this program's weights; FIRST puts them in order."""
    partial += program * KP * 2
    order = W_tilde.to(tl.pointer_type(tl.int32), bitcast=True)
    _clear(partial, KP, BK)
    if FIRST:
        _put_in_order(W, order, N, program, programs, TILE)
    for part in range(0, TILE, BN):
        smallest, largest = _extremes(W, order, N, part, program, programs, BN, TILE)
        if smallest <= largest:
            low, tiles = _window(C, K, smallest, largest, scale, BK, KB)
            near_C = C + 2 * low
            ks = low + tl.arange(0, BK)
            c0 = _centroids(near_C, tl.arange(0, BK), K - low, 2, FAR, 1, 1)
            if tiles == 1:
                acc = tl.zeros((1, BK, BN), tl.float32)
                mass = tl.zeros((BK, BN), tl.float32)
                exists, _at, w = _part(W, order, program * TILE, part, N, BN, TILE)
                for start in range(program * TILE, N, programs * TILE):
                    next_exists, _at, next_w = _part(W, order, start + programs * TILE, part, N, BN, TILE)  # ahead
                    near, z = _statistics(w, c0, near_C, K - low, scale, 1, 1, BK, 1, False)
                    share = tl.where(exists, 1.0 / z, 0.0)
                    P = tl.exp2((near[None, :] - _distance(w, c0, False)) * scale)
                    acc += P[None, :, :] * (w * share[None, :])[:, None, :]
                    mass += P * share[None, :]
                    exists, w = next_exists, next_w
                _deposit(tl.sum(acc, 2), tl.sum(mass, 1), partial, ks, True, 1, 1)
            else:
                for start in range(program * TILE, N, programs * TILE):
                    exists, _at, w = _part(W, order, start, part, N, BN, TILE)
                    near, z = _statistics(w, c0, near_C, K - low, scale, 1, 1, BK, tiles, False)
                    share = tl.where(exists, 1.0 / z, 0.0)
                    for tile in range(0, tiles):
                        c = _centroids(near_C, tile * BK + tl.arange(0, BK), K - low, 2, FAR, 1, 1)
                        P = tl.exp2((near[None, :] - _distance(w, c, False)) * scale) * share[None, :]
                        received = tl.sum(P[None, :, :] * w[:, None, :], 2)
                        _deposit(received, tl.sum(P, 1), partial, tile * BK + ks, True, 1, 1)
            tl.debug_barrier()  # windows overlap: the next part adds to what this one has written


# A program's room: the places in a tile, 16 bit each; then for each part of the tiles and each row of the trail in
# question, the window: where it begins, and how many tiles it has.


@triton.jit
def _windows(room, TILE: tl.constexpr):
    return (room + TILE // 2).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _find_windows(
    W, order, C, scale, room, N, K, level, levels, program, programs, BK: tl.constexpr, BN: tl.constexpr,
    TILE: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    for part in range(0, TILE, BN):
        smallest, largest = _extremes(W, order, N, part, program, programs, BN, TILE)
        low, tiles = _window(C, K, smallest, largest, scale, BK, KB)
        at = _windows(room, TILE) + (part // BN * levels + level) * 2
        tl.store(at, low)
        tl.store(at + 1, tiles)


@triton.jit
def _read_window(room, part, level, levels, BN: tl.constexpr, TILE: tl.constexpr):
    at = _windows(room, TILE) + (part // BN * levels + level) * 2
    return tl.load(at), tl.load(at + 1)


@triton.jit
def _put_in_room(order, room, start, N, TILE: tl.constexpr):
    place = tl.arange(0, TILE)
    x = tl.load(order + start + place, mask=start + place < N, other=0)
    tl.debug_barrier()  # of the tile before, everything has been read
    tl.store(room.to(tl.pointer_type(tl.int16), bitcast=True) + place, (x & (TILE - 1)).to(tl.int16))
    tl.debug_barrier()


@triton.jit
def _part_in_room(W, room, start, part, N, BN: tl.constexpr):
    """`_part`, of a tile that is in the room."""
    rows = part + tl.arange(0, BN)
    exists = start + rows < N
    at = start + tl.load(room.to(tl.pointer_type(tl.int16), bitcast=True) + rows, mask=exists, other=0).to(tl.int32)
    return exists, at, tl.load(W + at, mask=exists, other=0.0)[None, :]


@triton.jit
def averages(
    W, C, scale, W_tilde, room, N, K, levels, program, programs, BK: tl.constexpr, BN: tl.constexpr,
    TILE: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """W_tilde = A C."""
    order = W_tilde.to(tl.pointer_type(tl.int32), bitcast=True)
    room += program * (TILE // 2 + TILE // BN * levels * 2)
    _find_windows(W, order, C, scale, room, N, K, 0, levels, program, programs, BK, BN, TILE, KB)
    for start in range(program * TILE, N, programs * TILE):
        _put_in_room(order, room, start, N, TILE)
        for part in range(0, tl.minimum(N - start, TILE), BN):
            exists, at, w = _part_in_room(W, room, start, part, N, BN)
            low, tiles = _read_window(room, part, 0, levels, BN, TILE)
            near_C = C + 2 * low
            c0 = _centroids(near_C, tl.arange(0, BK), K - low, 2, FAR, 1, 1)
            if tiles == 1:
                near, z = _statistics(w, c0, near_C, K - low, scale, 1, 1, BK, 1, False)
                P = tl.exp2((near[None, :] - _distance(w, c0, False)) * scale)
                total = tl.sum(P[None, :, :] * c0[:, :, None], 1)
            else:
                near, z = _statistics(w, c0, near_C, K - low, scale, 1, 1, BK, tiles, False)
                total = tl.zeros((1, BN), tl.float32)
                for tile in range(0, tiles):
                    c = _centroids(near_C, tile * BK + tl.arange(0, BK), K - low, 2, FAR, 1, 1)
                    P = tl.exp2((near[None, :] - _distance(w, c, False)) * scale)
                    total += tl.sum(P[None, :, :] * c[:, :, None], 1)
            tl.store(W_tilde + at[None, :], total / z[None, :], mask=exists[None, :])


@triton.jit
def _received(w, g, share, near, mean, c, h, o, scale, slope, UPDATE: tl.constexpr):
    """`(1, BK, BN)`: what the centroids of a tile receive from each weight."""
    P, e = _through_softmax(w, g, near, mean, c, h, o, scale, UPDATE, 1, False)
    received = (e * (share * slope)[None, :])[None, :, :] * (w[:, None, :] - c[:, :, None])
    if not UPDATE:
        received += P[None, :, :] * (g * share[None, :])[:, None, :]
    return received


@triton.jit
def _part_and_gradient(G, W, order, start, part, N, UPDATE: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr):
    exists, at, w = _part(W, order, start, part, N, BN, TILE)
    g = w
    if not UPDATE:
        g = tl.load(G + at, mask=exists, other=0.0)[None, :]
    return exists, w, g


@triton.jit
def gradient_sums(
    G, W, dW, C, C_next, H, scale, slope, partial, N, K, KP, program, programs, UPDATE: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """What the centroids receive, sum_i e (w - c) and, from the output, A g; the last column is zero.

    What comes from the output is first, and puts the weights in order.
    """
    partial += program * KP * 2
    order = dW.to(tl.pointer_type(tl.int32), bitcast=True)
    none = tl.zeros((BK,), tl.float32)
    _clear(partial, KP, BK)
    if not UPDATE:
        _put_in_order(W, order, N, program, programs, TILE)
    for part in range(0, TILE, BN):
        smallest, largest = _extremes(W, order, N, part, program, programs, BN, TILE)
        if smallest <= largest:
            low, tiles = _window(C, K, smallest, largest, scale, BK, KB)
            near_C, near_next, near_H = C + 2 * low, C_next + 2 * low, H + 2 * low
            ks = low + tl.arange(0, BK)
            c0, h0, o0 = _tables(near_C, near_next, near_H, tl.arange(0, BK), K - low, UPDATE, 1, 1)
            acc = tl.zeros((1, BK, BN), tl.float32)
            exists, w, g = _part_and_gradient(G, W, order, program * TILE, part, N, UPDATE, BN, TILE)
            for start in range(program * TILE, N, programs * TILE):
                ahead = start + programs * TILE
                next_exists, next_w, next_g = _part_and_gradient(G, W, order, ahead, part, N, UPDATE, BN, TILE)
                if tiles == 1:
                    near, z = _statistics(w, c0, near_C, K - low, scale, 1, 1, BK, 1, False)
                    mean = _mean(
                        w, g, near, z, c0, h0, o0, near_C, near_next, near_H, K - low, scale, UPDATE, 1, 1, BK, 1,
                        False,
                    )  # fmt: skip
                    share = tl.where(exists, 1.0 / z, 0.0)
                    acc += _received(w, g, share, near, mean, c0, h0, o0, scale, slope, UPDATE)
                else:
                    near, z = _statistics(w, c0, near_C, K - low, scale, 1, 1, BK, tiles, False)
                    mean = _mean(
                        w, g, near, z, c0, h0, o0, near_C, near_next, near_H, K - low, scale, UPDATE, 1, 1, BK, tiles,
                        False,
                    )  # fmt: skip
                    share = tl.where(exists, 1.0 / z, 0.0)
                    for tile in range(0, tiles):
                        c, h, o = _tables(
                            near_C, near_next, near_H, tile * BK + tl.arange(0, BK), K - low, UPDATE, 1, 1
                        )
                        received = _received(w, g, share, near, mean, c, h, o, scale, slope, UPDATE)
                        _deposit(tl.sum(received, 2), none, partial, tile * BK + ks, True, 1, 1)
                exists, w, g = next_exists, next_w, next_g
            if tiles == 1:
                _deposit(tl.sum(acc, 2), none, partial, ks, True, 1, 1)
            tl.debug_barrier()


@triton.jit
def _through(
    w, g, room, part, level, levels, C, C_next, H, K, scale, slope, UPDATE: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`(1, BN)`: what the weights receive from their window."""
    low, tiles = _read_window(room, part, level, levels, BN, TILE)
    C, C_next, H = C + 2 * low, C_next + 2 * low, H + 2 * low
    if tiles == 1:
        result = _pushed(w, g, C, C_next, H, K - low, scale, slope, UPDATE, 1, 1, BK, 1, False)
    else:
        result = _pushed(w, g, C, C_next, H, K - low, scale, slope, UPDATE, 1, 1, BK, tiles, False)
    return result


@triton.jit
def gradient(
    G, W, trail, Hs, scale, slope, dW, room, N, K, last, low, high, shift, levels, program, programs,
    BK: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """dW: through the output, made by row `last` of the trail, and through the iterations low ... high - 1."""
    order = dW.to(tl.pointer_type(tl.int32), bitcast=True)
    room += program * (TILE // 2 + TILE // BN * levels * 2)
    row = 2 * K
    _find_windows(W, order, trail + last * row, scale, room, N, K, 0, levels, program, programs, BK, BN, TILE, KB)
    for t in range(low, high):
        _find_windows(
            W, order, trail + t * row, scale, room, N, K, t - low + 1, levels, program, programs, BK, BN, TILE, KB
        )  # fmt: skip
    for start in range(program * TILE, N, programs * TILE):
        _put_in_room(order, room, start, N, TILE)
        for part in range(0, tl.minimum(N - start, TILE), BN):
            exists, at, w = _part_in_room(W, room, start, part, N, BN)
            g = tl.load(G + at, mask=exists, other=0.0)[None, :]
            C = trail + last * row
            dw = _through(w, g, room, part, 0, levels, C, C, C, K, scale, slope, False, BK, BN, TILE)
            for t in range(low, high):
                C = trail + t * row
                H = Hs + (t + shift) * row
                dw += _through(
                    w, w, room, part, t - low + 1, levels, C, C + row, H, K, scale, slope, True, BK, BN, TILE
                )  # fmt: skip
            tl.store(dW + at[None, :], dw, mask=exists[None, :])
