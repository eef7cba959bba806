"""The kernels of the backward pass.  `forward.py` explains programs, barriers and phases.

The iterations are walked from the last to the first.  The result does not depend on timing, unless programs share a
row of `partial`: `products` does that for small weights, except where deterministic algorithms are asked for.

Names are explained in the glossary of `triton/__init__.py`.
"""

import triton
import triton.language as tl

from ..launch import quick
from . import differences, products, windows
from .frame import find_frame, load_frame, store_frame
from .product_rows import SEGMENTS
from .product_tables import write_H_table, write_logit_table
from .steps import (
    ALL,
    APPLY,
    FOLD,
    LOG2E,
    MAP,
    PREPARE,
    PROGRESS_BACKWARD_BARRIER,
    SUMS,
    barrier,
    fold,
    fold_into_first_row,
    load_rows,
    pick_column,
)


@triton.jit
def _write_H(
    H_slots, trail, frame, offs_k, dC, K, K_PADDED, no_mass, t, slot, PRODUCTS: tl.constexpr, D: tl.constexpr,
    D_SEGMENT: tl.constexpr, ROW_WIDTH: tl.constexpr,
):  # fmt: skip
    """H = dC / mass, where dC is the gradient of row t + 1 of the trail, which iteration t made: into `slot`.

    The slot is a table of `products`, or `(k, d + 1)` with h . c' in the last column.
    """
    column = tl.arange(0, ROW_WIDTH)
    C_next = trail + (t + 1) * K * (D + 1)
    mass = tl.load(C_next + offs_k * (D + 1) + D, mask=offs_k < K, other=0.0)[:, None]
    h = tl.where(mass <= no_mass, 0.0, dC / tl.where(mass <= no_mass, 1.0, mass))
    h = tl.where((column < D)[None, :], h, 0.0)
    c_next = load_rows(C_next, offs_k, K, D + 1, D, ROW_WIDTH)
    if PRODUCTS:
        center, unit = load_frame(frame, D, D_SEGMENT, ROW_WIDTH)
        write_H_table(
            table=H_slots + slot * K_PADDED * SEGMENTS * D_SEGMENT, h=h, c_next=c_next, center=center, unit=unit,
            offs_k=offs_k, K_PADDED=K_PADDED, D_SEGMENT=D_SEGMENT, ROW_WIDTH=ROW_WIDTH,
        )  # fmt: skip
    else:
        offset = tl.sum(h * c_next, 1)[:, None]
        ptrs = H_slots + slot * K * (D + 1) + offs_k[:, None] * (D + 1) + column[None, :]
        h = tl.where((column == D)[None, :], offset, h)
        tl.store(ptrs, h, mask=(offs_k < K)[:, None] & (column <= D)[None, :])


@triton.jit
def _apply(
    trail, trail_gradients, H_slots, partial, frame, PARTIAL_ROWS, K, K_PADDED, no_mass, t, target, slot,
    EMPTY_PASS_ON, program, programs, PRODUCTS: tl.constexpr, D: tl.constexpr, D_SEGMENT: tl.constexpr,
    ROW_WIDTH: tl.constexpr, GROUP_K: tl.constexpr, FOLD_ROWS: tl.constexpr,
):  # fmt: skip
    """From the sums in `partial` to the gradient of row t of the trail, into `trail_gradients[target]`, and to the H
    that belongs to it, into `slot`.

    EMPTY_PASS_ON: a centroid that iteration t left in its place for want of mass also receives the gradient of the
    next row, which is in `trail_gradients[target + 1]`.
    """
    column = tl.arange(0, ROW_WIDTH)
    for group in range(program * GROUP_K, K_PADDED, programs * GROUP_K):
        offs_k = group + tl.arange(0, GROUP_K)
        total = fold(
            partial=partial, PARTIAL_ROWS=PARTIAL_ROWS, offs_k=offs_k, K_PADDED=K_PADDED, CLEAR=PRODUCTS, D=D,
            ROW_WIDTH=ROW_WIDTH, GROUP_K=GROUP_K, FOLD_ROWS=FOLD_ROWS,
        )  # fmt: skip
        C = load_rows(trail + t * K * (D + 1), offs_k, K, D + 1, D, ROW_WIDTH)
        # `products` adds up dlogits (w - center), the others dlogits w
        origin = load_frame(frame, D, D_SEGMENT, ROW_WIDTH)[0] if PRODUCTS else 0.0
        dC = total - pick_column(total, D, ROW_WIDTH) * (C - origin)
        mask = (offs_k < K)[:, None] & (column < D)[None, :]
        ptrs = trail_gradients + target * K * D + offs_k[:, None] * D + column[None, :]
        if EMPTY_PASS_ON:
            mass_ptrs = trail + (t + 1) * K * (D + 1) + offs_k * (D + 1) + D
            mass = tl.load(mass_ptrs, mask=offs_k < K, other=0.0)[:, None]
            dC += tl.where(mass <= no_mass, tl.load(ptrs + K * D, mask=mask, other=0.0), 0.0)
        tl.store(ptrs, dC, mask=mask)
        if t > 0:  # iteration t - 1 made this row: H is for the way through it
            _write_H(
                H_slots=H_slots, trail=trail, frame=frame, offs_k=offs_k, dC=dC, K=K, K_PADDED=K_PADDED,
                no_mass=no_mass, t=t - 1, slot=slot, PRODUCTS=PRODUCTS, D=D, D_SEGMENT=D_SEGMENT, ROW_WIDTH=ROW_WIDTH,
            )  # fmt: skip


