"""The frame in which `products` computes: an origin and a unit, (center, unit), the same for a whole pass.

A vector or a centroid v becomes x = (v - center) / unit.  In this frame no coordinate of a centroid is much over 256,
so that its whole part fits into a bfloat16.

    center   `(1, WIDTH)`: a coordinate is the mean of the centroids where these lie close together and far from zero.
             Then the subtraction is exact, as it is between numbers of one sign and similar size.  Elsewhere it is 0:
             rounding the weights would be worse than what products of large numbers lose.
    unit     a power of two, so that the division is exact

Both are found from up to `4096 / WIDTH` of the centroids that the pass starts from.  They need not be the best:
coordinates of more than 256 cost precision only for vectors which are far from all centroids.
"""

import triton
import triton.language as tl

from .steps import load_rows


@triton.jit
def find_frame(C, K, STRIDE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """The frame for the centroids C, of which rows are STRIDE apart."""
    ROWS: tl.constexpr = 4096 // WIDTH
    c = load_rows(C, tl.arange(0, ROWS) * K // ROWS, K, STRIDE, D, WIDTH)
    mean = tl.sum(c, 0)[None, :] / ROWS
    spread = tl.max(tl.abs(c - mean), 0)[None, :]
    center = tl.where(2 * spread <= tl.abs(mean), mean, 0.0)
    largest = tl.max(tl.max(tl.abs(c - center), 1), 0)
    # 2^(e - 7) for a largest value from 2^e to 2^(e + 1)
    bits = tl.maximum(largest, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000
    return center, (bits - (7 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def inverse(unit):
    """1 / unit, of a power of two, without rounding: a division may round."""
    return ((254 << 23) - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def store_frame(frame, center, unit, D_SEGMENT: tl.constexpr, WIDTH: tl.constexpr):
    """Into the D_SEGMENT + 1 values at `frame`."""
    column = tl.arange(0, WIDTH)[None, :]
    tl.store(frame + column, center, mask=column < D_SEGMENT)
    tl.store(frame + D_SEGMENT, unit)


@triton.jit
def load_frame(frame, D: tl.constexpr, D_SEGMENT: tl.constexpr, WIDTH: tl.constexpr):
    """The frame that was stored; the center is zero past column D."""
    column = tl.arange(0, WIDTH)[None, :]
    return tl.load(frame + column, mask=column < D, other=0.0), tl.load(frame + D_SEGMENT)
