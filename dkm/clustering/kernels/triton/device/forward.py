"""The kernel of the forward pass.

A program walks over tiles of vectors and adds up what they contribute to the centroids in its row of `partial`.  When
all programs have arrived at a barrier, the rows are added in a fixed order, each program taking a few centroids, and
after another barrier the next iteration begins.  The result therefore does not depend on timing.  Every program sees
by itself whether the centroids have converged, so the host never waits.

Programs that wait for one another must all be on the chip at once: a launch of PHASE = ALL is cooperative.  Where there
can be no barriers, the host launches one phase after the other.  That is so in the interpreter, which runs one program
after another, and where processes that share a weight add up their sums in between.

Names are explained in the glossary of `triton/__init__.py`.
"""

import triton
import triton.language as tl

from ..launch import quick
from . import differences, products, windows
from .frame import find_frame, load_frame, store_frame
from .moment import checksum as checksum_of
from .moment import moment, next_step, temperature
from .product_rows import SEGMENTS
from .product_tables import write_logit_table
from .steps import (
    ALL,
    APPLY,
    CHECKSUM,
    FOLD,
    LOG2E,
    MAP,
    PREPARE,
    PROGRESS_CHECKSUM,
    PROGRESS_FORWARD_BARRIER,
    PROGRESS_MOVES,
    SUMS,
    barrier,
    fold,
    fold_into_first_row,
    load_rows,
    pick_column,
)


@triton.jit
def _begin(
    C, start, trail, frame, workspace, K, K_PADDED, program, programs, STATEFUL: tl.constexpr, PRODUCTS: tl.constexpr,
    D: tl.constexpr, D_SEGMENT: tl.constexpr, ROW_WIDTH: tl.constexpr, GROUP_K: tl.constexpr,
):  # fmt: skip
    """Copy C to the first row of the trail, with zeros as masses and, if STATEFUL, to `start`.

    PRODUCTS: write the frame and the table of the first iteration as well.
    """
    column = tl.arange(0, ROW_WIDTH)
    if PRODUCTS:
        center, unit = find_frame(C, K, D, D, ROW_WIDTH)
        if program == 0:
            store_frame(frame, center, unit, D_SEGMENT, ROW_WIDTH)
    for group in range(program * GROUP_K, K_PADDED, programs * GROUP_K):
        offs_k = group + tl.arange(0, GROUP_K)
        first = load_rows(C, offs_k, K, D, D, ROW_WIDTH)
        if STATEFUL:
            ptrs = start + offs_k[:, None] * D + column[None, :]
            tl.store(ptrs, first, mask=(offs_k < K)[:, None] & (column < D)[None, :])
        ptrs = trail + offs_k[:, None] * (D + 1) + column[None, :]
        tl.store(ptrs, first, mask=(offs_k < K)[:, None] & (column <= D)[None, :])
        if PRODUCTS:
            write_logit_table(
                table=workspace, C=first, center=center, unit=unit, offs_k=offs_k, K=K, K_PADDED=K_PADDED, D=D,
                D_SEGMENT=D_SEGMENT, ROW_WIDTH=ROW_WIDTH,
            )  # fmt: skip


@triton.jit
def _move(
    trail, moves, partial, frame, workspace, PARTIAL_ROWS, K, K_PADDED, no_mass, t, program, programs,
    PRODUCTS: tl.constexpr, D: tl.constexpr, D_SEGMENT: tl.constexpr, ROW_WIDTH: tl.constexpr, GROUP_K: tl.constexpr,
    FOLD_ROWS: tl.constexpr,
):  # fmt: skip
    """From the sums of iteration t to row t + 1 of the trail, and to how far a centroid has moved at most."""
    column = tl.arange(0, ROW_WIDTH)
    if PRODUCTS:
        center, unit = load_frame(frame, D, D_SEGMENT, ROW_WIDTH)
    for group in range(program * GROUP_K, K_PADDED, programs * GROUP_K):
        offs_k = group + tl.arange(0, GROUP_K)
        sums = fold(
            partial=partial, PARTIAL_ROWS=PARTIAL_ROWS, offs_k=offs_k, K_PADDED=K_PADDED, CLEAR=False, D=D,
            ROW_WIDTH=ROW_WIDTH, GROUP_K=GROUP_K, FOLD_ROWS=FOLD_ROWS,
        )  # fmt: skip
        mass = pick_column(sums, D, ROW_WIDTH)
        C = load_rows(trail + t * K * (D + 1), offs_k, K, D + 1, D, ROW_WIDTH)
        empty = mass <= no_mass
        valid = (offs_k < K)[:, None] & (column < D)[None, :]
        C_next = tl.where(valid, tl.where(empty, C, sums / tl.where(empty, 1.0, mass)), 0.0)
        tl.atomic_max(moves + t, tl.max(tl.max(tl.abs(C_next - C), 1), 0))
        ptrs = trail + (t + 1) * K * (D + 1) + offs_k[:, None] * (D + 1) + column[None, :]
        row = tl.where((column == D)[None, :], mass, C_next)
        tl.store(ptrs, row, mask=(offs_k < K)[:, None] & (column <= D)[None, :])
        if PRODUCTS:
            write_logit_table(
                table=workspace + (t + 1) * K_PADDED * SEGMENTS * D_SEGMENT, C=C_next, center=center, unit=unit,
                offs_k=offs_k, K=K, K_PADDED=K_PADDED, D=D, D_SEGMENT=D_SEGMENT, ROW_WIDTH=ROW_WIDTH,
            )  # fmt: skip


