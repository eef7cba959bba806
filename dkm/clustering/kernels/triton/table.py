"""d = 1 in 16 bit: there are 65,536 different weights at most.

The loop runs on a table of all of them, each with how often it occurs; a weight then only looks its value up.  In the
backward pass the gradients of equal weights are added up first.  The cost depends neither on the bits nor on the
iterations, but for those of a small layer.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import quick

SIZE = 1 << 16
NEAR = tl.constexpr(2048)  # the largest values, of either sign: 16 powers of two in bfloat16, and nearly all weights


@functools.lru_cache(maxsize=8)
def _values(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(SIZE, dtype=torch.int32, device=device).to(torch.int16).view(dtype).float()


@triton.jit
def _index(W, at, N):
    return tl.load(W + at, mask=at < N, other=0).to(tl.int32) & 0xFFFF


@triton.jit
def _lowest(largest, NEAR: tl.constexpr):
    """From which value on there are several tables, as its bits; that of the largest weight is the last."""
    bits = tl.load(largest.to(tl.pointer_type(tl.int16), bitcast=True)).to(tl.int32)
    return tl.maximum(bits - (NEAR - 1), 1)


@triton.jit
def _factor(largest, N):
    """A power of two such that no sum of N gradients overflows 64 bits; not a number where one of them is none."""
    size = tl.load(largest).to(tl.float64)
    # the error of a sum is 2^-37 of the largest gradient, for 2^25 weights
    room = tl.minimum(2.0**61 / N / tl.maximum(size, 1e-290), 2.0**120)
    power = (room.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
    return tl.where(size < float("inf"), power, float("nan"))


@quick
@triton.jit
def _add_up(
    W, G, largest, largest_gradient, counts, sums, N, COPIES, GRADIENTS: tl.constexpr, NEAR: tl.constexpr,
    SIZE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """How often each value occurs and, in units of 1 / factor, the sum of its gradients: of the largest values in one
    of COPIES tables, in turns, past the table of all: those are so frequent that additions would queue up.

    What is added is an integer: the result does not depend on the order.
    """
    zeros = tl.zeros((BN,), tl.int32)
    zeros_total = tl.zeros((BN,), tl.int64)
    first_value = _lowest(largest, NEAR)
    if GRADIENTS:
        scale = _factor(largest_gradient, N).to(tl.float32)
    copy = SIZE + tl.program_id(0) % COPIES * (2 * NEAR)
    for first in range(tl.program_id(0) * BN, N, tl.num_programs(0) * BN):
        at = first + tl.arange(0, BN)
        index = _index(W, at, N)
        size = index & 0x7FFF
        zero = (at < N) & (size == 0)  # may be most of them
        rest = (at < N) & (size != 0)
        place = tl.where(size >= first_value, copy + size - first_value + (index >> 15) * NEAR, index)
        tl.atomic_add(counts + place, 1, mask=rest, sem="relaxed")
        zeros += zero.to(tl.int32)
        if GRADIENTS:
            g = tl.load(G + at, mask=at < N, other=0.0).to(tl.float32)
            whole = tl.floor(g * scale + 0.5).to(tl.int64)
            tl.atomic_add(sums + place, whole, mask=rest, sem="relaxed")
            zeros_total += tl.where(zero, whole, 0)
    tl.atomic_add(counts, tl.sum(zeros, 0), sem="relaxed")
    if GRADIENTS:
        tl.atomic_add(sums, tl.sum(zeros_total, 0), sem="relaxed")


@quick
@triton.jit
def _gather(
    all_values, values, largest, largest_gradient, counts, sums, gradients, N, COPIES, GRADIENTS: tl.constexpr,
    NEAR: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The copies added to the table of all, gradients in their own unit; values that do not occur become zero."""
    index = tl.program_id(0) * BN + tl.arange(0, BN)
    place = (index & 0x7FFF) - _lowest(largest, NEAR)
    near = (place >= 0) & (place < NEAR)
    place += SIZE + (index >> 15) * NEAR
    count = tl.load(counts + index)
    if GRADIENTS:
        total = tl.load(sums + index)
    for copy in range(COPIES):
        at = place + copy * (2 * NEAR)
        count += tl.load(counts + at, mask=near, other=0)
        if GRADIENTS:
            total += tl.load(sums + at, mask=near, other=0)
    tl.store(counts + index, count)
    if GRADIENTS:
        tl.store(gradients + index, (total.to(tl.float64) / _factor(largest_gradient, N)).to(tl.float32))
    # what does not occur may be infinite, or so large that its square is
    tl.store(values + index, tl.where(count > 0, tl.load(all_values + index), 0.0))


