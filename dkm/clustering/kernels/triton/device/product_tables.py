"""The tables of centroids that `products` reads; its head explains their rows."""

import triton
import triton.language as tl

from .frame import inverse
from .product_rows import NEVER, SEGMENTS, in_columns, split, split_whole


@triton.jit
def write_H_table(table, h, c_next, center, unit, offs_k, K_PADDED, D_SEGMENT: tl.constexpr, ROW_WIDTH: tl.constexpr):
    """The rows `offs_k` of the H table, from `(GROUP_K, ROW_WIDTH)` h and c'; both are zero past column D."""
    h = h * inverse(unit)
    offset = -tl.sum(h * (c_next - center), 1)[:, None] * inverse(unit)
    high, middle, low = split(h)
    offsets = in_columns(offset, 0, ROW_WIDTH)
    _write_rows(
        table=table, high=high, middle=middle, low=low, first=offsets, second=offsets, offs_k=offs_k,
        K_PADDED=K_PADDED, D_SEGMENT=D_SEGMENT, ROW_WIDTH=ROW_WIDTH,
    )  # fmt: skip


@triton.jit
def write_logit_table(
    table, C, center, unit, offs_k, K, K_PADDED, D: tl.constexpr, D_SEGMENT: tl.constexpr, ROW_WIDTH: tl.constexpr
):
    """The rows `offs_k` of the logit table, from `(GROUP_K, ROW_WIDTH)` centroids."""
    column = tl.arange(0, ROW_WIDTH)[None, :]
    x = tl.where(column < D, (C - center) * inverse(unit), 0.0)
    high, middle, low = split_whole(x)
    whole = high.to(tl.float32)
    rest = x - whole
    exists = (offs_k < K)[:, None]
    offset = tl.where(exists, tl.sum(whole * whole, 1)[:, None] * -0.5, NEVER)
    # |c|^2 - |whole|^2 = rest . (c + whole)
    offset_rest = tl.where(exists, tl.sum(rest * (x + whole), 1)[:, None] * -0.5, 0.0)
    one = tl.where(column == 0, 1.0, in_columns(offset_rest, 3, ROW_WIDTH))
    offset_and_ones = tl.where((column >= 3) & (column < 6), 1.0, in_columns(offset, 0, ROW_WIDTH))
    _write_rows(
        table=table, high=high, middle=middle, low=low, first=one, second=offset_and_ones, offs_k=offs_k,
        K_PADDED=K_PADDED, D_SEGMENT=D_SEGMENT, ROW_WIDTH=ROW_WIDTH,
    )  # fmt: skip


@triton.jit
def _write_rows(
    table, high, middle, low, first, second, offs_k, K_PADDED, D_SEGMENT: tl.constexpr, ROW_WIDTH: tl.constexpr
):
    """The ten segments of the rows `offs_k`; `first` and `second` are what stands beside the three parts.  They are
    float32, of which the table of bfloat16 loses nothing."""
    column = tl.arange(0, ROW_WIDTH)[None, :]
    mask = (offs_k < K_PADDED)[:, None] & (column < D_SEGMENT)
    ptrs = table + offs_k[:, None] * (SEGMENTS * D_SEGMENT) + column
    _write_four(ptrs, high, low, middle, first, mask, D_SEGMENT)
    _write_four(ptrs + 4 * D_SEGMENT, high, middle, middle, low, mask, D_SEGMENT)
    tl.store(ptrs + 8 * D_SEGMENT, second, mask=mask)
    tl.store(ptrs + 9 * D_SEGMENT, high, mask=mask)


@triton.jit
def _write_four(ptrs, a, b, c, d, mask, D_SEGMENT: tl.constexpr):
    """Four segments, one after the other."""
    tl.store(ptrs, a, mask=mask)
    tl.store(ptrs + D_SEGMENT, b, mask=mask)
    tl.store(ptrs + 2 * D_SEGMENT, c, mask=mask)
    tl.store(ptrs + 3 * D_SEGMENT, d, mask=mask)