@triton.jit
def _sums(
    W, counts, trail, frame, workspace, scale, partial, W_tilde, N, n, K, K_PADDED, t, program, programs,
    PRODUCTS: tl.constexpr, EUCLIDEAN: tl.constexpr, COUNTS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
    WINDOWS_TILE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The sums of iteration t, in the way that suits the sizes; FIRST says that t is 0."""
    if WINDOWS_TILE:
        windows.sums(
            W=W, W_tilde=W_tilde, C=trail + t * K * 2, scale=scale, partial=partial, workspace=workspace, N=N, K=K,
            K_PADDED=K_PADDED, program=program, programs=programs, FIRST=FIRST, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N,
            WINDOWS_TILE=WINDOWS_TILE,
        )  # fmt: skip
    elif PRODUCTS:
        products.sums(
            W=W, logit_table=workspace + t * K_PADDED * SEGMENTS * D_SEGMENT, frame=frame, scale=scale,
            partial=partial, W_tilde=W_tilde, N=N, n=n, K_PADDED=K_PADDED, program=program, programs=programs,
            FIRST=FIRST, D=D, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
        )  # fmt: skip
    else:
        differences.sums(
            W=W, counts=counts, C=trail + t * K * (D + 1), scale=scale, partial=partial, W_tilde=W_tilde, N=N, n=n,
            K=K, K_PADDED=K_PADDED, program=program, programs=programs, FIRST=FIRST, D=D, D_PADDED=D_PADDED,
            BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES, EUCLIDEAN=EUCLIDEAN, COUNTS=COUNTS,
        )  # fmt: skip


@triton.jit
def _iteration(
    W, counts, trail, frame, workspace, scale, partial, W_tilde, N, n, K, K_PADDED, t, program, programs,
    PRODUCTS: tl.constexpr, EUCLIDEAN: tl.constexpr, COUNTS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
    WINDOWS_TILE: tl.constexpr,
):  # fmt: skip
    """The sums of iteration t.  The first iteration also writes W_tilde, or the order that `windows` keeps there."""
    if t == 0:
        _sums(
            W=W, counts=counts, trail=trail, frame=frame, workspace=workspace, scale=scale, partial=partial,
            W_tilde=W_tilde, N=N, n=n, K=K, K_PADDED=K_PADDED, t=t, program=program, programs=programs,
            PRODUCTS=PRODUCTS, EUCLIDEAN=EUCLIDEAN, COUNTS=COUNTS, D=D, D_PADDED=D_PADDED, D_SEGMENT=D_SEGMENT,
            BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES, WINDOWS_TILE=WINDOWS_TILE, FIRST=True,
        )  # fmt: skip
    else:
        _sums(
            W=W, counts=counts, trail=trail, frame=frame, workspace=workspace, scale=scale, partial=partial,
            W_tilde=W_tilde, N=N, n=n, K=K, K_PADDED=K_PADDED, t=t, program=program, programs=programs,
            PRODUCTS=PRODUCTS, EUCLIDEAN=EUCLIDEAN, COUNTS=COUNTS, D=D, D_PADDED=D_PADDED, D_SEGMENT=D_SEGMENT,
            BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES, WINDOWS_TILE=WINDOWS_TILE, FIRST=False,
        )  # fmt: skip


@quick
@triton.jit(
    do_not_specialize=[
        "n", "K", "K_PADDED", "PARTIAL_ROWS", "max_iter", "relative", "steps", "recomputing", "channels", "pixels", "t",
    ]
)  # fmt: skip
def forward_kernel(
    W, counts, C, start, seen, step, clock, unit, tau, trail, progress, partial, workspace, iterations, W_tilde, N, n,
    K, K_PADDED, PARTIAL_ROWS, eps, no_mass, max_iter, hot, decay, relative, steps, recomputing, channels, pixels, t,
    PHASE: tl.constexpr, STATEFUL: tl.constexpr, CHANNELS_LAST: tl.constexpr, PRODUCTS: tl.constexpr,
    EUCLIDEAN: tl.constexpr, COUNTS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, D_SEGMENT: tl.constexpr,
    ROW_WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
    GROUP_K: tl.constexpr, FOLD_ROWS: tl.constexpr, WINDOWS_TILE: tl.constexpr,
):  # fmt: skip
    """Up to max_iter iterations, then W_tilde = A C with the A and the C that belong together.

    The first iteration writes W_tilde as well: late in a training it is often the last one.

    STATEFUL: the iterations start from C or, if the step is not a new one, from `start`, at the temperature of the
    step.  C, start, seen, step and clock are brought up to date in place, and tau is written.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    row = K * (D + 1)
    checksum = (progress + PROGRESS_CHECKSUM).to(tl.pointer_type(tl.int64), bitcast=True)
    counter = (progress + PROGRESS_FORWARD_BARRIER).to(tl.pointer_type(tl.int32), bitcast=True)
    moves = progress + PROGRESS_MOVES
    frame = workspace.to(tl.pointer_type(tl.float32), bitcast=True)
    if PRODUCTS:
        workspace += SEGMENTS * D_SEGMENT  # after the row that holds the frame
    if STATEFUL and (PHASE == ALL or PHASE == CHECKSUM):
        tl.atomic_add(checksum, checksum_of(W, N, channels, pixels, program, programs, CHANNELS_LAST, 1024))
    if PHASE == ALL:
        if STATEFUL:
            # Most likely the weight has changed.  Preparing for that before the checksum is known saves a barrier.
            heat = temperature(next_step(step, clock)[0], unit, hot, decay, relative, steps)
        else:
            heat = tl.load(tau)
        scale = LOG2E / heat
        _begin(
            C=C, start=C, trail=trail, frame=frame, workspace=workspace, K=K, K_PADDED=K_PADDED, program=program,
            programs=programs, STATEFUL=False, PRODUCTS=PRODUCTS, D=D, D_SEGMENT=D_SEGMENT, ROW_WIDTH=ROW_WIDTH,
            GROUP_K=GROUP_K,
        )  # fmt: skip
        barrier(counter, programs)
        if STATEFUL:
            moved, now = moment(checksum, seen, step, clock, recomputing)
            heat = temperature(now, unit, hot, decay, relative, steps)
            scale = LOG2E / heat
            if program == 0:
                tl.store(tau, heat)
            if moved:
                _begin(
                    C=C, start=start, trail=trail, frame=frame, workspace=workspace, K=K, K_PADDED=K_PADDED,
                    program=program, programs=programs, STATEFUL=True, PRODUCTS=False, D=D, D_SEGMENT=D_SEGMENT,
                    ROW_WIDTH=ROW_WIDTH, GROUP_K=GROUP_K,
                )  # fmt: skip
            else:
                _begin(
                    C=start, start=start, trail=trail, frame=frame, workspace=workspace, K=K, K_PADDED=K_PADDED,
                    program=program, programs=programs, STATEFUL=False, PRODUCTS=PRODUCTS, D=D, D_SEGMENT=D_SEGMENT,
                    ROW_WIDTH=ROW_WIDTH, GROUP_K=GROUP_K,
                )  # fmt: skip
                barrier(counter, programs)
    elif PHASE != CHECKSUM:
        if STATEFUL and PHASE == PREPARE:
            moved, now = moment(checksum, seen, step, clock, recomputing)
            heat = temperature(now, unit, hot, decay, relative, steps)
            if program == 0:
                tl.store(tau, heat)
        else:
            moved = True
            heat = tl.load(tau)
        scale = LOG2E / heat
        if PHASE == PREPARE:
            if moved:
                _begin(
                    C=C, start=start, trail=trail, frame=frame, workspace=workspace, K=K, K_PADDED=K_PADDED,
                    program=program, programs=programs, STATEFUL=STATEFUL, PRODUCTS=PRODUCTS, D=D,
                    D_SEGMENT=D_SEGMENT, ROW_WIDTH=ROW_WIDTH, GROUP_K=GROUP_K,
                )  # fmt: skip
            else:
                _begin(
                    C=start, start=start, trail=trail, frame=frame, workspace=workspace, K=K, K_PADDED=K_PADDED,
                    program=program, programs=programs, STATEFUL=False, PRODUCTS=PRODUCTS, D=D, D_SEGMENT=D_SEGMENT,
                    ROW_WIDTH=ROW_WIDTH, GROUP_K=GROUP_K,
                )  # fmt: skip
    if PHASE == ALL:
        t = 0
        running = 1
        while (t < max_iter) & (running != 0):
            _iteration(
                W=W, counts=counts, trail=trail, frame=frame, workspace=workspace, scale=scale, partial=partial,
                W_tilde=W_tilde, N=N, n=n, K=K, K_PADDED=K_PADDED, t=t, program=program, programs=programs,
                PRODUCTS=PRODUCTS, EUCLIDEAN=EUCLIDEAN, COUNTS=COUNTS, D=D, D_PADDED=D_PADDED, D_SEGMENT=D_SEGMENT,
                BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES, WINDOWS_TILE=WINDOWS_TILE,
            )  # fmt: skip
            barrier(counter, programs)
            _move(
                trail=trail, moves=moves, partial=partial, frame=frame, workspace=workspace,
                PARTIAL_ROWS=PARTIAL_ROWS, K=K, K_PADDED=K_PADDED, no_mass=no_mass, t=t, program=program,
                programs=programs, PRODUCTS=PRODUCTS, D=D, D_SEGMENT=D_SEGMENT, ROW_WIDTH=ROW_WIDTH, GROUP_K=GROUP_K,
                FOLD_ROWS=FOLD_ROWS,
            )  # fmt: skip
            barrier(counter, programs)
            running = (tl.load(moves + t) > eps).to(tl.int32)
            t += 1
    elif PHASE != CHECKSUM:
        # How many iterations are used, as far as the t iterations before tell.  After convergence there is nothing
        # to do.
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
            W=W, counts=counts, trail=trail, frame=frame, workspace=workspace, scale=scale, partial=partial,
            W_tilde=W_tilde, N=N, n=n, K=K, K_PADDED=K_PADDED, t=t, program=program, programs=programs,
            PRODUCTS=PRODUCTS, EUCLIDEAN=EUCLIDEAN, COUNTS=COUNTS, D=D, D_PADDED=D_PADDED, D_SEGMENT=D_SEGMENT,
            BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES, WINDOWS_TILE=WINDOWS_TILE,
        )  # fmt: skip
    if PHASE == FOLD:
        fold_into_first_row(
            partial=partial, PARTIAL_ROWS=PARTIAL_ROWS, K_PADDED=K_PADDED, program=program, programs=programs,
            CLEAR=False, D=D, ROW_WIDTH=ROW_WIDTH, GROUP_K=GROUP_K, FOLD_ROWS=FOLD_ROWS,
        )  # fmt: skip
    if PHASE == APPLY:
        _move(
            trail=trail, moves=moves, partial=partial, frame=frame, workspace=workspace, PARTIAL_ROWS=PARTIAL_ROWS,
            K=K, K_PADDED=K_PADDED, no_mass=no_mass, t=t, program=program, programs=programs, PRODUCTS=PRODUCTS, D=D,
            D_SEGMENT=D_SEGMENT, ROW_WIDTH=ROW_WIDTH, GROUP_K=GROUP_K, FOLD_ROWS=FOLD_ROWS,
        )  # fmt: skip
    if PHASE == ALL or PHASE == MAP:
        if program == 0:
            tl.store(iterations, t.to(tl.int64))
            if STATEFUL:
                reached = moment(checksum, seen, step, clock, recomputing)[1]
                tl.store(clock, tl.maximum(tl.load(clock), tl.maximum(tl.load(step), reached)))
                tl.store(step, reached)
                tl.store(seen, tl.load(checksum, cache_modifier=".cg"))
        if STATEFUL or t < max_iter:  # the last row of the trail repeats the row that was reached
            for group in range(program * GROUP_K, K_PADDED, programs * GROUP_K):
                offs_k = group + tl.arange(0, GROUP_K)
                column = tl.arange(0, ROW_WIDTH)
                ptrs = trail + offs_k[:, None] * (D + 1) + column[None, :]
                mask = (offs_k < K)[:, None] & (column <= D)[None, :]
                last = tl.load(ptrs + t * row, mask=mask)
                tl.store(ptrs + max_iter * row, last, mask=mask)
                if STATEFUL:
                    ptrs = C + offs_k[:, None] * D + column[None, :]
                    tl.store(ptrs, last, mask=(offs_k < K)[:, None] & (column < D)[None, :])
        if WINDOWS_TILE:
            windows.averages(
                W=W, C=trail + (t - 1) * row, scale=scale, W_tilde=W_tilde, workspace=workspace, N=N, K=K,
                program=program, programs=programs, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, WINDOWS_TILE=WINDOWS_TILE,
            )  # fmt: skip
        elif t > 1:
            if PRODUCTS:
                products.averages(
                    W=W, logit_table=workspace + (t - 1) * K_PADDED * SEGMENTS * D_SEGMENT, frame=frame, scale=scale,
                    W_tilde=W_tilde, N=N, n=n, program=program, programs=programs, D=D, D_SEGMENT=D_SEGMENT,
                    BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
                )  # fmt: skip
            else:
                differences.averages(
                    W=W, C=trail + (t - 1) * row, scale=scale, W_tilde=W_tilde, N=N, n=n, K=K, program=program,
                    programs=programs, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, K_TILES=K_TILES,
                    EUCLIDEAN=EUCLIDEAN,
                )  # fmt: skip