@triton.jit
def _gradient_sums(
    G, W, counts, trail, frame, workspace, H_slots, scale, slope, partial, dW, N, n, K, K_PADDED, PARTIAL_ROWS, t,
    slot, program, programs, UPDATE: tl.constexpr, ADD_TO_DW: tl.constexpr, SUM_DC: tl.constexpr,
    PRODUCTS: tl.constexpr, EUCLIDEAN: tl.constexpr, COUNTS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
    WINDOWS_TILE: tl.constexpr,
):  # fmt: skip
    """What the centroids of row t receive from the vectors, in the way that suits the sizes."""
    if WINDOWS_TILE:
        C = trail + t * K * 2
        windows.gradient_sums(
            G=G, W=W, dW=dW, C=C, C_next=C + K * 2, H=H_slots + slot * K * 2, scale=scale, slope=slope,
            partial=partial, workspace=workspace, N=N, K=K, K_PADDED=K_PADDED, program=program, programs=programs,
            UPDATE=UPDATE, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, WINDOWS_TILE=WINDOWS_TILE,
        )  # fmt: skip
    elif PRODUCTS:
        products.gradient_sums(
            G=G, W=W, logit_table=workspace + t * K_PADDED * SEGMENTS * D_SEGMENT, H_table=H_slots + slot * K_PADDED *
            SEGMENTS * D_SEGMENT, frame=frame, scale=scale, slope=slope, partial=partial, dW=dW, N=N, n=n,
            K_PADDED=K_PADDED, PARTIAL_ROWS=PARTIAL_ROWS, program=program, programs=programs, UPDATE=UPDATE,
            ADD_TO_DW=ADD_TO_DW, SUM_DC=SUM_DC, D=D, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N,
            K_TILES=K_TILES,
        )  # fmt: skip
    else:
        C = trail + t * K * (D + 1)
        differences.gradient_sums(
            G=G, W=W, counts=counts, C=C, C_next=C + K * (D + 1), H=H_slots + slot * K * (D + 1), scale=scale,
            slope=slope, partial=partial, dW=dW, N=N, n=n, K=K, K_PADDED=K_PADDED, program=program, programs=programs,
            UPDATE=UPDATE, ADD_TO_DW=ADD_TO_DW, SUM_DC=SUM_DC, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K,
            BLOCK_N=BLOCK_N, K_TILES=K_TILES, EUCLIDEAN=EUCLIDEAN, COUNTS=COUNTS,
        )  # fmt: skip


@triton.jit
def _wanted(t, WANT_DC: tl.constexpr):
    """Whether the gradient of row t of the trail is needed: that of row 0 only if it is asked for."""
    if WANT_DC:
        return True
    else:
        return t > 0


