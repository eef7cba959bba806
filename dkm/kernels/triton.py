"""The loop on a GPU: attention never leaves the chip, and the host never waits.

One launch a pass over the weights.  A program walks over tiles of BN vectors, keeps the sums its tiles
contribute to the centroids in registers, and writes them once, to its row of `partial`; a second, tiny launch
adds the rows in a fixed order (results do not depend on timing).  Everything is float32.

Two families of the same three passes:

    general   `(centroids, vectors)` tiles; distances by differences, coordinate by coordinate.  Any metric;
              the fastest for d = 1 and for few centroids.
    products  everything is a matrix product on the tensor cores, in a precision that splits float32 without
              loss that matters.  Tiles are made twice, as `(vectors, centroids)` for what a vector needs (its
              softmax, its gradient) and as `(centroids, vectors)` for what a centroid needs: making them again
              is cheaper than turning them around.  The squared distance, d > 1, more than a few centroids.

More than BK centroids are walked in tiles, with an online softmax.

Convergence: iteration t leaves the largest move of a centroid in `moves[t]`; every later launch looks there
first, and returns at once where an earlier iteration has converged.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import no_mass

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# of matrix products: float32 as three parts of bfloat16, and the six of their products that matter
PRECISION = "ieee" if INTERPRETED else "bf16x6"
MAX_D = 64


@triton.jit
def _used(moves, eps, T):
    """Iterations used among the first T, and one more where none of them has converged."""
    used = 1
    running = 1
    for t in range(T):
        running = running * (tl.load(moves + t) > eps).to(tl.int32)
        used += running
    return used


@triton.jit
def _distance(W, N, rows, C, c0, ks, K, D: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr):
    """The squared distance of each centroid to each vector, `(BK, BN)`; c0: the centroids, where all are known."""
    if D == 1 and NK == 1:
        w = tl.load(W + rows, mask=rows < N, other=0.0).to(tl.float32)
        difference = w[None, :] - c0[:, None]
        return difference * difference
    result = tl.zeros((BK, BN), tl.float32)
    for i in tl.static_range(D):
        at = rows * D + i
        w = tl.load(W + at, mask=at < N, other=0.0).to(tl.float32)
        c = tl.load(C + ks * (D + 1) + i, mask=ks < K, other=0.0)
        difference = w[None, :] - c[:, None]
        result += difference * difference
    return result


@triton.jit
def _logits(squared, ks, K, scale, EUCLIDEAN: tl.constexpr):
    """In units of log 2; -inf past the last centroid."""
    distance = tl.sqrt(squared) if EUCLIDEAN else squared
    return tl.where((ks < K)[:, None], distance * scale, -float("inf"))


@triton.jit
def _softmax_statistics(
    W, N, rows, C, c0, K, scale, S, D: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr,
    EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """The largest logit of each vector and the reciprocal of its softmax denominator; S holds the first tile."""
    top = tl.max(S, 0)
    z = tl.sum(tl.exp2(S - top[None, :]), 0)
    for tile in range(1, NK):
        ks = tile * BK + tl.arange(0, BK)
        S = _logits(_distance(W, N, rows, C, c0, ks, K, D, BK, BN, NK), ks, K, scale, EUCLIDEAN)
        higher = tl.maximum(top, tl.max(S, 0))
        z = z * tl.exp2(top - higher) + tl.sum(tl.exp2(S - higher[None, :]), 0)
        top = higher
    return top, 1.0 / z


@triton.jit
def _vectors(X, N, rows, D: tl.constexpr, DP: tl.constexpr):
    """The vectors as columns, `(DP, BN)`: coordinates, a row of ones where DP > D, zeros."""
    coordinates = tl.arange(0, DP)[:, None]
    at = rows[None, :] * D + coordinates
    x = tl.load(X + at, mask=(coordinates < D) & (at < N), other=0.0).to(tl.float32)
    return tl.where(coordinates == D, 1.0, x)


@triton.jit
def _centroid_rows(C, ks, K, STRIDE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """`(BK, DP)`: the centroids `ks`, zeros past the last coordinate."""
    coordinates = tl.arange(0, DP)[None, :]
    return tl.load(C + ks[:, None] * STRIDE + coordinates, mask=(ks < K)[:, None] & (coordinates < D), other=0.0)


@triton.jit
def _deposit(sums, partial, tile, program, K_PADDED, BK: tl.constexpr, DP: tl.constexpr):
    """Add to this program's own sums in memory: for centroids that do not fit one tile."""
    ks = tile * BK + tl.arange(0, BK)
    at = partial + (program * K_PADDED + ks[:, None]) * DP + tl.arange(0, DP)[None, :]
    tl.store(at, tl.load(at) + sums)


