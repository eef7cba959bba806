"""What the forward and the backward kernel share.

Names are explained in the glossary of `triton/__init__.py`.
"""

import triton
import triton.language as tl

# The phases of a pass.  With ALL, one launch does everything and its programs wait for one another at barriers.  The
# others are one launch each: they are needed where there are no barriers, or where the host has work in between.
ALL = tl.constexpr(0)
CHECKSUM = tl.constexpr(1)  # forward only: add up the bits of the weight
PREPARE = tl.constexpr(2)  # write what the first iteration reads
SUMS = tl.constexpr(3)  # walk over the vectors, and add what they contribute to the centroids to `partial`
FOLD = tl.constexpr(4)  # add up the rows of `partial` into its first row
APPLY = tl.constexpr(5)  # from these sums to the next centroids, or to the gradient of the centroids
MAP = tl.constexpr(6)  # walk over the vectors, and write W_tilde or dW

# The words (4 bytes each) of `progress`.  All of them are zero before a forward pass.
PROGRESS_CHECKSUM = tl.constexpr(0)  # two words, one int64: the sum of the bits of the weight
PROGRESS_FORWARD_BARRIER = tl.constexpr(2)  # int32: how often a program has arrived at a barrier of the forward pass
PROGRESS_BACKWARD_BARRIER = tl.constexpr(3)  # int32: the same of the backward pass
PROGRESS_MOVES = tl.constexpr(4)  # float32, one word per iteration: how far a centroid moved in it at most

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def barrier(counter, programs):
    """Wait until all programs are here.  What any of them wrote before is visible to all of them afterwards.

    The counter may start from any multiple of `programs`, so that several passes can count in the same word.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    target = (arrived // programs + 1) * programs
    # Waiting with plain loads: atomic operations of those who wait would slow down those who still work.
    while tl.load(counter, volatile=True) < target:
        pass
    # The load that acquires what the others wrote.  An atomic addition of zero would do, but is optimised away.
    tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()


@triton.jit
def load_rows(X, offs_k, K, STRIDE: tl.constexpr, D: tl.constexpr, ROW_WIDTH: tl.constexpr):
    """Rows `offs_k` of X, of which rows are STRIDE apart, as `(GROUP_K, ROW_WIDTH)`; zero past column D and row K."""
    column = tl.arange(0, ROW_WIDTH)
    mask = (offs_k < K)[:, None] & (column < D)[None, :]
    return tl.load(X + offs_k[:, None] * STRIDE + column[None, :], mask=mask, other=0.0)


@triton.jit
def pick_column(X, i, ROW_WIDTH: tl.constexpr):
    """Column i of `(GROUP_K, ROW_WIDTH)`, as `(GROUP_K, 1)`."""
    return tl.sum(tl.where((tl.arange(0, ROW_WIDTH) == i)[None, :], X, 0.0), 1)[:, None]


@triton.jit
def fold(
    partial, PARTIAL_ROWS, offs_k, K_PADDED, CLEAR: tl.constexpr, D: tl.constexpr, ROW_WIDTH: tl.constexpr,
    GROUP_K: tl.constexpr, FOLD_ROWS: tl.constexpr,
):  # fmt: skip
    """The sum of the rows of `partial`, always in the same order, for the centroids `offs_k`: `(GROUP_K, ROW_WIDTH)`.

    With CLEAR, the rows are zero afterwards.
    """
    total = tl.zeros((GROUP_K, ROW_WIDTH), tl.float32)
    column = tl.arange(0, ROW_WIDTH)
    offs = offs_k[:, None] * (D + 1) + column[None, :]
    mask = (offs_k < K_PADDED)[:, None] & (column <= D)[None, :]
    for first in range(0, PARTIAL_ROWS, FOLD_ROWS):
        row = first + tl.arange(0, FOLD_ROWS)
        ptrs = partial + row[:, None, None] * (K_PADDED * (D + 1)) + offs[None, :, :]
        exists = (row < PARTIAL_ROWS)[:, None, None] & mask[None, :, :]
        # .cg reads past the first cache, which may still hold what another processor has overwritten since
        piece = tl.load(ptrs, mask=exists, other=0.0, cache_modifier=".cg")
        total += tl.sum(piece, 0)
        if CLEAR:
            tl.debug_barrier()  # several threads may read the same element: all must have done so
            tl.store(ptrs, tl.zeros_like(piece), mask=exists)
    return total


@triton.jit
def fold_into_first_row(
    partial, PARTIAL_ROWS, K_PADDED, program, programs, CLEAR: tl.constexpr, D: tl.constexpr, ROW_WIDTH: tl.constexpr,
    GROUP_K: tl.constexpr, FOLD_ROWS: tl.constexpr,
):  # fmt: skip
    """The phase FOLD."""
    column = tl.arange(0, ROW_WIDTH)
    for group in range(program * GROUP_K, K_PADDED, programs * GROUP_K):
        offs_k = group + tl.arange(0, GROUP_K)
        total = fold(
            partial=partial, PARTIAL_ROWS=PARTIAL_ROWS, offs_k=offs_k, K_PADDED=K_PADDED, CLEAR=CLEAR, D=D,
            ROW_WIDTH=ROW_WIDTH, GROUP_K=GROUP_K, FOLD_ROWS=FOLD_ROWS,
        )  # fmt: skip
        tl.debug_barrier()  # with CLEAR, another thread may have written zeros here
        ptrs = partial + offs_k[:, None] * (D + 1) + column[None, :]
        tl.store(ptrs, total, mask=(offs_k < K_PADDED)[:, None] & (column <= D)[None, :])
