"""The backward pass over groups: as in `groups.py`, a program does all of it for one group.

It goes through the output W_tilde = A C of the last iteration first, and then through the updates of the iterations
before, C' = (A^T W) / mass.  For each, dA is known but for a number that is the same for all centroids of a vector, and
that the softmax does not see: h (w - c') for an update, g (c - w) for the output.  Both are made of the differences
w - c, so that nothing cancels where the weights are far from zero.

With ADD_TO_DW, each of these steps adds what the vectors receive to dW.  Without it, a last walk over the vectors takes
all steps for some vectors after the other, so that the sum is in registers: a dW in 16 bit could not hold it.
"""

import triton
import triton.language as tl

from ..launch import quick
from .differences import FAR, load_centroids
from .groups import (
    addresses,
    attend,
    deposit,
    load_values,
    logits,
    over_vectors,
    place,
    store_centroids,
    sums,
    withdraw,
)
from .steps import LOG2E

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_tile(C, C_next, H, offs_k, K, UPDATE: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr):
    """c and h, `(D_PADDED, BLOCK_K)`, and h (c - c'), `(BLOCK_K,)`."""
    c = load_centroids(C, offs_k, K, D, FAR, D, D_PADDED)
    if UPDATE:
        h = load_centroids(H, offs_k, K, D, 0.0, D, D_PADDED)
        c_next = load_centroids(C_next, offs_k, K, D, FAR, D, D_PADDED)
        return c, h, tl.sum(h * (c - c_next), 0)
    else:
        return c, c, tl.zeros_like(offs_k).to(tl.float32)


@triton.jit
def _attention_gradient(difference, g, h, offset, UPDATE: tl.constexpr):
    """dA, but for a number per vector."""
    if UPDATE:
        return tl.sum(h[:, :, None, None] * difference, 0) + offset[:, None, None]
    return -tl.sum(g[:, None, :, :] * difference, 0)


