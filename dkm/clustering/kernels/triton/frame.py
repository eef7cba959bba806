"""The loop around the two families: one launch for the forward pass, one for the backward pass.

A program walks over tiles of vectors and adds up what they contribute to the centroids in its row of `partial`.  When
all programs have arrived at a barrier, the rows are added in a fixed order, a few centroids a program, and after
another barrier the next iteration begins.  Results do not depend on timing, unless programs share a row: in the
backward pass of `products`, and not where the same bits are asked for.
Convergence is seen by every program alike: the host never waits.

Programs that wait for one another must all be on the chip: these launches are cooperative.  Without barriers (the
interpreter runs one program after another; processes that share a weight add up their sums in between), the
host launches PHASE after PHASE.
"""

import triton
import triton.language as tl

from . import differences, products, windows
from .launch import quick
from .products import NEVER, split

ALL = tl.constexpr(0)
COUNT = tl.constexpr(1)  # the checksum of the weight
PREPARE = tl.constexpr(2)  # what the first iteration needs
SUMS = tl.constexpr(3)  # contributions to the centroids, into `partial`
FOLD = tl.constexpr(4)  # the rows of `partial` added up, into its first row
TAKE = tl.constexpr(5)  # from the contributions to the centroids, or to their gradient
MAP = tl.constexpr(6)  # from the centroids to W_tilde, or to dW

LOG2E = tl.constexpr(1.4426950408889634)
HEADER = tl.constexpr(3)  # words of a forward pass's state before the moves: a checksum of two, the barrier's counter


@triton.jit
def _barrier(counter, programs):
    """Nobody goes on before everybody is here; what was written before is seen after."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    target = (arrived // programs + 1) * programs
    while tl.load(counter, volatile=True) < target:  # not by atomics: those who wait would slow down the others
        pass
    # the compiler would take an atomic addition of nothing for nothing
    tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()


@triton.jit
def _checksum(W, N, program, programs, SIZE: tl.constexpr):
    """The sum of the bits of this program's share of the weights, int64."""
    if W.dtype.element_ty.primitive_bitwidth == 16:
        bits = W.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        bits = W.to(tl.pointer_type(tl.int32), bitcast=True)
    total = tl.zeros((SIZE,), tl.int64)
    for first in range(program * SIZE, N, programs * SIZE):
        at = first + tl.arange(0, SIZE)
        total += tl.load(bits + at, mask=at < N, other=0).to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _moment(checksum, seen, step, unit, hot, decay, relative, steps):
    """Whether this is another weight than the last one, its step, and its temperature."""
    changed = tl.load(checksum, cache_modifier=".cg") != tl.load(seen)
    now = tl.load(step) + changed.to(tl.int64)
    return changed, now, _temperature(now, unit, hot, decay, relative, steps)


@triton.jit
def _temperature(now, unit, hot, decay, relative, steps):
    progress = tl.minimum(now.to(tl.float32) / steps, 1.0)
    return tl.where(relative != 0, tl.load(unit), 1.0) * hot * tl.exp2(decay * progress)