@triton.jit
def _contributions(
    G, W, counts, trail, frame, workspace, H_slots, scale, slope, partial, dW, N, n, K, K_PADDED, PARTIAL_ROWS, t,
    slot, program, programs, UPDATE: tl.constexpr, ADD_TO_DW: tl.constexpr, WANT_DC: tl.constexpr,
    PRODUCTS: tl.constexpr, EUCLIDEAN: tl.constexpr, COUNTS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
    WINDOWS_TILE: tl.constexpr,
):  # fmt: skip
    """`_gradient_sums`, without the sums for the centroids where these are not needed."""
    if _wanted(t, WANT_DC):
        _gradient_sums(
            G=G, W=W, counts=counts, trail=trail, frame=frame, workspace=workspace, H_slots=H_slots, scale=scale,
            slope=slope, partial=partial, dW=dW, N=N, n=n, K=K, K_PADDED=K_PADDED, PARTIAL_ROWS=PARTIAL_ROWS, t=t,
            slot=slot, program=program, programs=programs, UPDATE=UPDATE, ADD_TO_DW=ADD_TO_DW, SUM_DC=True,
            PRODUCTS=PRODUCTS, EUCLIDEAN=EUCLIDEAN, COUNTS=COUNTS, D=D, D_PADDED=D_PADDED, D_SEGMENT=D_SEGMENT,
            BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES, WINDOWS_TILE=WINDOWS_TILE,
        )  # fmt: skip
    elif ADD_TO_DW:
        _gradient_sums(
            G=G, W=W, counts=counts, trail=trail, frame=frame, workspace=workspace, H_slots=H_slots, scale=scale,
            slope=slope, partial=partial, dW=dW, N=N, n=n, K=K, K_PADDED=K_PADDED, PARTIAL_ROWS=PARTIAL_ROWS, t=t,
            slot=slot, program=program, programs=programs, UPDATE=UPDATE, ADD_TO_DW=ADD_TO_DW, SUM_DC=False,
            PRODUCTS=PRODUCTS, EUCLIDEAN=EUCLIDEAN, COUNTS=COUNTS, D=D, D_PADDED=D_PADDED, D_SEGMENT=D_SEGMENT,
            BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES, WINDOWS_TILE=WINDOWS_TILE,
        )  # fmt: skip