@quick
@triton.jit
def _look_up(W, table, W_tilde, N, BN: tl.constexpr):
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    value = tl.load(table + _index(W, at, N), mask=at < N, other=0.0)
    tl.store(W_tilde + at, value.to(W_tilde.dtype.element_ty), mask=at < N)


@quick
@triton.jit
def _look_up_gradient(W, G, slopes, offsets, dW, N, BN: tl.constexpr):
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    index = _index(W, at, N)
    g = tl.load(G + at, mask=at < N, other=0.0).to(tl.float32)
    slope = tl.load(slopes + index, mask=at < N, other=0.0)
    offset = tl.load(offsets + index, mask=at < N, other=0.0)
    tl.store(dW + at, (g * slope + offset).to(dW.dtype.element_ty), mask=at < N)


def _grid(N: int) -> tuple[tuple[int], dict]:
    return (triton.cdiv(N, 4096),), dict(BN=4096, num_warps=8)


class Population(NamedTuple):
    """What there is, `(65536,)` each; zero for values that do not occur."""

    values: Tensor  # float32, by their bits
    counts: Tensor  # int32; there is more after those
    gradients: Tensor | None  # float32: those of equal weights added up


def population(W: Tensor, G: Tensor | None = None) -> Population:
    N = W.numel()
    copies = max(1, N >> 19)  # a fortieth of the weight's memory, with the sums
    counts = torch.zeros(SIZE + copies * 2 * NEAR.value, dtype=torch.int32, device=W.device)
    sums = counts if G is None else torch.zeros_like(counts, dtype=torch.int64)
    largest = _largest(W)
    largest_gradient = largest if G is None else _largest(G)
    all_values = _values(W.dtype, W.device)
    values = torch.empty_like(all_values)
    gradients = None if G is None else torch.empty_like(values)
    options = dict(GRADIENTS=G is not None, NEAR=NEAR.value, SIZE=SIZE, num_warps=4)
    _add_up[(min(triton.cdiv(N, 1024), 8 * copies + 64),)](
        W.view(torch.int16), W if G is None else G, largest, largest_gradient, counts, sums, N, copies, BN=1024,
        **options,
    )  # fmt: skip
    _gather[(SIZE // 512,)](
        all_values, values, largest, largest_gradient, counts, sums, values if G is None else gradients, N, copies,
        BN=512, **options,
    )  # fmt: skip
    return Population(values, counts, gradients)


def _largest(X: Tensor) -> Tensor:
    return torch.linalg.vector_norm(X, torch.inf, dtype=X.dtype)  # or autocast would make it float32


def look_up(W: Tensor, table: Tensor) -> Tensor:
    W_tilde = torch.empty_like(W)
    grid, options = _grid(W.numel())
    _look_up[grid](W.view(torch.int16), table, W_tilde, W.numel(), **options)
    return W_tilde


def look_up_gradient(W: Tensor, G: Tensor, slopes: Tensor, offsets: Tensor) -> Tensor:
    """dW = g slope(w) + offset(w)."""
    dW = torch.empty_like(W)
    grid, options = _grid(W.numel())
    _look_up_gradient[grid](W.view(torch.int16), G, slopes, offsets, dW, W.numel(), **options)
    return dW
