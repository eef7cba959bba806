"""d = 1 in float32 with many centroids: for each weight, only the centroids near to it.

In float32 the attention of a weight to a centroid some way off is exactly zero.  The weights of a tile (WINDOWS_TILE of
them) are put in order, so that neighbours attend to the same few centroids, their window.  Each tile has an order of
its own.  A part is 32 neighbours in this order: the 32 smallest weights of a tile, the next 32, and so on.  Tiles of
one weight usually have similar distributions, so that equally numbered parts of all tiles need about the same
centroids: a program finds one window per number, wide enough for that part of all its tiles.

A warp computes a part, one weight per thread.  BLOCK_N weights are BLOCK_N / PART parts, each with its own window of
BLOCK_K centroids, and of the `(BLOCK_K, BLOCK_N)` attention a thread has one column.  Where BLOCK_K centroids do not
suffice for some part, because the temperature is high or the weights are few, all BLOCK_N weights share one window of
several tiles of centroids, and are computed with the functions of `differences`.

The order of a tile is kept in the memory that will take the result, W_tilde or dW.  Before a tile's result is written
there, its order is copied to the program's share of the workspace.

A window covers all centroids that matter, whatever the order of the centroids.  It is small if they are in order, too.

Names are explained in the glossary of `triton/__init__.py`.
"""

import triton
import triton.language as tl

from .differences import (
    FAR,
    deposit,
    distances,
    load_centroids,
    load_gradient_tiles,
    logits,
    mean_attention_gradient,
    statistics,
    through_softmax,
    vector_gradients,
)
from .order import (
    PART,
    find_windows,
    load_order,
    load_order_from_workspace,
    load_window,
    move_order_to_workspace,
    places_of,
    put_in_order,
    windows_of,
)


@triton.jit
def _load_near(X, low, BLOCK_K: tl.constexpr):
    """`(BLOCK_K, BLOCK_N)`: the first column of the rows of X, `(k, 2)`, that begin at `low`."""
    offs = 2 * (low[None, :] + tl.arange(0, BLOCK_K)[:, None])
    # Flat: otherwise the compiler would give the threads rows of this load, and of all that is computed from it.
    return tl.reshape(tl.load(X + tl.reshape(offs, (offs.numel,))), offs.shape)


@triton.jit
def _attention(difference, scale):
    """The softmax numerators, relative to that of the nearest centroid, `(BLOCK_K, BLOCK_N)`, and their sum."""
    distance = tl.abs(difference)
    numerators = tl.exp2(logits(tl.min(distance, 0)[None, :], distance, scale, False, 1))
    return numerators, tl.sum(numerators, 0)


@triton.jit
def _prepare(
    W, order, C, scale, partial, windows, N, K, K_PADDED, program, programs, FIRST: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWS_TILE: tl.constexpr,
):  # fmt: skip
    """What a walk over this program's weights needs: zeros in `partial`, the windows and, if FIRST, the order."""
    for first in range(0, 2 * K_PADDED, BLOCK_K):
        tl.store(partial + first + tl.arange(0, BLOCK_K), tl.zeros((BLOCK_K,), tl.float32))
    tl.debug_barrier()
    if FIRST:
        put_in_order(W, order, N, program, programs, WINDOWS_TILE)
    find_windows(
        order=order, C=C, scale=scale, windows=windows, N=N, K=K, program=program, programs=programs, BLOCK_K=BLOCK_K,
        BLOCK_N=BLOCK_N, WINDOWS_TILE=WINDOWS_TILE,
    )  # fmt: skip