@triton.jit
def _begin(
    C, start, trail, Qs, K, KP, scale, program, programs, STATEFUL: tl.constexpr, PRODUCTS: tl.constexpr,
    D: tl.constexpr, DS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The first row of the trail from C, and STATEFUL: into `start`."""
    column = tl.arange(0, E)
    for block in range(program * ROWS, KP, programs * ROWS):
        ks = block + tl.arange(0, ROWS)
        first = _centroid_rows(C, ks, K, D, D, E)
        if STATEFUL:
            at = start + ks[:, None] * D + column[None, :]
            tl.store(at, first, mask=(ks < K)[:, None] & (column < D)[None, :])
        at = trail + ks[:, None] * (D + 1) + column[None, :]
        tl.store(at, first, mask=(ks < K)[:, None] & (column <= D)[None, :])
        if PRODUCTS:
            _write_centroids(Qs, first, ks, K, KP, scale, D, DS, E)


@triton.jit
def _fold(
    partial, P, ks, KP, CLEAR: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    """The P rows of `partial` `(P, KP, D + 1)`, in order: `(ROWS, E)` for the centroids `ks`.  CLEAR: they become 0."""
    total = tl.zeros((ROWS, E), tl.float32)
    column = tl.arange(0, E)
    at = ks[:, None] * (D + 1) + column[None, :]
    mask = (ks < KP)[:, None] & (column <= D)[None, :]
    for first in range(0, P, CHUNK):
        p = first + tl.arange(0, CHUNK)
        place = partial + p[:, None, None] * (KP * (D + 1)) + at[None, :, :]
        there = (p < P)[:, None, None] & mask[None, :, :]
        # .cg: other processors wrote it, and an earlier iteration's may be in this one's cache
        piece = tl.load(place, mask=there, other=0.0, cache_modifier=".cg")
        total += tl.sum(piece, 0)
        if CLEAR:
            tl.debug_barrier()  # several threads may have read it
            tl.store(place, tl.zeros_like(piece), mask=there)
    return total


@triton.jit
def _pick(X, i, E: tl.constexpr):
    """Column i of `(ROWS, E)`, as `(ROWS, 1)`."""
    return tl.sum(tl.where((tl.arange(0, E) == i)[None, :], X, 0.0), 1)[:, None]


@triton.jit
def _write_table(table, values, offset, ks, KP, D: tl.constexpr, DS: tl.constexpr, E: tl.constexpr):
    """Rows `ks` of a table of `products`: `(ROWS, E)` values, of which D count, and `(ROWS, 1)` offsets."""
    column = tl.arange(0, E)[None, :]
    high, middle, low = split(tl.where(column < D, values, 0.0))
    # three columns, that three ones meet
    o_high, o_middle, o_low = split(offset)
    offset = tl.where(column == 0, o_high, tl.where(column == 1, o_middle, o_low))
    offset = tl.where(column < 3, offset.to(tl.float32), 0.0).to(tl.bfloat16)
    mask = (ks < KP)[:, None] & (column < DS)
    at = table + ks[:, None] * (8 * DS) + column
    _write_four(at, high, low, middle, offset, mask, DS)
    _write_four(at + 4 * DS, high, middle, offset, high, mask, DS)


@triton.jit
def _write_four(at, a, b, c, d, mask, DS: tl.constexpr):
    tl.store(at, a, mask=mask)
    tl.store(at + DS, b, mask=mask)
    tl.store(at + 2 * DS, c, mask=mask)
    tl.store(at + 3 * DS, d, mask=mask)


@triton.jit
def _write_centroids(Q, C, ks, K, KP, scale, D: tl.constexpr, DS: tl.constexpr, E: tl.constexpr):
    """The table for logits, of `(ROWS, E)` centroids."""
    C = tl.where((tl.arange(0, E) < D)[None, :], C, 0.0)
    offset = tl.where((ks < K)[:, None], tl.sum(C * C, 1)[:, None] * -scale, NEVER)
    _write_table(Q, C * (2 * scale), offset, ks, KP, D, DS, E)


@triton.jit
def _centroid_rows(X, ks, K, STRIDE: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    """`(ROWS, E)`: rows `ks`, the first D columns."""
    column = tl.arange(0, E)
    mask = (ks < K)[:, None] & (column < D)[None, :]
    return tl.load(X + ks[:, None] * STRIDE + column[None, :], mask=mask, other=0.0)


@triton.jit
def _move(
    trail, moves, partial, Qs, P, K, KP, scale, no_mass, t, program, programs, PRODUCTS: tl.constexpr,
    D: tl.constexpr, DS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """From the sums of iteration t to row t + 1 of the trail, and how far a centroid has moved at most."""
    column = tl.arange(0, E)
    for block in range(program * ROWS, KP, programs * ROWS):
        ks = block + tl.arange(0, ROWS)
        sums = _fold(partial, P, ks, KP, False, D, E, ROWS, CHUNK)
        mass = _pick(sums, D, E)
        C = _centroid_rows(trail + t * K * (D + 1), ks, K, D + 1, D, E)
        empty = mass <= no_mass
        valid = (ks < K)[:, None] & (column < D)[None, :]
        C_next = tl.where(valid, tl.where(empty, C, sums / tl.where(empty, 1.0, mass)), 0.0)
        tl.atomic_max(moves + t, tl.max(tl.max(tl.abs(C_next - C), 1), 0))
        at = trail + (t + 1) * K * (D + 1) + ks[:, None] * (D + 1) + column[None, :]
        row = tl.where((column == D)[None, :], mass, C_next)
        tl.store(at, row, mask=(ks < K)[:, None] & (column <= D)[None, :])
        if PRODUCTS:
            _write_centroids(Qs + (t + 1) * KP * 8 * DS, C_next, ks, K, KP, scale, D, DS, E)


@triton.jit
def _sums(
    W, counts, trail, Qs, scale, partial, W_tilde, N, n, K, KP, t, program, programs, PRODUCTS: tl.constexpr,
    EUCLIDEAN: tl.constexpr, COUNTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr, TILE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    if TILE:
        C = trail + t * K * 2
        windows.sums(W, W_tilde, C, scale, partial, Qs, N, K, KP, program, programs, FIRST, BK, BN, TILE)
    elif PRODUCTS:
        Q = Qs + t * KP * 8 * DS
        products.sums(W, Q, scale, partial, W_tilde, N, n, KP, program, programs, FIRST, D, DS, BK, BN, NK)
    else:
        differences.sums(
            W, counts, trail + t * K * (D + 1), scale, partial, W_tilde, N, n, K, KP, program, programs, FIRST, D, DP,
            BK, BN, NK, EUCLIDEAN, COUNTS,
        )  # fmt: skip


@triton.jit
def _iteration(
    W, counts, trail, Qs, scale, partial, W_tilde, N, n, K, KP, t, program, programs, PRODUCTS: tl.constexpr,
    EUCLIDEAN: tl.constexpr, COUNTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The sums of iteration t; of the first one W_tilde as well, or what `windows` keeps there."""
    if t == 0:
        _sums(
            W, counts, trail, Qs, scale, partial, W_tilde, N, n, K, KP, t, program, programs, PRODUCTS, EUCLIDEAN,
            COUNTS, D, DP, DS, BK, BN, NK, TILE, True,
        )  # fmt: skip
    else:
        _sums(
            W, counts, trail, Qs, scale, partial, W_tilde, N, n, K, KP, t, program, programs, PRODUCTS, EUCLIDEAN,
            COUNTS, D, DP, DS, BK, BN, NK, TILE, False,
        )  # fmt: skip


@quick
@triton.jit(do_not_specialize=["n", "K", "KP", "P", "max_iter", "relative", "steps", "t"])
def forward_kernel(
    W, counts, C, start, seen, step, unit, tau, trail, state, partial, Qs, iterations, W_tilde, N, n, K, KP, P, eps,
    no_mass, max_iter, hot, decay, relative, steps, t, PHASE: tl.constexpr, STATEFUL: tl.constexpr,
    PRODUCTS: tl.constexpr, EUCLIDEAN: tl.constexpr, COUNTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DS: tl.constexpr, E: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Up to max_iter iterations, then W_tilde = A C with the A and the C that belong together.

    The first iteration writes W_tilde, too: late in a training it is often the last.  Qs are the tables of `products`,
    or the room of `windows`.

    STATEFUL: the iterations start from C or, where the weight is the one seen last, from `start`, at the temperature of
    the step; C, start, seen and step are brought up to date, in place, and tau is written.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    row = K * (D + 1)
    checksum = state.to(tl.pointer_type(tl.int64), bitcast=True)
    counter = (state + 2).to(tl.pointer_type(tl.int32), bitcast=True)
    moves = state + HEADER
    if STATEFUL and (PHASE == ALL or PHASE == COUNT):
        tl.atomic_add(checksum, _checksum(W, N, program, programs, 1024))
    if PHASE == ALL:
        if STATEFUL:
            # Most likely the weight has changed: prepare for that, and wait for both at once.
            temperature = _temperature(tl.load(step) + 1, unit, hot, decay, relative, steps)
        else:
            temperature = tl.load(tau)
        scale = LOG2E / temperature
        _begin(C, C, trail, Qs, K, KP, scale, program, programs, False, PRODUCTS, D, DS, E, ROWS)
        _barrier(counter, programs)
        if STATEFUL:
            changed, _now, temperature = _moment(checksum, seen, step, unit, hot, decay, relative, steps)
            scale = LOG2E / temperature
            if program == 0:
                tl.store(tau, temperature)
            if changed:
                _begin(C, start, trail, Qs, K, KP, scale, program, programs, True, False, D, DS, E, ROWS)
            else:
                _begin(start, start, trail, Qs, K, KP, scale, program, programs, False, PRODUCTS, D, DS, E, ROWS)
                _barrier(counter, programs)
    elif PHASE != COUNT:
        if STATEFUL and PHASE == PREPARE:
            changed, _now, temperature = _moment(checksum, seen, step, unit, hot, decay, relative, steps)
            if program == 0:
                tl.store(tau, temperature)
        else:
            changed = True
            temperature = tl.load(tau)
        scale = LOG2E / temperature
        if PHASE == PREPARE:
            if changed:
                _begin(C, start, trail, Qs, K, KP, scale, program, programs, STATEFUL, PRODUCTS, D, DS, E, ROWS)
            else:
                _begin(start, start, trail, Qs, K, KP, scale, program, programs, False, PRODUCTS, D, DS, E, ROWS)
    if PHASE == ALL:
        t = 0
        running = 1
        while (t < max_iter) & (running != 0):
            _iteration(
                W, counts, trail, Qs, scale, partial, W_tilde, N, n, K, KP, t, program, programs, PRODUCTS, EUCLIDEAN,
                COUNTS, D, DP, DS, BK, BN, NK, TILE,
            )  # fmt: skip
            _barrier(counter, programs)
            _move(
                trail, moves, partial, Qs, P, K, KP, scale, no_mass, t, program, programs, PRODUCTS, D, DS, E, ROWS,
                CHUNK,
            )  # fmt: skip
            _barrier(counter, programs)
            running = (tl.load(moves + t) > eps).to(tl.int32)
            t += 1
    elif PHASE != COUNT:
        # converged earlier: there is nothing to do but to remember when
        used = 1
        running = 1
        for i in range(0, t):
            running = running * (tl.load(moves + i) > eps).to(tl.int32)
            used += running
        if PHASE == MAP:
            t = tl.minimum(used, max_iter)
        elif used <= t:
            return
    if PHASE == SUMS:
        _iteration(
            W, counts, trail, Qs, scale, partial, W_tilde, N, n, K, KP, t, program, programs, PRODUCTS, EUCLIDEAN,
            COUNTS, D, DP, DS, BK, BN, NK, TILE,
        )  # fmt: skip
    if PHASE == FOLD:
        _fold_rows(partial, P, KP, program, programs, False, D, E, ROWS, CHUNK)
    if PHASE == TAKE:
        _move(
            trail, moves, partial, Qs, P, K, KP, scale, no_mass, t, program, programs, PRODUCTS, D, DS, E, ROWS, CHUNK
        )
    if PHASE == ALL or PHASE == MAP:
        if program == 0:
            tl.store(iterations, t.to(tl.int64))
            if STATEFUL:
                moment = _moment(checksum, seen, step, unit, hot, decay, relative, steps)
                tl.store(step, moment[1])
                tl.store(seen, tl.load(checksum, cache_modifier=".cg"))
        if STATEFUL or t < max_iter:  # the last row is the one reached, wherever that is
            for block in range(program * ROWS, KP, programs * ROWS):
                ks = block + tl.arange(0, ROWS)
                column = tl.arange(0, E)
                at = trail + ks[:, None] * (D + 1) + column[None, :]
                mask = (ks < K)[:, None] & (column <= D)[None, :]
                reached = tl.load(at + t * row, mask=mask)
                tl.store(at + max_iter * row, reached, mask=mask)
                if STATEFUL:
                    at = C + ks[:, None] * D + column[None, :]
                    tl.store(at, reached, mask=(ks < K)[:, None] & (column < D)[None, :])
        if TILE:
            C = trail + (t - 1) * row
            windows.averages(W, C, scale, W_tilde, Qs, N, K, program, programs, BK, BN, TILE)
        elif t > 1:
            if PRODUCTS:
                products.averages(
                    W, Qs + (t - 1) * KP * 8 * DS, scale, W_tilde, N, n, program, programs, D, DS, BK, BN, NK
                )
            else:
                differences.averages(
                    W, trail + (t - 1) * row, scale, W_tilde, N, n, K, program, programs, D, DP, BK, BN, NK, EUCLIDEAN
                )


@triton.jit
def _fold_rows(
    partial, P, KP, program, programs, CLEAR: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, E)
    for block in range(program * ROWS, KP, programs * ROWS):
        ks = block + tl.arange(0, ROWS)
        total = _fold(partial, P, ks, KP, CLEAR, D, E, ROWS, CHUNK)
        tl.debug_barrier()  # another thread may have cleared it
        at = partial + ks[:, None] * (D + 1) + column[None, :]
        tl.store(at, total, mask=(ks < KP)[:, None] & (column <= D)[None, :])


@triton.jit
def _write_H(
    Hs, tables, trail, ks, u, K, KP, scale, no_mass, t, slot, PRODUCTS: tl.constexpr, D: tl.constexpr,
    DS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """H = u / mass for the way through iteration t, which made row t + 1: into `slot`, `(k, d + 1)`, or its table."""
    column = tl.arange(0, E)
    C_next = trail + (t + 1) * K * (D + 1)
    mass = tl.load(C_next + ks * (D + 1) + D, mask=ks < K, other=0.0)[:, None]
    h = tl.where(mass <= no_mass, 0.0, u / tl.where(mass <= no_mass, 1.0, mass))
    h = tl.where((column < D)[None, :], h, 0.0)
    offset = tl.sum(h * _centroid_rows(C_next, ks, K, D + 1, D, E), 1)[:, None]
    if PRODUCTS:
        _write_table(tables + slot * KP * 8 * DS, h * (2 * scale), offset * (-2 * scale), ks, KP, D, DS, E)
    else:
        at = Hs + slot * K * (D + 1) + ks[:, None] * (D + 1) + column[None, :]
        h = tl.where((column == D)[None, :], offset, h)
        tl.store(at, h, mask=(ks < K)[:, None] & (column <= D)[None, :])


@triton.jit
def _take(
    trail, us, Hs, tables, partial, P, K, KP, scale, no_mass, t, target, slot, stays, program, programs,
    PRODUCTS: tl.constexpr, D: tl.constexpr, DS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """What row t of the trail received, into `us[target]`; an empty centroid passes on, from the next row, too.

    H of it, for the way through the iteration before, into `slot`.
    """
    column = tl.arange(0, E)
    for block in range(program * ROWS, KP, programs * ROWS):
        ks = block + tl.arange(0, ROWS)
        total = _fold(partial, P, ks, KP, PRODUCTS, D, E, ROWS, CHUNK)
        C = _centroid_rows(trail + t * K * (D + 1), ks, K, D + 1, D, E)
        u = total - _pick(total, D, E) * C
        mask = (ks < K)[:, None] & (column < D)[None, :]
        at = us + target * K * D + ks[:, None] * D + column[None, :]
        if stays:
            mass = tl.load(trail + (t + 1) * K * (D + 1) + ks * (D + 1) + D, mask=ks < K, other=0.0)[:, None]
            u += tl.where(mass <= no_mass, tl.load(at + K * D, mask=mask, other=0.0), 0.0)
        tl.store(at, u, mask=mask)
        if t > 0:  # on the way through iteration t - 1, which made this row
            _write_H(Hs, tables, trail, ks, u, K, KP, scale, no_mass, t - 1, slot, PRODUCTS, D, DS, E)


@triton.jit
def _gradient_sums(
    G, W, counts, trail, Qs, Hs, tables, scale, slope, partial, dW, N, n, K, KP, P, t, slot, program, programs,
    UPDATE: tl.constexpr, PUSH: tl.constexpr, RECEIVE: tl.constexpr, PRODUCTS: tl.constexpr,
    EUCLIDEAN: tl.constexpr, COUNTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if TILE:
        C = trail + t * K * 2
        windows.gradient_sums(
            G, W, dW, C, C + K * 2, Hs + slot * K * 2, scale, slope, partial, Qs, N, K, KP, program, programs, UPDATE,
            BK, BN, TILE,
        )  # fmt: skip
    elif PRODUCTS:
        products.gradient_sums(
            G, W, Qs + t * KP * 8 * DS, tables + slot * KP * 8 * DS, scale, slope, partial, dW, N, n, KP, P, program,
            programs, UPDATE, PUSH, RECEIVE, D, DS, BK, BN, NK,
        )  # fmt: skip
    else:
        C = trail + t * K * (D + 1)
        differences.gradient_sums(
            G, W, counts, C, C + K * (D + 1), Hs + slot * K * (D + 1), scale, slope, partial, dW, N, n, K, KP,
            program, programs, UPDATE, PUSH, RECEIVE, D, DP, BK, BN, NK, EUCLIDEAN, COUNTS,
        )  # fmt: skip


@triton.jit
def _asked_for(t, CENTROIDS: tl.constexpr):
    """Whether anybody asks for the gradient of row t of the trail."""
    if CENTROIDS:
        return True
    else:
        return t > 0


@triton.jit
def _contributions(
    G, W, counts, trail, Qs, Hs, tables, scale, slope, partial, dW, N, n, K, KP, P, t, slot, program, programs,
    UPDATE: tl.constexpr, PUSH: tl.constexpr, CENTROIDS: tl.constexpr, PRODUCTS: tl.constexpr,
    EUCLIDEAN: tl.constexpr, COUNTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`_gradient_sums`, as far as anybody asks for them."""
    if _asked_for(t, CENTROIDS):
        _gradient_sums(
            G, W, counts, trail, Qs, Hs, tables, scale, slope, partial, dW, N, n, K, KP, P, t, slot, program, programs,
            UPDATE, PUSH, True, PRODUCTS, EUCLIDEAN, COUNTS, D, DP, DS, BK, BN, NK, TILE,
        )  # fmt: skip
    elif PUSH:
        _gradient_sums(
            G, W, counts, trail, Qs, Hs, tables, scale, slope, partial, dW, N, n, K, KP, P, t, slot, program, programs,
            UPDATE, PUSH, False, PRODUCTS, EUCLIDEAN, COUNTS, D, DP, DS, BK, BN, NK, TILE,
        )  # fmt: skip


@quick
@triton.jit(do_not_specialize=["n", "K", "KP", "P", "max_iter", "t", "slot", "target"])
def backward_kernel(
    G, W, counts, trail, iterations, tau, us, Hs, tables, Qs, partial, dW, N, n, K, KP, P, no_mass, max_iter, t,
    slot, target, PHASE: tl.constexpr, MODE: tl.constexpr, OUTPUT: tl.constexpr, UPDATES: tl.constexpr,
    PUSH: tl.constexpr, CENTROIDS: tl.constexpr, PRODUCTS: tl.constexpr, EUCLIDEAN: tl.constexpr,
    COUNTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr, E: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, NK: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """From the last iteration to the first, what the centroids receive, `us`; then dW, through all of them at once.

    With PUSH, dW adds up on the way instead: fewer exponentials, but in 16 bit the sum would lose what the arithmetic
    kept, and a float32 one would take twice the memory.

    us[i] is the gradient of row i of the trail and H of `slot` i belongs to it, but for the fixed point: there,
    slot max_iter belongs to row `used`, of which t = used - 1 is the iteration.  With PUSH, there is one slot.
    OUTPUT and UPDATES say what MAP, or for OUTPUT also SUMS, goes through.  Without CENTROIDS, nobody asks for us[0].
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    temperature = tl.load(tau)
    scale = LOG2E / temperature
    slope = (1.0 if EUCLIDEAN else 2.0) / temperature
    used = tl.load(iterations).to(tl.int32)
    # the mass of the first row, which nothing made: the forward pass left zero there
    counter = (trail + D).to(tl.pointer_type(tl.int32), bitcast=True)
    if PHASE == ALL or PHASE == PREPARE:
        if PRODUCTS:
            if _asked_for(used - 1, CENTROIDS):
                for first in range(program * 1024, P * KP * (D + 1), programs * 1024):
                    at = first + tl.arange(0, 1024)
                    tl.store(partial + at, tl.zeros((1024,), tl.float32), mask=at < P * KP * (D + 1))
            for i in range(0, used):
                for block in range(program * ROWS, KP, programs * ROWS):
                    ks = block + tl.arange(0, ROWS)
                    C = _centroid_rows(trail + i * K * (D + 1), ks, K, D + 1, D, E)
                    _write_centroids(Qs + i * KP * 8 * DS, C, ks, K, KP, scale, D, DS, E)
    if PHASE == ALL:
        if PRODUCTS:
            _barrier(counter, programs)
        _contributions(
            G, W, counts, trail, Qs, Hs, tables, scale, slope, partial, dW, N, n, K, KP, P, used - 1, 0, program,
            programs, False, PUSH, CENTROIDS, PRODUCTS, EUCLIDEAN, COUNTS, D, DP, DS, BK, BN, NK, TILE,
        )  # fmt: skip
        if _asked_for(used - 1, CENTROIDS):
            _barrier(counter, programs)
            _take(
                trail, us, Hs, tables, partial, P, K, KP, scale, no_mass, used - 1, used - 1,
                0 if PUSH else used - 1, False, program, programs, PRODUCTS, D, DS, E, ROWS, CHUNK,
            )  # fmt: skip
        for back in range(2, used + 1):
            _barrier(counter, programs)
            i = used - back
            _contributions(
                G, W, counts, trail, Qs, Hs, tables, scale, slope, partial, dW, N, n, K, KP, P, i,
                0 if PUSH else i + 1, program, programs, True, PUSH, CENTROIDS, PRODUCTS, EUCLIDEAN, COUNTS, D, DP,
                DS, BK, BN, NK, TILE,
            )  # fmt: skip
            if _asked_for(i, CENTROIDS):
                _barrier(counter, programs)
                _take(
                    trail, us, Hs, tables, partial, P, K, KP, scale, no_mass, i, i, 0 if PUSH else i, True, program,
                    programs, PRODUCTS, D, DS, E, ROWS, CHUNK,
                )  # fmt: skip
        if not PUSH:
            _barrier(counter, programs)
    if PHASE == SUMS or PHASE == TAKE:
        if MODE == "unrolled" and not OUTPUT:
            if t >= used - 1:
                return
        else:
            t = used - 1
            if MODE == "unrolled":
                target = t
    if PHASE == TAKE:
        if not _asked_for(t, CENTROIDS):
            return
    if PHASE == SUMS:
        _contributions(
            G, W, counts, trail, Qs, Hs, tables, scale, slope, partial, dW, N, n, K, KP, P, t, slot, program,
            programs, not OUTPUT, PUSH, CENTROIDS, PRODUCTS, EUCLIDEAN, COUNTS, D, DP, DS, BK, BN, NK, TILE,
        )  # fmt: skip
    if PHASE == FOLD:
        _fold_rows(partial, P, KP, program, programs, PRODUCTS, D, E, ROWS, CHUNK)
    if PHASE == TAKE:
        _take(
            trail, us, Hs, tables, partial, P, K, KP, scale, no_mass, t, target, 0 if PUSH else target,
            (MODE == "unrolled") and not OUTPUT, program, programs, PRODUCTS, D, DS, E, ROWS, CHUNK,
        )  # fmt: skip
    if PHASE == MAP or (PHASE == ALL and not PUSH):
        low = 0
        high = 0
        shift = 1
        if UPDATES:
            if MODE == "unrolled":
                high = used - 1
            else:
                low = used - 1
                high = used
                shift = max_iter - low
        if TILE:
            windows.gradient(
                G, W, trail, Hs, scale, slope, dW, Qs, N, K, used - 1, low, high, shift, program, programs, BK, BN,
                TILE,
            )  # fmt: skip
        elif PRODUCTS:
            products.gradient(
                G, W, Qs, tables, scale, slope, dW, N, n, used - 1, low, high, shift, KP * 8 * DS, program, programs,
                D, DS, BK, BN, NK,
            )  # fmt: skip
        else:
            differences.gradient(
                G, W, trail, Hs, scale, slope, dW, N, n, K, used - 1, low, high, shift, program, programs, OUTPUT,
                D, DP, BK, BN, NK, EUCLIDEAN,
            )  # fmt: skip


@quick
@triton.jit
def fixed_point_kernel(
    trail, iterations, tau, us, Hs, tables, K, KP, no_mass, source, slot, PRODUCTS: tl.constexpr, D: tl.constexpr,
    DS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """H of us[source], for the way through the last iteration, into `slot`."""
    ks = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    u = _centroid_rows(us + source * K * D, ks, K, D, D, E)
    t = tl.load(iterations).to(tl.int32) - 1
    _write_H(Hs, tables, trail, ks, u, K, KP, LOG2E / tl.load(tau), no_mass, t, slot, PRODUCTS, D, DS, E)
