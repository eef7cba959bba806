"""The tables of centroids that `products` reads; its head explains their rows."""

import triton
import triton.language as tl

from .products import NEVER, split


@triton.jit
def write_table(
    table, values, offset, offs_k, K_PADDED, D: tl.constexpr, D_SEGMENT: tl.constexpr, ROW_WIDTH: tl.constexpr
):
    """Write rows `offs_k`: of the `(GROUP_K, ROW_WIDTH)` values the first D columns, and the `(GROUP_K, 1)` offsets."""
    column = tl.arange(0, ROW_WIDTH)[None, :]
    high, middle, low = split(tl.where(column < D, values, 0.0))
    # the offset's three parts are in three columns, each of which meets a one
    offset_high, offset_middle, offset_low = split(offset)
    offset = tl.where(column == 0, offset_high, tl.where(column == 1, offset_middle, offset_low))
    offset = tl.where(column < 3, offset.to(tl.float32), 0.0).to(tl.bfloat16)
    mask = (offs_k < K_PADDED)[:, None] & (column < D_SEGMENT)
    ptrs = table + offs_k[:, None] * (8 * D_SEGMENT) + column
    _write_half(ptrs, high, low, middle, offset, mask, D_SEGMENT)
    _write_half(ptrs + 4 * D_SEGMENT, high, middle, offset, high, mask, D_SEGMENT)


@triton.jit
def _write_half(ptrs, a, b, c, d, mask, D_SEGMENT: tl.constexpr):
    """Four segments, one after the other."""
    tl.store(ptrs, a, mask=mask)
    tl.store(ptrs + D_SEGMENT, b, mask=mask)
    tl.store(ptrs + 2 * D_SEGMENT, c, mask=mask)
    tl.store(ptrs + 3 * D_SEGMENT, d, mask=mask)


@triton.jit
def write_logit_table(
    logit_table, C, offs_k, K, K_PADDED, scale, D: tl.constexpr, D_SEGMENT: tl.constexpr, ROW_WIDTH: tl.constexpr
):
    """The rows `offs_k` of the table for logits, from `(GROUP_K, ROW_WIDTH)` centroids."""
    C = tl.where((tl.arange(0, ROW_WIDTH) < D)[None, :], C, 0.0)
    offset = tl.where((offs_k < K)[:, None], tl.sum(C * C, 1)[:, None] * -scale, NEVER)
    write_table(logit_table, C * (2 * scale), offset, offs_k, K_PADDED, D, D_SEGMENT, ROW_WIDTH)