@triton.jit
def _add_to_windows(received, mass, partial, windows, part, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add `(BLOCK_K, BLOCK_N)`, what the centroids of the windows receive, to this program's row of `partial`.

    `mass` may be None.
    """
    parts = tl.arange(0, BLOCK_N // PART)
    low = tl.load(windows + part // PART + parts) & 0xFFFF
    ptrs = partial + 2 * (low[None, :] + tl.arange(0, BLOCK_K)[:, None])
    received = tl.sum(tl.reshape(received, (BLOCK_K, BLOCK_N // PART, PART)), 2)
    if mass is not None:
        mass = tl.sum(tl.reshape(mass, (BLOCK_K, BLOCK_N // PART, PART)), 2)
    for i in range(0, BLOCK_N // PART):  # one window after the other, as they overlap
        chosen = (parts == i)[None, :]
        tl.store(ptrs, tl.load(ptrs, mask=chosen, other=0.0) + received, mask=chosen)
        if mass is not None:
            tl.store(ptrs + 1, tl.load(ptrs + 1, mask=chosen, other=0.0) + mass, mask=chosen)
        tl.debug_barrier()


@triton.jit
def _gather(X, offs, N):
    return tl.load(X + offs, mask=offs < N, other=0.0)


@triton.jit
def sums(
    W, W_tilde, C, scale, partial, workspace, N, K, K_PADDED, program, programs, FIRST: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWS_TILE: tl.constexpr,
):  # fmt: skip
    """A^T [W, 1] of this program's weights; if FIRST, they are put in order before."""
    partial += program * K_PADDED * 2
    order = W_tilde.to(tl.pointer_type(tl.int32), bitcast=True)
    windows = windows_of(workspace, 0, program, programs, WINDOWS_TILE)
    begin = program * WINDOWS_TILE
    step = programs * WINDOWS_TILE
    _prepare(
        W=W, order=order, C=C, scale=scale, partial=partial, windows=windows, N=N, K=K, K_PADDED=K_PADDED,
        program=program, programs=programs, FIRST=FIRST, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, WINDOWS_TILE=WINDOWS_TILE,
    )  # fmt: skip
    for part in range(0, tl.minimum(WINDOWS_TILE, N - begin), BLOCK_N):
        low, first, tiles = load_window(windows, part, BLOCK_N)
        if tiles == 1:
            c = _load_near(C, low, BLOCK_K)
            acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
            mass = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
            # the order is read two tiles ahead, and weights one tile ahead
            offs = load_order(order, begin, part, N, BLOCK_N, WINDOWS_TILE)
            next_offs = load_order(order, begin + step, part, N, BLOCK_N, WINDOWS_TILE)
            w = _gather(W, offs, N)
            for start in range(begin, N, step):
                ahead = load_order(order, start + 2 * step, part, N, BLOCK_N, WINDOWS_TILE)
                next_w = _gather(W, next_offs, N)
                numerators, denominator = _attention(w[None, :] - c, scale)
                share = tl.where(offs < N, 1.0 / denominator, 0.0)
                acc += numerators * (w * share)[None, :]
                mass += numerators * share[None, :]
                offs, next_offs, w = next_offs, ahead, next_w
            _add_to_windows(acc, mass, partial, windows, part, BLOCK_K, BLOCK_N)
        else:
            near_C = C + 2 * first
            c0 = load_centroids(near_C, tl.arange(0, BLOCK_K), K - first, 2, FAR, 1, 1)
            for start in range(begin, N, step):
                offs = load_order(order, start, part, N, BLOCK_N, WINDOWS_TILE)
                w = _gather(W, offs, N)[None, :]
                nearest, denominator = statistics(
                    w=w, c0=c0, C=near_C, K=K - first, scale=scale, D=1, D_PADDED=1, BLOCK_K=BLOCK_K, K_TILES=tiles,
                    EUCLIDEAN=False,
                )  # fmt: skip
                share = tl.where(offs < N, 1.0 / denominator, 0.0)
                for tile in range(0, tiles):
                    offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
                    c = load_centroids(near_C, offs_k, K - first, 2, FAR, 1, 1)
                    numerators = tl.exp2(logits(nearest[None, :], distances(w, c, False), scale, False, 1))
                    A = numerators * share[None, :]
                    deposit(tl.sum(A * w, 1)[None, :], tl.sum(A, 1), partial, first + offs_k, True, 1, 1)
            tl.debug_barrier()  # the next parts add to what these have written


@triton.jit
def averages(
    W, C, scale, W_tilde, workspace, N, K, program, programs, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWS_TILE: tl.constexpr,
):  # fmt: skip
    """W_tilde = A C."""
    order = W_tilde.to(tl.pointer_type(tl.int32), bitcast=True)
    places = places_of(workspace, program, WINDOWS_TILE)
    windows = windows_of(workspace, 0, program, programs, WINDOWS_TILE)
    find_windows(
        order=order, C=C, scale=scale, windows=windows, N=N, K=K, program=program, programs=programs, BLOCK_K=BLOCK_K,
        BLOCK_N=BLOCK_N, WINDOWS_TILE=WINDOWS_TILE,
    )  # fmt: skip
    for start in range(program * WINDOWS_TILE, N, programs * WINDOWS_TILE):
        move_order_to_workspace(order, places, start, N, WINDOWS_TILE)
        offs = load_order_from_workspace(places, start, 0, N, BLOCK_N, WINDOWS_TILE)
        next_offs = load_order_from_workspace(places, start, BLOCK_N, N, BLOCK_N, WINDOWS_TILE)
        w = _gather(W, offs, N)
        for part in range(0, tl.minimum(N - start, WINDOWS_TILE), BLOCK_N):
            ahead = load_order_from_workspace(places, start, part + 2 * BLOCK_N, N, BLOCK_N, WINDOWS_TILE)
            next_w = _gather(W, next_offs, N)
            low, first, tiles = load_window(windows, part, BLOCK_N)
            if tiles == 1:
                c = _load_near(C, low, BLOCK_K)
                numerators, denominator = _attention(w[None, :] - c, scale)
                total = tl.sum(numerators * c, 0)
            else:
                near_C = C + 2 * first
                c0 = load_centroids(near_C, tl.arange(0, BLOCK_K), K - first, 2, FAR, 1, 1)
                nearest, denominator = statistics(
                    w=w[None, :], c0=c0, C=near_C, K=K - first, scale=scale, D=1, D_PADDED=1, BLOCK_K=BLOCK_K,
                    K_TILES=tiles, EUCLIDEAN=False,
                )  # fmt: skip
                total = tl.zeros((BLOCK_N,), tl.float32)
                for tile in range(0, tiles):
                    c = load_centroids(near_C, tile * BLOCK_K + tl.arange(0, BLOCK_K), K - first, 2, FAR, 1, 1)
                    distance = distances(w[None, :], c, False)
                    numerators = tl.exp2(logits(nearest[None, :], distance, scale, False, 1))
                    total += tl.sum(numerators * c.trans(1, 0), 0)
            tl.store(W_tilde + offs, total / denominator, mask=offs < N)
            offs, next_offs, w = next_offs, ahead, next_w


@triton.jit
def _load_near_gradient_tiles(C, C_next, H, low, UPDATE: tl.constexpr, BLOCK_K: tl.constexpr):
    """c, h and c' of the windows, `(BLOCK_K, BLOCK_N)` each."""
    c = _load_near(C, low, BLOCK_K)
    if UPDATE:
        return c, _load_near(H, low, BLOCK_K), _load_near(C_next, low, BLOCK_K)
    return c, c, c


@triton.jit
def _through_attention(w, g, c, h, c_next, scale, UPDATE: tl.constexpr):
    """w - c, the numerators of A, and with them A (dA - mean) before its division by the denominator, all
    `(BLOCK_K, BLOCK_N)`, and the denominator."""
    difference = w[None, :] - c
    numerators, denominator = _attention(difference, scale)
    if UPDATE:
        dA = h * (w[None, :] - c_next)
    else:
        dA = -g[None, :] * difference  # g c less g w, which is the same for all centroids and cancels in dA - mean
    mean = tl.sum(numerators * dA, 0) / denominator
    return difference, numerators, numerators * (dA - mean[None, :]), denominator


@triton.jit
def gradient_sums(
    G, W, dW, C, C_next, H, scale, slope, partial, workspace, N, K, K_PADDED, program, programs, UPDATE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWS_TILE: tl.constexpr,
):  # fmt: skip
    """What the centroids receive from this program's weights, to `partial`, whose last column is zero.  It is the sum
    of dlogits (w - c) over the weights and, through the output, of A g.

    The output comes first, and puts the weights in order.
    """
    partial += program * K_PADDED * 2
    order = dW.to(tl.pointer_type(tl.int32), bitcast=True)
    windows = windows_of(workspace, 0, program, programs, WINDOWS_TILE)
    begin = program * WINDOWS_TILE
    step = programs * WINDOWS_TILE
    _prepare(
        W=W, order=order, C=C, scale=scale, partial=partial, windows=windows, N=N, K=K, K_PADDED=K_PADDED,
        program=program, programs=programs, FIRST=not UPDATE, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N,
        WINDOWS_TILE=WINDOWS_TILE,
    )  # fmt: skip
    for part in range(0, tl.minimum(WINDOWS_TILE, N - begin), BLOCK_N):
        low, first, tiles = load_window(windows, part, BLOCK_N)
        if tiles == 1:
            c, h, c_next = _load_near_gradient_tiles(C, C_next, H, low, UPDATE, BLOCK_K)
            acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
            offs = load_order(order, begin, part, N, BLOCK_N, WINDOWS_TILE)
            next_offs = load_order(order, begin + step, part, N, BLOCK_N, WINDOWS_TILE)
            w = _gather(W, offs, N)
            g = w if UPDATE else _gather(G, offs, N)
            for start in range(begin, N, step):
                ahead = load_order(order, start + 2 * step, part, N, BLOCK_N, WINDOWS_TILE)
                next_w = _gather(W, next_offs, N)
                next_g = next_w if UPDATE else _gather(G, next_offs, N)
                difference, numerators, dlogits, denominator = _through_attention(w, g, c, h, c_next, scale, UPDATE)
                share = tl.where(offs < N, 1.0 / denominator, 0.0)
                acc += dlogits * difference * (share * slope)[None, :]
                if not UPDATE:
                    acc += numerators * (g * share)[None, :]
                offs, next_offs, w, g = next_offs, ahead, next_w, next_g
            _add_to_windows(acc, None, partial, windows, part, BLOCK_K, BLOCK_N)
        else:
            near_C, near_C_next, near_H = C + 2 * first, C_next + 2 * first, H + 2 * first
            c0, h0, offset0 = load_gradient_tiles(
                near_C, near_C_next, near_H, tl.arange(0, BLOCK_K), K - first, UPDATE, 1, 1
            )
            for start in range(begin, N, step):
                offs = load_order(order, start, part, N, BLOCK_N, WINDOWS_TILE)
                w = _gather(W, offs, N)[None, :]
                g = w if UPDATE else _gather(G, offs, N)[None, :]
                nearest, denominator = statistics(
                    w=w, c0=c0, C=near_C, K=K - first, scale=scale, D=1, D_PADDED=1, BLOCK_K=BLOCK_K, K_TILES=tiles,
                    EUCLIDEAN=False,
                )  # fmt: skip
                mean = mean_attention_gradient(
                    w=w, g=g, nearest=nearest, denominator=denominator, c0=c0, h0=h0, offset0=offset0, C=near_C,
                    C_next=near_C_next, H=near_H, K=K - first, scale=scale, UPDATE=UPDATE, D=1, D_PADDED=1,
                    BLOCK_K=BLOCK_K, K_TILES=tiles, EUCLIDEAN=False,
                )  # fmt: skip
                share = tl.where(offs < N, 1.0 / denominator, 0.0)
                for tile in range(0, tiles):
                    offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
                    c, h, offset = load_gradient_tiles(near_C, near_C_next, near_H, offs_k, K - first, UPDATE, 1, 1)
                    numerators, dlogits = through_softmax(
                        w=w, g=g, nearest=nearest, mean=mean, c=c, h=h, offset=offset, scale=scale, UPDATE=UPDATE,
                        D=1, EUCLIDEAN=False,
                    )  # fmt: skip
                    received = dlogits * (w - c.trans(1, 0)) * (share * slope)[None, :]
                    if not UPDATE:
                        received += numerators * (g * share[None, :])
                    zeros = tl.zeros((BLOCK_K,), tl.float32)
                    deposit(tl.sum(received, 1)[None, :], zeros, partial, first + offs_k, True, 1, 1)
            tl.debug_barrier()  # the next parts add to what these have written


@triton.jit
def _weight_gradients(
    w, g, windows, part, C, C_next, H, K, scale, slope, UPDATE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What the weights receive from the centroids of their windows, `(BLOCK_N,)`."""
    low, first, tiles = load_window(windows, part, BLOCK_N)
    if tiles == 1:
        c, h, c_next = _load_near_gradient_tiles(C, C_next, H, low, UPDATE, BLOCK_K)
        difference, numerators, dlogits, denominator = _through_attention(w, g, c, h, c_next, scale, UPDATE)
        result = -slope * tl.sum(dlogits * difference, 0)
        if UPDATE:
            result += tl.sum(numerators * h, 0)
        result /= denominator
    else:
        C, C_next, H = C + 2 * first, C_next + 2 * first, H + 2 * first
        dw = vector_gradients(
            w=w[None, :], g=g[None, :], C=C, C_next=C_next, H=H, K=K - first, scale=scale, slope=slope, UPDATE=UPDATE,
            D=1, D_PADDED=1, BLOCK_K=BLOCK_K, K_TILES=tiles, EUCLIDEAN=False,
        )  # fmt: skip
        result = tl.sum(dw, 0)
    return result


@triton.jit
def gradient(
    G, W, trail, H_slots, scale, slope, dW, workspace, N, K, output_row, first_update, end_update, slot_shift, program,
    programs, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWS_TILE: tl.constexpr,
):  # fmt: skip
    """dW: through W_tilde, which row `output_row` of the trail made, and through the updates of the iterations
    first_update ... end_update - 1.

    The windows of the output are level 0 of the workspace, those of the updates the levels after it.
    """
    order = dW.to(tl.pointer_type(tl.int32), bitcast=True)
    places = places_of(workspace, program, WINDOWS_TILE)
    row = 2 * K
    windows = windows_of(workspace, 0, program, programs, WINDOWS_TILE)
    find_windows(
        order=order, C=trail + output_row * row, scale=scale, windows=windows, N=N, K=K, program=program,
        programs=programs, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, WINDOWS_TILE=WINDOWS_TILE,
    )  # fmt: skip
    for t in range(first_update, end_update):
        windows = windows_of(workspace, t - first_update + 1, program, programs, WINDOWS_TILE)
        find_windows(
            order=order, C=trail + t * row, scale=scale, windows=windows, N=N, K=K, program=program,
            programs=programs, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, WINDOWS_TILE=WINDOWS_TILE,
        )  # fmt: skip
    for start in range(program * WINDOWS_TILE, N, programs * WINDOWS_TILE):
        move_order_to_workspace(order, places, start, N, WINDOWS_TILE)
        offs = load_order_from_workspace(places, start, 0, N, BLOCK_N, WINDOWS_TILE)
        next_offs = load_order_from_workspace(places, start, BLOCK_N, N, BLOCK_N, WINDOWS_TILE)
        w = _gather(W, offs, N)
        g = _gather(G, offs, N)
        for part in range(0, tl.minimum(N - start, WINDOWS_TILE), BLOCK_N):
            ahead = load_order_from_workspace(places, start, part + 2 * BLOCK_N, N, BLOCK_N, WINDOWS_TILE)
            next_w = _gather(W, next_offs, N)
            next_g = _gather(G, next_offs, N)
            C = trail + output_row * row
            windows = windows_of(workspace, 0, program, programs, WINDOWS_TILE)
            dw = _weight_gradients(
                w=w, g=g, windows=windows, part=part, C=C, C_next=C, H=C, K=K, scale=scale, slope=slope, UPDATE=False,
                BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N,
            )  # fmt: skip
            for t in range(first_update, end_update):
                C = trail + t * row
                H = H_slots + (t + slot_shift) * row
                windows = windows_of(workspace, t - first_update + 1, program, programs, WINDOWS_TILE)
                dw += _weight_gradients(
                    w=w, g=w, windows=windows, part=part, C=C, C_next=C + row, H=H, K=K, scale=scale, slope=slope,
                    UPDATE=True, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N,
                )  # fmt: skip
            tl.store(dW + offs, dw, mask=offs < N)
            offs, next_offs, w, g = next_offs, ahead, next_w, next_g
