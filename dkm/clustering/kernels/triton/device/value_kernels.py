"""The kernels of `..value_table`, which explains them.

The table has one entry for each of the 65,536 values of 16 bits, at the index that its bits are.  Behind it there are
COPIES smaller tables for the COPIED magnitudes from the largest weight's downwards.  Nearly all weights are among these
(smaller ones are tiny), so that additions to a single entry would have to wait for one another.
"""

import triton
import triton.language as tl

from ..launch import quick

TABLE_SIZE = tl.constexpr(1 << 16)
# Of how many magnitudes, from the largest weight's downwards, there are copies, for either sign.  In bfloat16 these are
# 16 powers of two, and nearly all weights.
COPIED = tl.constexpr(2048)


@triton.jit
def _index(W, offs, N):
    """The index of weights in the table: their bits as an unsigned number."""
    return tl.load(W + offs, mask=offs < N, other=0).to(tl.int32) & 0xFFFF


@triton.jit
def _first_copied(largest):
    """The bits of the smallest magnitude of which there are copies.  The largest one is that of the largest weight."""
    bits = tl.load(largest.to(tl.pointer_type(tl.int16), bitcast=True)).to(tl.int32)
    return tl.maximum(bits - (COPIED - 1), 1)


@triton.jit
def _factor(largest, N):
    """A power of two by which N gradients may be multiplied so that their sum fits into 64 bits; NaN if one of the
    gradients is not finite."""
    size = tl.load(largest).to(tl.float64)
    # for 2^25 weights, the error of a sum is 2^-37 of the largest gradient
    room = tl.minimum(2.0**61 / N / tl.maximum(size, 1e-290), 2.0**120)
    power = (room.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
    return tl.where(size < float("inf"), power, float("nan"))


@quick
@triton.jit(do_not_specialize=["COPIES"])
def add_up_kernel(
    W, G, largest, largest_gradient, counts, sums, N, COPIES, GRADIENTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """How often each value occurs and, with GRADIENTS, the sum of its gradients times `_factor`.

    What is added are integers, so that the result does not depend on the order.
    """
    zeros = tl.zeros((BLOCK_N,), tl.int32)
    zeros_total = tl.zeros((BLOCK_N,), tl.int64)
    first_copied = _first_copied(largest)
    if GRADIENTS:
        factor = _factor(largest_gradient, N).to(tl.float32)
    copy = TABLE_SIZE + tl.program_id(0) % COPIES * (2 * COPIED)
    for first in range(tl.program_id(0) * BLOCK_N, N, tl.num_programs(0) * BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        index = _index(W, offs_n, N)
        magnitude = index & 0x7FFF
        zero = (offs_n < N) & (magnitude == 0)  # possibly most of the weights: counted here, and added once
        rest = (offs_n < N) & (magnitude != 0)
        place = tl.where(magnitude >= first_copied, copy + magnitude - first_copied + (index >> 15) * COPIED, index)
        tl.atomic_add(counts + place, 1, mask=rest, sem="relaxed")
        zeros += zero.to(tl.int32)
        if GRADIENTS:
            g = tl.load(G + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
            whole = tl.floor(g * factor + 0.5).to(tl.int64)
            tl.atomic_add(sums + place, whole, mask=rest, sem="relaxed")
            zeros_total += tl.where(zero, whole, 0)
    tl.atomic_add(counts, tl.sum(zeros, 0), sem="relaxed")
    if GRADIENTS:
        tl.atomic_add(sums, tl.sum(zeros_total, 0), sem="relaxed")


@quick
@triton.jit(do_not_specialize=["COPIES"])
def gather_kernel(
    all_values, values, largest, largest_gradient, counts, sums, gradients, N, COPIES, GRADIENTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the copies to the table, divide the gradients by `_factor`, and copy the values that occur; others are 0."""
    index = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = (index & 0x7FFF) - _first_copied(largest)
    copied = (place >= 0) & (place < COPIED)
    place += TABLE_SIZE + (index >> 15) * COPIED
    count = tl.load(counts + index)
    if GRADIENTS:
        total = tl.load(sums + index)
    for copy in range(COPIES):
        offs = place + copy * (2 * COPIED)
        count += tl.load(counts + offs, mask=copied, other=0)
        if GRADIENTS:
            total += tl.load(sums + offs, mask=copied, other=0)
    tl.store(counts + index, count)
    if GRADIENTS:
        tl.store(gradients + index, (total.to(tl.float64) / _factor(largest_gradient, N)).to(tl.float32))
    # a value that does not occur may be infinite, or its square may be, and would spoil the sums
    tl.store(values + index, tl.where(count > 0, tl.load(all_values + index), 0.0))


@quick
@triton.jit
def look_up_kernel(W, table, W_tilde, N, BLOCK_N: tl.constexpr):
    """W_tilde = table[w]."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    value = tl.load(table + _index(W, offs_n, N), mask=offs_n < N, other=0.0)
    tl.store(W_tilde + offs_n, value.to(W_tilde.dtype.element_ty), mask=offs_n < N)


@quick
@triton.jit
def look_up_gradient_kernel(W, G, slopes, offsets, dW, N, BLOCK_N: tl.constexpr):
    """dW = g slopes[w] + offsets[w]."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    index = _index(W, offs_n, N)
    g = tl.load(G + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    slope = tl.load(slopes + index, mask=offs_n < N, other=0.0)
    offset = tl.load(offsets + index, mask=offs_n < N, other=0.0)
    tl.store(dW + offs_n, (g * slope + offset).to(dW.dtype.element_ty), mask=offs_n < N)