@triton.jit
def _store_partial(sums, partial, program, K_PADDED, BK: tl.constexpr, DP: tl.constexpr):
    ks = tl.arange(0, BK)
    tl.store(partial + (program * K_PADDED + ks[:, None]) * DP + tl.arange(0, DP)[None, :], sums)


@triton.jit(do_not_specialize=["T"])
def _pass(
    W, trail, moves, tau, partial, W_tilde, N, n, K, K_PADDED, eps, T, OUTPUT: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr,
    EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """Iteration T: partial sums of A^T [W, 1] and, where it is the last one allowed, W_tilde = A C."""
    used = _used(moves, eps, T)
    if not OUTPUT:
        if used <= T:
            return
    C = trail + (used - 1) * K * (D + 1)
    program = tl.program_id(0)
    scale = -1.4426950408889634 / tl.load(tau)
    c0 = tl.load(C + tl.arange(0, BK) * (D + 1), mask=tl.arange(0, BK) < K, other=0.0)
    acc = tl.zeros((DP, BK, BN), tl.float32)  # summed over the vectors once, at the end
    for first in range(program * BN, n, tl.num_programs(0) * BN):
        rows = first + tl.arange(0, BN)
        ks = tl.arange(0, BK)
        S = _logits(_distance(W, N, rows, C, c0, ks, K, D, BK, BN, NK), ks, K, scale, EUCLIDEAN)
        top, share = _softmax_statistics(W, N, rows, C, c0, K, scale, S, D, BK, BN, NK, EUCLIDEAN)
        share = tl.where(rows < n, share, 0.0)
        for tile in range(NK):
            if NK > 1:
                ks = tile * BK + tl.arange(0, BK)
                S = _logits(_distance(W, N, rows, C, c0, ks, K, D, BK, BN, NK), ks, K, scale, EUCLIDEAN)
            A = tl.exp2(S - top[None, :]) * share[None, :]
            w = _vectors(W, N, rows, D, DP)
            if NK > 1:
                sums = tl.trans(tl.sum(w[:, None, :] * A[None, :, :], 2))
                _deposit(sums, partial, tile, program, K_PADDED, BK, DP)
            else:
                acc += w[:, None, :] * A[None, :, :]
            if OUTPUT:
                for i in tl.static_range(D):
                    at = rows * D + i
                    c = tl.load(C + ks * (D + 1) + i, mask=ks < K, other=0.0)
                    average = tl.sum(A * c[:, None], 0)
                    if NK > 1:
                        if tile > 0:
                            average += tl.load(W_tilde + at, mask=at < N, other=0.0).to(tl.float32)
                    tl.store(W_tilde + at, average.to(W_tilde.dtype.element_ty), mask=at < N)
    if NK == 1:
        _store_partial(tl.trans(tl.sum(acc, 2)), partial, program, K_PADDED, BK, DP)


@triton.jit
def _sum_partial(partial, P, ks, K_PADDED, ROWS: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr):
    """The programs' rows of `partial` added up in order: `(ROWS, DP)` for the centroids `ks`."""
    total = tl.zeros((ROWS, DP), tl.float32)
    at = ks[:, None] * DP + tl.arange(0, DP)[None, :]
    for first in range(0, P, CHUNK):
        programs = first + tl.arange(0, CHUNK)
        piece = tl.load(
            partial + programs[:, None, None] * K_PADDED * DP + at[None, :, :],
            mask=(programs < P)[:, None, None] & (ks < K_PADDED)[None, :, None],
            other=0.0,
        )
        total += tl.sum(piece, 0)
    return total


@triton.jit
def _pick(X, i, DP: tl.constexpr):
    """Column i of `(ROWS, DP)`, as `(ROWS, 1)`."""
    return tl.sum(tl.where((tl.arange(0, DP) == i)[None, :], X, 0.0), 1)[:, None]


@triton.jit(do_not_specialize=["T"])
def _centroids(
    trail, moves, partial, P, K, K_PADDED, eps, no_mass, T, D: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """From the partial sums of iteration T to row T + 1 of the trail, and how far a centroid has moved at most."""
    if _used(moves, eps, T) <= T:
        return
    ks = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, DP)
    sums = _sum_partial(partial, P, ks, K_PADDED, ROWS, DP, CHUNK)
    mass = _pick(sums, D, DP)
    at = ks[:, None] * (D + 1) + cols[None, :]
    valid = (ks < K)[:, None] & (cols < D)[None, :]
    C = tl.load(trail + T * K * (D + 1) + at, mask=valid, other=0.0)
    empty = mass <= no_mass
    C_next = tl.where(empty, C, sums / tl.where(empty, 1.0, mass))
    move = tl.max(tl.max(tl.where(valid, tl.abs(C_next - C), 0.0), 1), 0)
    tl.atomic_max(moves + T, move)
    row = tl.where((cols == D)[None, :], mass, C_next)
    tl.store(trail + (T + 1) * K * (D + 1) + at, row, mask=(ks < K)[:, None] & (cols <= D)[None, :])


@triton.jit
def _output_dA(G, N, rows, C, ks, K, D: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """W_tilde = A C: the gradient of A, `(BK, BN)`."""
    dA = tl.zeros((BK, BN), tl.float32)
    for i in tl.static_range(D):
        at = rows * D + i
        g = tl.load(G + at, mask=at < N, other=0.0).to(tl.float32)
        c = tl.load(C + ks * (D + 1) + i, mask=ks < K, other=0.0)
        dA += g[None, :] * c[:, None]
    return dA


@triton.jit
def _update_dA(
    W, N, rows, C_next, dC, inverse, h0, next0, ks, K, D: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    NK: tl.constexpr,
):  # fmt: skip
    """C' = (A^T W) / mass: the gradient of A, `(BK, BN)`; inverse is 1 / mass."""
    if D == 1 and NK == 1:
        w = tl.load(W + rows, mask=rows < N, other=0.0).to(tl.float32)
        return h0[:, None] * (w[None, :] - next0[:, None])
    dA = tl.zeros((BK, BN), tl.float32)
    for i in tl.static_range(D):
        at = rows * D + i
        w = tl.load(W + at, mask=at < N, other=0.0).to(tl.float32)
        h = tl.load(dC + ks * D + i, mask=ks < K, other=0.0) * inverse
        c = tl.load(C_next + ks * (D + 1) + i, mask=ks < K, other=0.0)
        dA += h[:, None] * (w[None, :] - c[:, None])
    return dA


@triton.jit
def _inverse_mass(C_next, ks, K, no_mass, D: tl.constexpr):
    """1 / mass of each centroid, 0 where there is none."""
    mass = tl.load(C_next + ks * (D + 1) + D, mask=ks < K, other=0.0)
    return tl.where(mass <= no_mass, 0.0, 1.0 / tl.where(mass <= no_mass, 1.0, mass))


@triton.jit
def _through_distance(
    e, A, g, rows, ks, W, C, N, K, dC, inverse, dW, ADD: tl.constexpr, UPDATE: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """From e, the gradient through the softmax times the slope of the distance, to what W and C receive.

    dW = sum_j A h - e (w - c) goes to memory, where h is zero but for an update; what C receives is
    sum_i e (w - c) + A g, where g is zero but for the output: not yet summed, `(DP, BK, BN)`.
    """
    for i in tl.static_range(D):
        at = rows * D + i
        w = tl.load(W + at, mask=at < N, other=0.0).to(tl.float32)
        c = tl.load(C + ks * (D + 1) + i, mask=ks < K, other=0.0)
        pushed = e * (c[:, None] - w[None, :])
        if UPDATE:
            h = tl.load(dC + ks * D + i, mask=ks < K, other=0.0) * inverse
            pushed += A * h[:, None]
        dw = tl.sum(pushed, 0)
        if ADD:
            dw += tl.load(dW + at, mask=at < N, other=0.0)
        tl.store(dW + at, dw, mask=at < N)
    c = _centroid_rows(C, ks, K, D + 1, D, DP)
    w = _vectors(W, N, rows, D, DP)
    received = e[None, :, :] * (w[:, None, :] - tl.trans(c)[:, :, None])
    if not UPDATE:
        received += A[None, :, :] * g[:, None, :]
    return received


@triton.jit
def _output_gradient(
    G, W, trail, iterations, tau, partial, dW, N, n, K, K_PADDED, D: tl.constexpr, DP: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr,
    EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """Through W_tilde = A C: writes dW, and partial sums of what the centroids receive."""
    C = trail + (tl.load(iterations).to(tl.int32) - 1) * K * (D + 1)
    program = tl.program_id(0)
    temperature = tl.load(tau)
    scale = -1.4426950408889634 / temperature
    slope = (1.0 if EUCLIDEAN else 2.0) / temperature
    c0 = tl.load(C + tl.arange(0, BK) * (D + 1), mask=tl.arange(0, BK) < K, other=0.0)
    acc = tl.zeros((DP, BK, BN), tl.float32)
    for first in range(program * BN, n, tl.num_programs(0) * BN):
        rows = first + tl.arange(0, BN)
        ks = tl.arange(0, BK)
        squared = _distance(W, N, rows, C, c0, ks, K, D, BK, BN, NK)
        S = _logits(squared, ks, K, scale, EUCLIDEAN)
        top, share = _softmax_statistics(W, N, rows, C, c0, K, scale, S, D, BK, BN, NK, EUCLIDEAN)
        share = tl.where(rows < n, share, 0.0)
        A = tl.exp2(S - top[None, :]) * share[None, :]
        dA = _output_dA(G, N, rows, C, ks, K, D, BK, BN)
        mean = tl.sum(A * dA, 0)
        for tile in range(1, NK):
            ks = tile * BK + tl.arange(0, BK)
            S = _logits(_distance(W, N, rows, C, c0, ks, K, D, BK, BN, NK), ks, K, scale, EUCLIDEAN)
            A = tl.exp2(S - top[None, :]) * share[None, :]
            mean += tl.sum(A * _output_dA(G, N, rows, C, ks, K, D, BK, BN), 0)
        g = tl.where(tl.arange(0, DP)[:, None] < D, _vectors(G, N, rows, D, DP), 0.0)
        for tile in range(NK):
            if NK > 1:
                ks = tile * BK + tl.arange(0, BK)
                squared = _distance(W, N, rows, C, c0, ks, K, D, BK, BN, NK)
                S = _logits(squared, ks, K, scale, EUCLIDEAN)
                A = tl.exp2(S - top[None, :]) * share[None, :]
                dA = _output_dA(G, N, rows, C, ks, K, D, BK, BN)
            e = A * (dA - mean[None, :]) * slope
            if EUCLIDEAN:
                e = tl.where(squared > 0, e / tl.sqrt(squared), 0.0)
            if NK > 1:
                if tile == 0:
                    received = _through_distance(e, A, g, rows, ks, W, C, N, K, W, 0.0, dW, False, False, D, DP)
                else:
                    received = _through_distance(e, A, g, rows, ks, W, C, N, K, W, 0.0, dW, True, False, D, DP)
                _deposit(tl.trans(tl.sum(received, 2)), partial, tile, program, K_PADDED, BK, DP)
            else:
                acc += _through_distance(e, A, g, rows, ks, W, C, N, K, W, 0.0, dW, False, False, D, DP)
    if NK == 1:
        _store_partial(tl.trans(tl.sum(acc, 2)), partial, program, K_PADDED, BK, DP)


@triton.jit(do_not_specialize=["T"])
def _update_gradient(
    W, trail, iterations, tau, dC, partial, dW, N, n, K, K_PADDED, no_mass, T, D: tl.constexpr,
    DP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr,
    EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """Through C' = (A^T W) / mass of iteration T: adds to dW, and partial sums of what C receives."""
    if T >= tl.load(iterations).to(tl.int32) - 1:
        return
    C = trail + T * K * (D + 1)
    C_next = trail + (T + 1) * K * (D + 1)
    program = tl.program_id(0)
    temperature = tl.load(tau)
    scale = -1.4426950408889634 / temperature
    slope = (1.0 if EUCLIDEAN else 2.0) / temperature
    c0 = tl.load(C + tl.arange(0, BK) * (D + 1), mask=tl.arange(0, BK) < K, other=0.0)
    acc = tl.zeros((DP, BK, BN), tl.float32)
    k0 = tl.arange(0, BK)
    next0 = tl.load(C_next + k0 * (D + 1), mask=k0 < K, other=0.0)
    h0 = tl.load(dC + k0 * D, mask=k0 < K, other=0.0) * _inverse_mass(C_next, k0, K, no_mass, D)
    for first in range(program * BN, n, tl.num_programs(0) * BN):
        rows = first + tl.arange(0, BN)
        ks = tl.arange(0, BK)
        squared = _distance(W, N, rows, C, c0, ks, K, D, BK, BN, NK)
        S = _logits(squared, ks, K, scale, EUCLIDEAN)
        top, share = _softmax_statistics(W, N, rows, C, c0, K, scale, S, D, BK, BN, NK, EUCLIDEAN)
        share = tl.where(rows < n, share, 0.0)
        A = tl.exp2(S - top[None, :]) * share[None, :]
        inverse = _inverse_mass(C_next, ks, K, no_mass, D)
        dA = _update_dA(W, N, rows, C_next, dC, inverse, h0, next0, ks, K, D, BK, BN, NK)
        mean = tl.sum(A * dA, 0)
        for tile in range(1, NK):
            ks = tile * BK + tl.arange(0, BK)
            S = _logits(_distance(W, N, rows, C, c0, ks, K, D, BK, BN, NK), ks, K, scale, EUCLIDEAN)
            A = tl.exp2(S - top[None, :]) * share[None, :]
            inverse = _inverse_mass(C_next, ks, K, no_mass, D)
            mean += tl.sum(A * _update_dA(W, N, rows, C_next, dC, inverse, h0, next0, ks, K, D, BK, BN, NK), 0)
        for tile in range(NK):
            if NK > 1:
                ks = tile * BK + tl.arange(0, BK)
                squared = _distance(W, N, rows, C, c0, ks, K, D, BK, BN, NK)
                S = _logits(squared, ks, K, scale, EUCLIDEAN)
                A = tl.exp2(S - top[None, :]) * share[None, :]
                inverse = _inverse_mass(C_next, ks, K, no_mass, D)
                dA = _update_dA(W, N, rows, C_next, dC, inverse, h0, next0, ks, K, D, BK, BN, NK)
            e = A * (dA - mean[None, :]) * slope
            if EUCLIDEAN:
                e = tl.where(squared > 0, e / tl.sqrt(squared), 0.0)
            received = _through_distance(e, A, W, rows, ks, W, C, N, K, dC, inverse, dW, True, True, D, DP)
            if NK > 1:
                _deposit(tl.trans(tl.sum(received, 2)), partial, tile, program, K_PADDED, BK, DP)
            else:
                acc += received
    if NK == 1:
        _store_partial(tl.trans(tl.sum(acc, 2)), partial, program, K_PADDED, BK, DP)


# --- products --------------------------------------------------------------------------------------


@triton.jit
def _rows(X, N, rows, ONES: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """The vectors as rows, `(BN, DP)`: coordinates, a column of ones where asked for, zeros."""
    cols = tl.arange(0, DP)
    at = rows[:, None] * D + cols[None, :]
    x = tl.load(X + at, mask=(cols < D)[None, :] & (at < N), other=0.0).to(tl.float32)
    if ONES:
        x = tl.where((cols == D)[None, :], 1.0, x)
    return x


@triton.jit
def _logit_rows(C, ks, K, scale, D: tl.constexpr, DP: tl.constexpr):
    """`(BK, DP)`: times `_rows`, it gives (2 w.c - |c|^2) * scale: |w|^2 cancels in the softmax."""
    c = _centroid_rows(C, ks, K, D + 1, D, DP)
    bias = tl.where(ks < K, tl.sum(c * c, 1) * -scale, -1e30)
    return tl.where((tl.arange(0, DP) == D)[None, :], bias[:, None], c * (2 * scale))


@triton.jit
def _update_rows(C_next, dC, ks, K, no_mass, D: tl.constexpr, DP: tl.constexpr):
    """H = dC' / mass with -H.C' in column D, `(BK, DP)`: times `_rows`, it gives dA = H (w - C')."""
    h = _centroid_rows(dC, ks, K, D, D, DP) * _inverse_mass(C_next, ks, K, no_mass, D)[:, None]
    offset = tl.sum(h * _centroid_rows(C_next, ks, K, D + 1, D, DP), 1)
    return tl.where((tl.arange(0, DP) == D)[None, :], -offset[:, None], h)


@triton.jit(do_not_specialize=["T"])
def _product_pass(
    W, trail, moves, tau, partial, W_tilde, N, n, K, K_PADDED, eps, T, OUTPUT: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`_pass` by products."""
    used = _used(moves, eps, T)
    if not OUTPUT:
        if used <= T:
            return
    C = trail + (used - 1) * K * (D + 1)
    program = tl.program_id(0)
    scale = 1.4426950408889634 / tl.load(tau)
    cols = tl.arange(0, DP)
    acc = tl.zeros((BK, DP), tl.float32)
    for first in range(program * BN, n, tl.num_programs(0) * BN):
        rows = first + tl.arange(0, BN)
        x = _rows(W, N, rows, True, D, DP)
        # the vectors' side: softmax, and averages of the centroids
        top = tl.full((BN,), -1e38, tl.float32)
        z = tl.zeros((BN,), tl.float32)
        averages = tl.zeros((BN, DP), tl.float32)
        for tile in range(NK):
            ks = tile * BK + tl.arange(0, BK)
            S = tl.dot(x, tl.trans(_logit_rows(C, ks, K, scale, D, DP)), input_precision=PRECISION)
            higher = tl.maximum(top, tl.max(S, 1))
            P = tl.exp2(S - higher[:, None])
            fade = tl.exp2(top - higher)
            z = z * fade + tl.sum(P, 1)
            if OUTPUT:
                c = _centroid_rows(C, ks, K, D + 1, D, DP)
                averages = tl.dot(P, c, averages * fade[:, None], input_precision=PRECISION)
            top = higher
        share = tl.where(rows < n, 1.0 / z, 0.0)
        if OUTPUT:
            at = rows[:, None] * D + cols[None, :]
            averages = averages * share[:, None]
            tl.store(W_tilde + at, averages.to(W_tilde.dtype.element_ty), mask=(cols < D)[None, :] & (at < N))
        # the centroids' side
        for tile in range(NK):
            q = _logit_rows(C, tile * BK + tl.arange(0, BK), K, scale, D, DP)
            St = tl.dot(q, tl.trans(x), input_precision=PRECISION)
            At = tl.exp2(St - top[None, :]) * share[None, :]
            if NK > 1:
                _deposit(tl.dot(At, x, input_precision=PRECISION), partial, tile, program, K_PADDED, BK, DP)
            else:
                acc = tl.dot(At, x, acc, input_precision=PRECISION)
    if NK == 1:
        _store_partial(acc, partial, program, K_PADDED, BK, DP)


@triton.jit(do_not_specialize=["T"])
def _product_gradient(
    G, W, trail, iterations, tau, dC, partial, dW, N, n, K, K_PADDED, no_mass, T, UPDATE: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`_output_gradient`, or with UPDATE `_update_gradient`, by products."""
    used = tl.load(iterations).to(tl.int32)
    if UPDATE:
        if T >= used - 1:
            return
        C = trail + T * K * (D + 1)
        C_next = trail + (T + 1) * K * (D + 1)
    else:
        C = trail + (used - 1) * K * (D + 1)
        C_next = C
    program = tl.program_id(0)
    temperature = tl.load(tau)
    scale = 1.4426950408889634 / temperature
    slope = 2.0 / temperature
    cols = tl.arange(0, DP)
    acc = tl.zeros((BK, DP), tl.float32)
    for first in range(program * BN, n, tl.num_programs(0) * BN):
        rows = first + tl.arange(0, BN)
        x = _rows(W, N, rows, True, D, DP)
        if UPDATE:
            y = x  # dA = R y: C g, or [H, -H.C'] [w, 1]
        else:
            y = _rows(G, N, rows, False, D, DP)
        # the vectors' side: A R, A C and (A dA) C, in one walk with an online softmax
        top = tl.full((BN,), -1e38, tl.float32)
        z = tl.zeros((BN,), tl.float32)
        AC = tl.zeros((BN, DP), tl.float32)
        AR = tl.zeros((BN, DP), tl.float32)
        AdAC = tl.zeros((BN, DP), tl.float32)
        for tile in range(NK):
            ks = tile * BK + tl.arange(0, BK)
            S = tl.dot(x, tl.trans(_logit_rows(C, ks, K, scale, D, DP)), input_precision=PRECISION)
            higher = tl.maximum(top, tl.max(S, 1))
            P = tl.exp2(S - higher[:, None])
            fade = tl.exp2(top - higher)
            top = higher
            z = z * fade + tl.sum(P, 1)
            c = _centroid_rows(C, ks, K, D + 1, D, DP)
            AC = tl.dot(P, c, AC * fade[:, None], input_precision=PRECISION)
            if UPDATE:
                R = _update_rows(C_next, dC, ks, K, no_mass, D, DP)
                AR = tl.dot(P, R, AR * fade[:, None], input_precision=PRECISION)
            else:
                R = c
            P = P * tl.dot(y, tl.trans(R), input_precision=PRECISION)
            AdAC = tl.dot(P, c, AdAC * fade[:, None], input_precision=PRECISION)
        share = tl.where(rows < n, 1.0 / z, 0.0)
        if not UPDATE:
            AR = AC
        mean = tl.sum(y * AR, 1) * share  # sum_j A dA
        dw = (AdAC - mean[:, None] * AC) * (slope * share)[:, None]
        at = rows[:, None] * D + cols[None, :]
        mask = (cols < D)[None, :] & (at < N)
        if UPDATE:
            dw += AR * share[:, None] + tl.load(dW + at, mask=mask, other=0.0)
        tl.store(dW + at, dw, mask=mask)
        # the centroids' side
        for tile in range(NK):
            ks = tile * BK + tl.arange(0, BK)
            q = _logit_rows(C, ks, K, scale, D, DP)
            At = tl.exp2(tl.dot(q, tl.trans(x), input_precision=PRECISION) - top[None, :]) * share[None, :]
            c = _centroid_rows(C, ks, K, D + 1, D, DP)
            if UPDATE:
                R = _update_rows(C_next, dC, ks, K, no_mass, D, DP)
            else:
                R = c
            et = At * (tl.dot(R, tl.trans(y), input_precision=PRECISION) - mean[None, :]) * slope
            pulled = tl.dot(et, x, input_precision=PRECISION)  # the column of ones gives e 1
            received = pulled - _pick(pulled, D, DP) * c
            if not UPDATE:
                received = tl.dot(At, y, received, input_precision=PRECISION)
            if NK > 1:
                _deposit(received, partial, tile, program, K_PADDED, BK, DP)
            else:
                acc += received
    if NK == 1:
        _store_partial(acc, partial, program, K_PADDED, BK, DP)


# --- both ------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["T"])
def _centroid_gradient(
    trail, iterations, partial, dC, P, K, K_PADDED, no_mass, T, D: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds up what C received from the output (T < 0) or through iteration T; an empty centroid passes dC on."""
    if T >= tl.load(iterations).to(tl.int32) - 1:
        return
    ks = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, DP)
    total = _sum_partial(partial, P, ks, K_PADDED, ROWS, DP, CHUNK)
    mask = (ks < K)[:, None] & (cols < D)[None, :]
    at = dC + ks[:, None] * D + cols[None, :]
    if T >= 0:
        mass = tl.load(trail + (T + 1) * K * (D + 1) + ks * (D + 1) + D, mask=ks < K, other=1.0)
        total += tl.where((mass <= no_mass)[:, None], tl.load(at, mask=mask, other=0.0), 0.0)
    tl.store(at, total, mask=mask)


def fits(W: Tensor, d: int) -> bool:
    """Whether these kernels are for this weight."""
    return W.dtype in (torch.float32, torch.bfloat16, torch.float16) and d <= MAX_D and W.numel() < 2**31


class _Launch:
    """Which family, tile sizes and grids for n vectors, k centroids, d dimensions."""

    def __init__(self, W: Tensor, k: int, d: int, metric: str):
        self.N, self.d, self.k = W.numel(), d, k
        self.n = -(-self.N // d)
        self.euclidean = metric == "euclidean"
        self.DP = triton.next_power_of_2(d + 1)
        self.BK = triton.next_power_of_2(k)
        self.products = d > 1 and not self.euclidean and self.DP * self.BK > 128
        if self.products:
            self.DP = max(16, self.DP)
            self.BK = max(16, min(self.BK, 64))
            self.BN, self.warps = 64, 4  # with 8 warps Triton 3.6 makes illegal accesses of it
        else:
            self.BK = min(self.BK, 256, max(2, 128 // self.DP) if d > 1 else 256)
            self.warps = 8 if self.BK >= 128 else 4
            self.BN = max(
                16, min(1024, 32 * self.warps * (32 if self.BK >= 128 else max(16, 128 // self.DP)) // self.BK)
            )
        self.NK = -(-k // self.BK)
        tiles = -(-self.n // self.BN)
        self.programs = min(tiles, 3 if INTERPRETED else 4 * _processors(W.device))
        self.ROWS, self.CHUNK = 8, 32

    def partial(self, like: Tensor) -> Tensor:
        make = like.new_zeros if self.NK > 1 else like.new_empty
        return make(self.programs, self.NK * self.BK, self.DP, dtype=torch.float32)

    def tile_arguments(self) -> dict:
        family = dict(PRECISION=PRECISION) if self.products else dict(EUCLIDEAN=self.euclidean)
        return family | dict(
            D=self.d, DP=self.DP, BK=self.BK, BN=self.BN, NK=self.NK, num_warps=self.warps, num_stages=1
        )

    def sum_grid(self) -> tuple[int]:
        return (-(-self.k // self.ROWS),)

    def sum_arguments(self) -> dict:
        return dict(D=self.d, DP=self.DP, ROWS=self.ROWS, CHUNK=self.CHUNK)


_PROCESSORS: dict[torch.device, int] = {}


def _processors(device: torch.device) -> int:
    if device not in _PROCESSORS:
        _PROCESSORS[device] = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROCESSORS[device]


def forward(W: Tensor, C: Tensor, tau: Tensor, eps: float, max_iter: int, metric: str):
    """`(N,), (k, d) -> W_tilde (N,), iterations, trail`; see the package's docstring."""
    k, d = C.shape
    if not (W.is_cuda or INTERPRETED):
        raise ValueError(f'impl="triton" needs a GPU, and the weight is on {W.device}: use impl="auto"')
    if not fits(W, d):
        raise ValueError(
            f'impl="triton" computes in float32, for d up to {MAX_D} and under 2^31 weights; '
            f'got {W.dtype}, d = {d}, {W.numel()} weights: use impl="auto"'
        )
    launch = _Launch(W, k, d, metric)
    trail = torch.empty(max_iter + 1, k, d + 1, device=W.device)
    trail[0, :, :d] = C
    moves = torch.zeros(max_iter, device=W.device)
    W_tilde = torch.empty_like(W)
    partial = launch.partial(W)
    K_PADDED = partial.shape[1]
    for t in range(max_iter):
        if t and launch.NK > 1:
            partial.zero_()
        output = t == max_iter - 1
        (_product_pass if launch.products else _pass)[(launch.programs,)](
            W, trail, moves, tau, partial, W_tilde, launch.N, launch.n, k, K_PADDED, eps, t, output,
            **launch.tile_arguments(),
        )  # fmt: skip
        _centroids[launch.sum_grid()](
            trail, moves, partial, launch.programs, k, K_PADDED, eps, no_mass(torch.float32), t,
            **launch.sum_arguments(),
        )  # fmt: skip
    iterations = 1 + (moves[:-1] > eps).cumprod(0).sum()
    return W_tilde, iterations, trail


def backward(G: Tensor, W: Tensor, trail: Tensor, iterations: Tensor, tau: Tensor, metric: str):
    """The gradient of W_tilde, `(N,)` -> the gradients of W, `(N,)`, and of the first centroids, `(k, d)`."""
    max_iter, k, d = trail.shape[0] - 1, trail.shape[1], trail.shape[2] - 1
    launch = _Launch(W, k, d, metric)
    # Several iterations add up in dW: in 16 bit the sum would lose what the arithmetic kept.
    dW = torch.empty_like(W, dtype=torch.float32)
    dC = torch.empty(k, d, device=W.device)
    partial = launch.partial(W)
    K_PADDED = partial.shape[1]
    for t in range(max_iter - 1, -1, -1):
        step = t if t < max_iter - 1 else -1
        if step >= 0 and launch.NK > 1:
            partial.zero_()
        sizes = launch.N, launch.n, k, K_PADDED
        if launch.products:
            _product_gradient[(launch.programs,)](
                G, W, trail, iterations, tau, dC, partial, dW, *sizes, no_mass(torch.float32), step, step >= 0,
                **launch.tile_arguments(),
            )  # fmt: skip
        elif step < 0:
            _output_gradient[(launch.programs,)](
                G, W, trail, iterations, tau, partial, dW, *sizes, **launch.tile_arguments()
            )
        else:
            _update_gradient[(launch.programs,)](
                W, trail, iterations, tau, dC, partial, dW, *sizes, no_mass(torch.float32), step,
                **launch.tile_arguments(),
            )  # fmt: skip
        _centroid_gradient[launch.sum_grid()](
            trail, iterations, partial, dC, launch.programs, k, K_PADDED, no_mass(torch.float32), step,
            **launch.sum_arguments(),
        )  # fmt: skip
    return dW.to(W.dtype), dC