@triton.jit
def _statistics(
    w, g, c0, h0, offset0, C, C_next, H, K, scale, UPDATE: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    BLOCK_K: tl.constexpr, K_TILES: tl.constexpr, EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """Of each vector, the distance to the nearest centroid, the softmax denominator relative to it, and the sum of
    A dA over the centroids."""
    difference, distance = attend(w, c0, EUCLIDEAN)
    nearest = tl.min(distance, 0)
    numerators = tl.exp2(logits(nearest[None, :, :], distance, scale, EUCLIDEAN, D))
    denominator = tl.sum(numerators, 0)
    total = tl.sum(numerators * _attention_gradient(difference, g, h0, offset0, UPDATE), 0)
    for tile in range(1, K_TILES):
        offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        c, h, offset = _load_tile(C, C_next, H, offs_k, K, UPDATE, D, D_PADDED)
        difference, distance = attend(w, c, EUCLIDEAN)
        nearer = tl.minimum(nearest, tl.min(distance, 0))
        numerators = tl.exp2(logits(nearer[None, :, :], distance, scale, EUCLIDEAN, D))
        rescale = tl.exp2(logits(nearer, nearest, scale, EUCLIDEAN, D))
        denominator = denominator * rescale + tl.sum(numerators, 0)
        added = tl.sum(numerators * _attention_gradient(difference, g, h, offset, UPDATE), 0)
        total = total * rescale + added
        nearest = nearer
    return nearest, denominator, total / denominator


@triton.jit
def _contributions(
    w, g, counts, c0, h0, offset0, C, C_next, H, partial, received_sum, scale, slope, first, K, UPDATE: tl.constexpr,
    SUM_DC: tl.constexpr, SUM_DW: tl.constexpr, TEMPERATURE: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    BLOCK_K: tl.constexpr, K_TILES: tl.constexpr, PER_LANE: tl.constexpr, LANES: tl.constexpr, EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """What some vectors give to the centroids, through the output or an update.

    SUM_DC: to the centroids, divided by the slope: added to `received_sum`, or to `partial`.
    SUM_DW: to the vectors, `(D_PADDED, PER_LANE, LANES)`; with TEMPERATURE also to tau, `(PER_LANE, LANES)`, but for a
    factor.
    """
    nearest, denominator, mean = _statistics(
        w=w, g=g, c0=c0, h0=h0, offset0=offset0, C=C, C_next=C_next, H=H, K=K, scale=scale, UPDATE=UPDATE, D=D,
        D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES, EUCLIDEAN=EUCLIDEAN,
    )  # fmt: skip
    share = tl.where(counts, 1.0 / denominator, 0.0)
    pushed = tl.zeros((D_PADDED, PER_LANE, LANES), tl.float32)  # through the distances
    averaged = tl.zeros((D_PADDED, PER_LANE, LANES), tl.float32)  # through the weighted average
    dtau = tl.zeros((PER_LANE, LANES), tl.float32)
    for tile in range(K_TILES):
        offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        c, h, offset = c0, h0, offset0
        if K_TILES > 1:
            c, h, offset = _load_tile(C, C_next, H, offs_k, K, UPDATE, D, D_PADDED)
        difference, distance = attend(w, c, EUCLIDEAN)
        logit = logits(nearest[None, :, :], distance, scale, EUCLIDEAN, D)
        A = tl.exp2(logit) * share[None, :, :]
        dlogits = A * (_attention_gradient(difference, g, h, offset, UPDATE) - mean[None, :, :])
        if SUM_DW and TEMPERATURE:
            dtau += tl.sum(tl.where(A > 0, dlogits * logit, 0.0), 0)  # where A is zero, the logit may be infinite
        if EUCLIDEAN:
            dlogits = tl.where(distance > 0, dlogits / distance, 0.0)
        pull = dlogits[None, :, :, :] * difference
        if SUM_DW:
            pushed += tl.sum(pull, 1)
            if UPDATE:
                averaged += tl.sum(A[None, :, :, :] * h[:, :, None, None], 1)
        if SUM_DC:
            if K_TILES > 1:
                received_sum = tl.zeros((D_PADDED, BLOCK_K, PER_LANE, LANES), tl.float32)
            received_sum += pull
            if not UPDATE:
                received_sum += A[None, :, :, :] * (g * (1.0 / slope))[:, None, :, :]
            if K_TILES > 1:
                zeros = tl.zeros((BLOCK_K,), tl.float32)
                deposit(over_vectors(received_sum), zeros, partial, offs_k, first, D, D_PADDED)
    return received_sum, averaged - pushed * slope, dtau


@triton.jit
def _through(
    G, W, dW, C, C_next, H, partial, scale, slope, base, height, width, columns, tile_columns, n, K,
    UPDATE: tl.constexpr, SUM_DC: tl.constexpr, ADD_TO_DW: tl.constexpr, TEMPERATURE: tl.constexpr, D: tl.constexpr,
    D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr, K_TILES: tl.constexpr, PER_LANE: tl.constexpr, LANES: tl.constexpr,
    EUCLIDEAN: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A walk over the vectors, through the output or an update: what the centroids receive, divided by the slope, and
    with ADD_TO_DW what tau receives, but for a factor.  The output, which comes first, writes dW, the updates add to
    that."""
    c0, h0, offset0 = _load_tile(C, C_next, H, tl.arange(0, BLOCK_K), K, UPDATE, D, D_PADDED)
    received_sum = tl.zeros((D_PADDED, BLOCK_K, PER_LANE, LANES), tl.float32)
    dtau_sum = tl.zeros((PER_LANE, LANES), tl.float32)
    for first in range(0, n, PER_LANE * LANES):
        offs, exists, counts = addresses(
            first=first, base=base, height=height, width=width, columns=columns, tile_columns=tile_columns,
            D=D, D_PADDED=D_PADDED, PER_LANE=PER_LANE, LANES=LANES, CONTIGUOUS=CONTIGUOUS,
            ALIGNED=ALIGNED,
        )  # fmt: skip
        w = load_values(W, offs, exists)
        g = w
        if not UPDATE:
            g = load_values(G, offs, exists)
        received_sum, dw, dtau = _contributions(
            w=w, g=g, counts=counts, c0=c0, h0=h0, offset0=offset0, C=C, C_next=C_next, H=H,
            partial=partial, received_sum=received_sum, scale=scale, slope=slope, first=first, K=K, UPDATE=UPDATE,
            SUM_DC=SUM_DC, SUM_DW=ADD_TO_DW, TEMPERATURE=TEMPERATURE, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K,
            K_TILES=K_TILES, PER_LANE=PER_LANE, LANES=LANES, EUCLIDEAN=EUCLIDEAN,
        )  # fmt: skip
        if ADD_TO_DW:
            dtau_sum += dtau
            if UPDATE:
                dw += load_values(dW, offs, exists)
            tl.store(dW + offs, dw.to(dW.dtype.element_ty), mask=exists)
    return over_vectors(received_sum), over_vectors(dtau_sum)


@triton.jit
def _write_dC(
    received, slope, dC, partial, K, UPDATE: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    BLOCK_K: tl.constexpr, K_TILES: tl.constexpr,
):  # fmt: skip
    """The gradient of the centroids that an iteration started from; for an UPDATE, `_write_H` has left in dC what
    goes past it."""
    for tile in range(K_TILES):
        offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        if K_TILES > 1:
            received, _ = withdraw(partial, offs_k, D, D_PADDED)
        values = received * slope
        if UPDATE:
            values += load_centroids(dC, offs_k, K, D, 0.0, D, D_PADDED)
        store_centroids(values, dC, offs_k, K, D, D_PADDED)


@triton.jit
def _write_H(
    mass, dC, H, partial, K, no_mass, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr,
    K_TILES: tl.constexpr,
):  # fmt: skip
    """H = dC / mass; dC keeps only what empty centroids have, which goes past this iteration."""
    for tile in range(K_TILES):
        offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        if K_TILES > 1:
            _, mass = withdraw(partial, offs_k, D, D_PADDED)
        empty = (mass <= no_mass)[None, :]
        values = load_centroids(dC, offs_k, K, D, 0.0, D, D_PADDED)
        h = tl.where(empty, 0.0, values / tl.where(empty, 1.0, mass[None, :]))
        store_centroids(h, H, offs_k, K, D, D_PADDED)
        store_centroids(tl.where(empty, values, 0.0), dC, offs_k, K, D, D_PADDED)


@triton.jit
def _last_walk(
    G, W, dW, trail, H, partial, used, stages, scale, slope, base, height, width, columns, tile_columns, n,
    K, TEMPERATURE: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr,
    K_TILES: tl.constexpr, PER_LANE: tl.constexpr, LANES: tl.constexpr, EUCLIDEAN: tl.constexpr,
    CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """dW through the output and through the updates of the last `stages` iterations before it; what tau receives."""
    dtau_sum = tl.zeros((PER_LANE, LANES), tl.float32)
    nothing = tl.zeros((D_PADDED, BLOCK_K, PER_LANE, LANES), tl.float32)
    offs_k = tl.arange(0, BLOCK_K)
    for first in range(0, n, PER_LANE * LANES):
        offs, exists, counts = addresses(
            first=first, base=base, height=height, width=width, columns=columns, tile_columns=tile_columns,
            D=D, D_PADDED=D_PADDED, PER_LANE=PER_LANE, LANES=LANES, CONTIGUOUS=CONTIGUOUS,
            ALIGNED=ALIGNED,
        )  # fmt: skip
        w = load_values(W, offs, exists)
        g = load_values(G, offs, exists)
        C = trail + (used - 1) * K * D
        c0, h0, offset0 = _load_tile(C, C, H, offs_k, K, False, D, D_PADDED)
        _, dw, dtau = _contributions(
            w=w, g=g, counts=counts, c0=c0, h0=h0, offset0=offset0, C=C, C_next=C, H=H, partial=partial,
            received_sum=nothing, scale=scale, slope=slope, first=first, K=K, UPDATE=False, SUM_DC=False, SUM_DW=True,
            TEMPERATURE=TEMPERATURE, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES, PER_LANE=PER_LANE,
            LANES=LANES, EUCLIDEAN=EUCLIDEAN,
        )  # fmt: skip
        dtau_sum += dtau
        for t in range(used - 1 - stages, used - 1):
            C = trail + t * K * D
            c0, h0, offset0 = _load_tile(C, C + K * D, H + t * K * D, offs_k, K, True, D, D_PADDED)
            _, more, dtau = _contributions(
                w=w, g=g, counts=counts, c0=c0, h0=h0, offset0=offset0, C=C, C_next=C + K * D, H=H + t * K * D,
                partial=partial, received_sum=nothing, scale=scale, slope=slope, first=first, K=K, UPDATE=True,
                SUM_DC=False, SUM_DW=True, TEMPERATURE=TEMPERATURE, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K,
                K_TILES=K_TILES, PER_LANE=PER_LANE, LANES=LANES, EUCLIDEAN=EUCLIDEAN,
            )  # fmt: skip
            dw += more
            dtau_sum += dtau
        tl.store(dW + offs, dw.to(dW.dtype.element_ty), mask=exists)
    return over_vectors(dtau_sum)


@quick
@triton.jit(
    do_not_specialize=[
        "rows", "columns", "tile_rows", "tile_columns", "across", "n", "K", "K_PADDED", "H_SLOTS",
        "max_iter",
    ]
)  # fmt: skip
def backward_groups_kernel(
    G, W, tau, trail, iterations, dW, dC, dtau, H, partial, rows, columns, tile_rows, tile_columns, across,
    n, K, K_PADDED, H_SLOTS, no_mass, max_iter, UNROLLED: tl.constexpr, WANT_DC: tl.constexpr,
    TEMPERATURE: tl.constexpr, ADD_TO_DW: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr,
    K_TILES: tl.constexpr, PER_LANE: tl.constexpr, LANES: tl.constexpr, EUCLIDEAN: tl.constexpr,
    CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The gradients of one group per program.  Without UNROLLED, only W_tilde = A C is differentiated.

    `H` has H_SLOTS slots per group: one per iteration, or with ADD_TO_DW a single one.
    """
    group = tl.program_id(0)
    base, height, width = place(group, rows, columns, tile_rows, tile_columns, across)
    temperature = tl.load(tau + group)
    scale = LOG2E / temperature
    slope = (1.0 if EUCLIDEAN else 2.0) / temperature
    used = tl.load(iterations + group).to(tl.int32)
    trail += group.to(tl.int64) * (max_iter + 1) * K * D
    H += group.to(tl.int64) * H_SLOTS * K * D
    dC += group.to(tl.int64) * K * D
    partial += group.to(tl.int64) * K_PADDED * (D + 1)
    dtau_sum = 0.0
    C = trail + (used - 1) * K * D
    if ADD_TO_DW or UNROLLED or WANT_DC:
        received, added = _through(
            G=G, W=W, dW=dW, C=C, C_next=C, H=H, partial=partial, scale=scale, slope=slope, base=base, height=height,
            width=width, columns=columns, tile_columns=tile_columns, n=n, K=K, UPDATE=False,
            SUM_DC=UNROLLED or WANT_DC, ADD_TO_DW=ADD_TO_DW, TEMPERATURE=TEMPERATURE, D=D, D_PADDED=D_PADDED,
            BLOCK_K=BLOCK_K, K_TILES=K_TILES, PER_LANE=PER_LANE, LANES=LANES, EUCLIDEAN=EUCLIDEAN,
            CONTIGUOUS=CONTIGUOUS, ALIGNED=ALIGNED,
        )  # fmt: skip
        dtau_sum += added
        if UNROLLED or WANT_DC:
            if K_TILES > 1:
                tl.debug_barrier()
            _write_dC(
                received=received, slope=slope, dC=dC, partial=partial, K=K, UPDATE=False, D=D,
                D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES,
            )  # fmt: skip
    stages = 0
    if UNROLLED:
        stages = used - 1
        for back in range(2, used + 1):
            t = used - back
            C = trail + t * K * D
            H_here = H
            if not ADD_TO_DW:
                H_here = H + t * K * D
            tl.debug_barrier()  # what one thread has written, others will read
            _, mass = sums(
                W=W, W_tilde=dW, C=C, partial=partial, scale=scale, write=False, base=base, height=height, width=width,
                columns=columns, tile_columns=tile_columns, n=n, K=K, SUM_W=False, D=D,
                D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES, PER_LANE=PER_LANE, LANES=LANES,
                EUCLIDEAN=EUCLIDEAN, CONTIGUOUS=CONTIGUOUS, ALIGNED=ALIGNED,
            )  # fmt: skip
            tl.debug_barrier()
            _write_H(
                mass=mass, dC=dC, H=H_here, partial=partial, K=K, no_mass=no_mass, D=D, D_PADDED=D_PADDED,
                BLOCK_K=BLOCK_K, K_TILES=K_TILES,
            )  # fmt: skip
            tl.debug_barrier()
            if ADD_TO_DW or WANT_DC or t > 0:
                received, added = _through(
                    G=G, W=W, dW=dW, C=C, C_next=C + K * D, H=H_here, partial=partial, scale=scale, slope=slope,
                    base=base, height=height, width=width, columns=columns, tile_columns=tile_columns,
                    n=n, K=K, UPDATE=True, SUM_DC=True, ADD_TO_DW=ADD_TO_DW,
                    TEMPERATURE=TEMPERATURE, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES,
                    PER_LANE=PER_LANE, LANES=LANES, EUCLIDEAN=EUCLIDEAN, CONTIGUOUS=CONTIGUOUS, ALIGNED=ALIGNED,
                )  # fmt: skip
                dtau_sum += added
                if K_TILES > 1:
                    tl.debug_barrier()
                _write_dC(
                    received=received, slope=slope, dC=dC, partial=partial, K=K, UPDATE=True, D=D,
                    D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES,
                )  # fmt: skip
    if not ADD_TO_DW:
        tl.debug_barrier()
        dtau_sum = _last_walk(
            G=G, W=W, dW=dW, trail=trail, H=H, partial=partial, used=used, stages=stages, scale=scale, slope=slope,
            base=base, height=height, width=width, columns=columns, tile_columns=tile_columns,
            n=n, K=K, TEMPERATURE=TEMPERATURE, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES,
            PER_LANE=PER_LANE, LANES=LANES, EUCLIDEAN=EUCLIDEAN, CONTIGUOUS=CONTIGUOUS, ALIGNED=ALIGNED,
        )  # fmt: skip
    if TEMPERATURE:
        tl.store(dtau + group, dtau_sum * (-LN2 / temperature))