@quick
@triton.jit(do_not_specialize=["n", "K", "K_PADDED", "PARTIAL_ROWS", "max_iter", "t", "slot", "target"])
def backward_kernel(
    G, W, counts, trail, progress, iterations, tau, trail_gradients, H_slots, workspace, partial, dW, N, n, K,
    K_PADDED, PARTIAL_ROWS, no_mass, max_iter, t, slot, target, PHASE: tl.constexpr, GRADIENT: tl.constexpr,
    OUTPUT: tl.constexpr, UPDATES: tl.constexpr, ADD_TO_DW: tl.constexpr, WANT_DC: tl.constexpr,
    PRODUCTS: tl.constexpr, EUCLIDEAN: tl.constexpr, COUNTS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    D_SEGMENT: tl.constexpr, ROW_WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    K_TILES: tl.constexpr, GROUP_K: tl.constexpr, FOLD_ROWS: tl.constexpr, WINDOWS_TILE: tl.constexpr,
):  # fmt: skip
    """From the last iteration to the first, the gradient of the centroids; then dW, through all iterations at once.

    ADD_TO_DW: dW is added up on the way instead, which takes fewer exponentials.  It is for float32 weights only: in
    16 bit the sum would lose precision, and a float32 sum beside it would take twice the memory of the weight.

    `trail_gradients[i]` is the gradient of row i of the trail, and the H in slot i belongs to it.  With ADD_TO_DW there
    is only one slot, number 0.  For GRADIENT = "implicit" there is also slot max_iter, which belongs to row `used`,
    made by iteration used - 1.

    OUTPUT and UPDATES say what MAP differentiates: the output W_tilde = A C, and the updates of the centroids.  For
    SUMS and APPLY, OUTPUT says that it is the output, else it is the update of iteration t.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    temperature = tl.load(tau)
    scale = LOG2E / temperature
    slope = (1.0 if EUCLIDEAN else 2.0) / temperature
    used = tl.load(iterations).to(tl.int32)
    frame = workspace.to(tl.pointer_type(tl.float32), bitcast=True)
    if PRODUCTS:
        workspace += SEGMENTS * D_SEGMENT  # after the row that holds the frame
    counter = (progress + PROGRESS_BACKWARD_BARRIER).to(tl.pointer_type(tl.int32), bitcast=True)
    if PHASE == ALL or PHASE == PREPARE:
        if PRODUCTS:
            if _wanted(used - 1, WANT_DC):
                for first in range(program * 1024, PARTIAL_ROWS * K_PADDED * (D + 1), programs * 1024):
                    offs = first + tl.arange(0, 1024)
                    exists = offs < PARTIAL_ROWS * K_PADDED * (D + 1)
                    tl.store(partial + offs, tl.zeros((1024,), tl.float32), mask=exists)
            center, unit = find_frame(trail, K, D + 1, D, ROW_WIDTH)
            if program == 0:
                store_frame(frame, center, unit, D_SEGMENT, ROW_WIDTH)
            for i in range(0, used):
                for group in range(program * GROUP_K, K_PADDED, programs * GROUP_K):
                    offs_k = group + tl.arange(0, GROUP_K)
                    C = load_rows(trail + i * K * (D + 1), offs_k, K, D + 1, D, ROW_WIDTH)
                    write_logit_table(
                        table=workspace + i * K_PADDED * SEGMENTS * D_SEGMENT, C=C, center=center, unit=unit,
                        offs_k=offs_k, K=K, K_PADDED=K_PADDED, D=D, D_SEGMENT=D_SEGMENT, ROW_WIDTH=ROW_WIDTH,
                    )  # fmt: skip
    if PHASE == ALL:
        if PRODUCTS:
            barrier(counter, programs)
        _contributions(
            G=G, W=W, counts=counts, trail=trail, frame=frame, workspace=workspace, H_slots=H_slots, scale=scale,
            slope=slope, partial=partial, dW=dW, N=N, n=n, K=K, K_PADDED=K_PADDED, PARTIAL_ROWS=PARTIAL_ROWS, t=used -
            1, slot=0, program=program, programs=programs, UPDATE=False, ADD_TO_DW=ADD_TO_DW, WANT_DC=WANT_DC,
            PRODUCTS=PRODUCTS, EUCLIDEAN=EUCLIDEAN, COUNTS=COUNTS, D=D, D_PADDED=D_PADDED, D_SEGMENT=D_SEGMENT,
            BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES, WINDOWS_TILE=WINDOWS_TILE,
        )  # fmt: skip
        if _wanted(used - 1, WANT_DC):
            barrier(counter, programs)
            _apply(
                trail=trail, trail_gradients=trail_gradients, H_slots=H_slots, partial=partial, frame=frame,
                PARTIAL_ROWS=PARTIAL_ROWS, K=K, K_PADDED=K_PADDED, no_mass=no_mass, t=used - 1, target=used - 1,
                slot=0 if ADD_TO_DW else used - 1, EMPTY_PASS_ON=False, program=program, programs=programs,
                PRODUCTS=PRODUCTS, D=D, D_SEGMENT=D_SEGMENT, ROW_WIDTH=ROW_WIDTH, GROUP_K=GROUP_K,
                FOLD_ROWS=FOLD_ROWS,
            )  # fmt: skip
        for back in range(2, used + 1):
            barrier(counter, programs)
            i = used - back
            _contributions(
                G=G, W=W, counts=counts, trail=trail, frame=frame, workspace=workspace, H_slots=H_slots, scale=scale,
                slope=slope, partial=partial, dW=dW, N=N, n=n, K=K, K_PADDED=K_PADDED, PARTIAL_ROWS=PARTIAL_ROWS, t=i,
                slot=0 if ADD_TO_DW else i + 1, program=program, programs=programs, UPDATE=True, ADD_TO_DW=ADD_TO_DW,
                WANT_DC=WANT_DC, PRODUCTS=PRODUCTS, EUCLIDEAN=EUCLIDEAN, COUNTS=COUNTS, D=D, D_PADDED=D_PADDED,
                D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES, WINDOWS_TILE=WINDOWS_TILE,
            )  # fmt: skip
            if _wanted(i, WANT_DC):
                barrier(counter, programs)
                _apply(
                    trail=trail, trail_gradients=trail_gradients, H_slots=H_slots, partial=partial, frame=frame,
                    PARTIAL_ROWS=PARTIAL_ROWS, K=K, K_PADDED=K_PADDED, no_mass=no_mass, t=i, target=i, slot=0 if
                    ADD_TO_DW else i, EMPTY_PASS_ON=True, program=program, programs=programs, PRODUCTS=PRODUCTS, D=D,
                    D_SEGMENT=D_SEGMENT, ROW_WIDTH=ROW_WIDTH, GROUP_K=GROUP_K, FOLD_ROWS=FOLD_ROWS,
                )  # fmt: skip
        if not ADD_TO_DW:
            barrier(counter, programs)
    if PHASE == SUMS or PHASE == APPLY:
        if GRADIENT == "unrolled" and not OUTPUT:
            if t >= used - 1:  # an iteration after convergence, or the one whose result the output does not use
                return
        else:
            t = used - 1
            if GRADIENT == "unrolled":
                target = t
    if PHASE == APPLY:
        if not _wanted(t, WANT_DC):
            return
    if PHASE == SUMS:
        _contributions(
            G=G, W=W, counts=counts, trail=trail, frame=frame, workspace=workspace, H_slots=H_slots, scale=scale,
            slope=slope, partial=partial, dW=dW, N=N, n=n, K=K, K_PADDED=K_PADDED, PARTIAL_ROWS=PARTIAL_ROWS, t=t,
            slot=slot, program=program, programs=programs, UPDATE=not OUTPUT, ADD_TO_DW=ADD_TO_DW, WANT_DC=WANT_DC,
            PRODUCTS=PRODUCTS, EUCLIDEAN=EUCLIDEAN, COUNTS=COUNTS, D=D, D_PADDED=D_PADDED, D_SEGMENT=D_SEGMENT,
            BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES, WINDOWS_TILE=WINDOWS_TILE,
        )  # fmt: skip
    if PHASE == FOLD:
        fold_into_first_row(
            partial=partial, PARTIAL_ROWS=PARTIAL_ROWS, K_PADDED=K_PADDED, program=program, programs=programs,
            CLEAR=PRODUCTS, D=D, ROW_WIDTH=ROW_WIDTH, GROUP_K=GROUP_K, FOLD_ROWS=FOLD_ROWS,
        )  # fmt: skip
    if PHASE == APPLY:
        _apply(
            trail=trail, trail_gradients=trail_gradients, H_slots=H_slots, partial=partial, frame=frame,
            PARTIAL_ROWS=PARTIAL_ROWS, K=K, K_PADDED=K_PADDED, no_mass=no_mass, t=t, target=target, slot=0 if
            ADD_TO_DW else target, EMPTY_PASS_ON=(GRADIENT == "unrolled") and not OUTPUT, program=program,
            programs=programs, PRODUCTS=PRODUCTS, D=D, D_SEGMENT=D_SEGMENT, ROW_WIDTH=ROW_WIDTH, GROUP_K=GROUP_K,
            FOLD_ROWS=FOLD_ROWS,
        )  # fmt: skip
    if PHASE == MAP or (PHASE == ALL and not ADD_TO_DW):
        # through the updates of the iterations first_update ... end_update - 1, whose H is slot_shift slots further
        first_update = 0
        end_update = 0
        slot_shift = 1
        if UPDATES:
            if GRADIENT == "unrolled":
                end_update = used - 1
            else:
                first_update = used - 1
                end_update = used
                slot_shift = max_iter - first_update
        if WINDOWS_TILE:
            windows.gradient(
                G=G, W=W, trail=trail, H_slots=H_slots, scale=scale, slope=slope, dW=dW, workspace=workspace, N=N,
                K=K, output_row=used - 1, first_update=first_update, end_update=end_update, slot_shift=slot_shift,
                program=program, programs=programs, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, WINDOWS_TILE=WINDOWS_TILE,
            )  # fmt: skip
        elif PRODUCTS:
            products.gradient(
                G=G, W=W, logit_tables=workspace, H_tables=H_slots, frame=frame, scale=scale, slope=slope, dW=dW, N=N,
                n=n, output_row=used - 1, first_update=first_update, end_update=end_update, slot_shift=slot_shift,
                table_size=K_PADDED * SEGMENTS * D_SEGMENT, program=program, programs=programs, D=D,
                D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
            )  # fmt: skip
        else:
            differences.gradient(
                G=G, W=W, trail=trail, H_slots=H_slots, scale=scale, slope=slope, dW=dW, N=N, n=n, K=K,
                output_row=used - 1, first_update=first_update, end_update=end_update, slot_shift=slot_shift,
                program=program, programs=programs, OUTPUT=OUTPUT, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K,
                BLOCK_N=BLOCK_N, K_TILES=K_TILES, EUCLIDEAN=EUCLIDEAN,
            )  # fmt: skip


@quick
@triton.jit(do_not_specialize=["K", "K_PADDED", "source", "slot"])
def fixed_point_kernel(
    trail, workspace, iterations, trail_gradients, H_slots, K, K_PADDED, no_mass, source, slot,
    PRODUCTS: tl.constexpr, D: tl.constexpr, D_SEGMENT: tl.constexpr, ROW_WIDTH: tl.constexpr, GROUP_K: tl.constexpr,
):  # fmt: skip
    """The H that belongs to `trail_gradients[source]`, for the way through the last iteration, into `slot`."""
    offs_k = tl.program_id(0) * GROUP_K + tl.arange(0, GROUP_K)
    dC = load_rows(trail_gradients + source * K * D, offs_k, K, D, D, ROW_WIDTH)
    t = tl.load(iterations).to(tl.int32) - 1
    _write_H(
        H_slots=H_slots, trail=trail, frame=workspace.to(tl.pointer_type(tl.float32), bitcast=True), offs_k=offs_k,
        dC=dC, K=K, K_PADDED=K_PADDED, no_mass=no_mass, t=t, slot=slot, PRODUCTS=PRODUCTS, D=D, D_SEGMENT=D_SEGMENT,
        ROW_WIDTH=ROW_WIDTH,
    )  # fmt: skip
