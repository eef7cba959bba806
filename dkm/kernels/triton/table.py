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

from .products import dot

SIZE = 1 << 16
_PROGRAMS = 4 * 132
NEAR = tl.constexpr(2048)  # the largest values, of either sign: 16 powers of two in bfloat16, and nearly all weights


@functools.lru_cache(maxsize=8)
def _values(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(SIZE, dtype=torch.int32, device=device).to(torch.int16).view(dtype).float()


@triton.jit
def _index(W, at, N):
    return tl.load(W + at, mask=at < N, other=0).to(tl.int32) & 0xFFFF


@triton.jit
def _add_up(W, G, low, factor, counts, sums, N, GRADIENTS: tl.constexpr, NEAR: tl.constexpr, BN: tl.constexpr):
    """How often each value occurs and, in units of 1 / factor, the sum of its gradients.

    Of the values from `low` on, both are products: a value is the pair of its upper and lower 6 bits, and the sum over
    the weights of (upper one-hot) x gradient x (lower one-hot) is a 64 x 64 table of sums.  The few others are added
    one by one.  What several programs add is an integer: the result does not depend on their order.
    """
    hot = tl.arange(0, 64)
    number = tl.zeros((64, 64), tl.float32)
    total = tl.zeros((64, 64), tl.float32)
    zeros = tl.zeros((BN,), tl.int32)
    zeros_total = tl.zeros((BN,), tl.float32)
    first_value = tl.load(low)
    scale = tl.load(factor)
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    ahead = _index(W, at, N)  # read one step ahead: nothing else hides how long that takes
    g_ahead = tl.load(G + at, mask=at < N, other=0.0)
    for _ in range(tl.program_id(0) * BN, N, tl.num_programs(0) * BN):
        index = ahead
        g = g_ahead
        after = at + tl.num_programs(0) * BN
        ahead = _index(W, after, N)
        if GRADIENTS:
            g_ahead = tl.load(G + after, mask=after < N, other=0.0)
        size = index & 0x7FFF
        near = (at < N) & (size >= first_value)
        place = tl.where(near, size - first_value + (index >> 15) * NEAR, -1)
        upper = hot[:, None] == (place >> 6)[None, :]
        lower = tl.where((place & 63)[:, None] == hot[None, :], 1.0, 0.0).to(G.dtype.element_ty)
        number = dot(tl.where(upper, 1.0, 0.0).to(G.dtype.element_ty), lower, number)
        far = (at < N) & (size < first_value) & (size > 0)
        zero = (at < N) & (size < first_value) & (size == 0)
        tl.atomic_add(counts + index, 1, mask=far, sem="relaxed")
        zeros += zero.to(tl.int32)
        if GRADIENTS:
            total = dot(tl.where(upper, g.to(tl.float32)[None, :], 0.0).to(G.dtype.element_ty), lower, total)
            whole = tl.floor(g.to(tl.float32) * scale + 0.5).to(tl.int64)
            tl.atomic_add(sums + index, whole, mask=far, sem="relaxed")
            zeros_total += tl.where(zero, g.to(tl.float32), 0.0)
        at = after
    place = hot[:, None] * 64 + hot[None, :]
    index = place % NEAR + first_value + (place // NEAR) * 32768
    tl.atomic_add(counts + index, number.to(tl.int32), mask=number > 0, sem="relaxed")
    tl.atomic_add(counts, tl.sum(zeros, 0), sem="relaxed")
    if GRADIENTS:
        whole = tl.floor(total * scale + 0.5).to(tl.int64)
        tl.atomic_add(sums + index, whole, mask=number > 0, sem="relaxed")
        tl.atomic_add(sums, tl.floor(tl.sum(zeros_total, 0) * scale + 0.5).to(tl.int64), sem="relaxed")


@triton.jit
def _look_up(W, table, W_tilde, N, BN: tl.constexpr):
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    value = tl.load(table + _index(W, at, N), mask=at < N, other=0.0)
    tl.store(W_tilde + at, value.to(W_tilde.dtype.element_ty), mask=at < N)


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
    counts: Tensor  # int32
    gradients: Tensor | None  # float32: those of equal weights added up


def population(W: Tensor, G: Tensor | None = None) -> Population:
    N = W.numel()
    counts = torch.zeros(SIZE, dtype=torch.int32, device=W.device)
    sums = torch.zeros(SIZE if G is not None else 1, dtype=torch.int64, device=W.device)
    low = (_largest(W).view(torch.int16).int() - (NEAR.value - 1)).clamp(min=0)
    factor = torch.ones((), device=W.device)
    if G is not None:
        # A power of two such that no sum overflows: the error is 2^-37 of the largest gradient, for 2^25 weights.
        room = 2.0**61 / N / _largest(G).double().clamp(min=1e-300)
        factor = torch.exp2(torch.floor(torch.log2(room))).clamp(max=2.0**120).float()
    _add_up[(min(triton.cdiv(N, 256), _PROGRAMS),)](
        W.view(torch.int16), W if G is None else G, low, factor, counts, sums, N, GRADIENTS=G is not None,
        NEAR=NEAR.value, BN=256, num_warps=4,
    )  # fmt: skip
    # what does not occur may be infinite, or so large that its square is
    values = torch.where(counts > 0, _values(W.dtype, W.device), 0.0)
    return Population(values, counts, None if G is None else (sums.double() / factor).float())


def _largest(X: Tensor) -> Tensor:
    return torch.linalg.vector_norm(X, torch.inf)


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
