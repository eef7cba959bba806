"""The rows of bfloat16 whose products on the tensor cores are as exact as those of float32.

The tensor cores multiply bfloat16 and add float32.  A float32 is the sum of three bfloat16, called high, middle and
low, and of the nine products of two such sums all but low times low matter.  So a vector and a centroid become rows of
ten segments with D_SEGMENT columns each:

    [ low  | high | middle | ones ]  [ middle | high   | low    | middle ]  [ ones, square | high ]    a vector
    [ high | low  | middle | rest ]  [ high   | middle | middle | low    ]  [ offset, ones | high ]    a centroid

The rows of the centroids are written to a table once per iteration (`product_tables.py`).  The product of a vector's
row with a centroid's row is the scalar product of the two plus the centroid's offset, its rest, and the vector's
square: each of these is split in three as well, and meets three ones.

All is in the frame of `frame.py`: x is a vector or a centroid in it, and no coordinate of a centroid is much over 256.
There are two kinds of tables:

    the logit table   x of a centroid, with the offset -|x|^2 / 2: a product is minus half the squared distance, but for
                      a small number per vector; times `logit_scale` it is a logit in units of log 2
    the H table       h / unit, with the offset -h . (c' - center) / unit^2, and zeros for the rest and for ones: a
                      product is dA of an update, over unit^2

A squared distance is a small difference of large numbers.  So the high part of an x is its whole part, whose squares
and products add up without rounding, in the tensor cores too.  The last two segments come first, in which the offset
and the square are those of whole parts: their product is the squared distance of the whole parts, exactly.  All other
products are small.  For dA high is the upper half of the bits, and the small products come first, because the tensor
cores cut off what does not fit into their sum.

Sums over centroids multiply the attention, split in three, with the first four segments of a table.  Sums over vectors
multiply it with the `terms` of the vectors, whose one adds up the attention itself:

    [ high | middle | low | one ]

In the fourth segment of a row of the logit table, a one stands beside the rest of the offset: the sums of dlogits,
which would be zero without rounding, are needed, too.
"""

import os

import triton
import triton.language as tl

from .frame import inverse

# numpy, which the interpreter computes with, has no bfloat16
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
ROUND = tl.constexpr(1.5 * 2**23)  # added and taken off again, it rounds to whole numbers
SEGMENTS = tl.constexpr(10)  # of a row of a table
NEVER = tl.constexpr(-1e30)  # the offset of the centroids that fill up the last tile: attention to them is exactly zero


@triton.jit
def _upper(x):
    """The upper 16 bits of a float32, still as a float32: cutting off is faster than rounding."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(x):
    """The nearest bfloat16, as a float32."""
    return ((x.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def split(x):
    """Three bfloat16 that add up to a float32."""
    high = _upper(x)
    rest = x - high
    middle = _upper(rest)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


@triton.jit
def split_whole(x):
    """The same, and the first of them is a whole number."""
    whole = _upper((x + ROUND) - ROUND)
    rest = x - whole
    middle = _nearest(rest)
    return whole.to(tl.bfloat16), middle.to(tl.bfloat16), _nearest(rest - middle).to(tl.bfloat16)


@triton.jit
def in_columns(x, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """`(rows, 1)` numbers as the three bfloat16 that they are split in, in the columns from FIRST on, still as float32:
    each meets a one."""
    column = tl.arange(0, WIDTH)[None, :]
    high, middle, low = split(x)
    parts = tl.where(column == FIRST, high, tl.where(column == FIRST + 1, middle, low)).to(tl.float32)
    return tl.where((column >= FIRST) & (column < FIRST + 3), parts, 0.0)


@triton.jit
def _dot(a, b, acc):
    """a b + acc."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def times(x, b):
    """x b for a float32 x, which is split in three: `(i, j), (j, l) -> (i, l)`."""
    high, middle, low = split(x)
    result = _dot(low, b, tl.zeros((x.shape[0], b.shape[1]), tl.float32))
    result = _dot(middle, b, result)
    return _dot(high, b, result)


@triton.jit
def transposed_times(x, b):
    """x^T b for a float32 x: `(j, i), (j, l) -> (i, l)`."""
    return times(tl.trans(x), b)


@triton.jit
def load_vectors(X, N, offs_n, D: tl.constexpr, D_SEGMENT: tl.constexpr):
    """The vectors `offs_n`, `(BLOCK_N, D_SEGMENT)`, zero past the last coordinate and past the last value."""
    offs_d = tl.arange(0, D_SEGMENT)[None, :]
    offs = offs_n[:, None] * D + offs_d
    return tl.load(X + offs, mask=(offs_d < D) & (offs < N), other=0.0).to(tl.float32)


@triton.jit
def load_x(W, N, offs_n, center, unit, D: tl.constexpr, D_SEGMENT: tl.constexpr):
    """The same in the frame."""
    return (load_vectors(W, N, offs_n, D, D_SEGMENT) - center) * inverse(unit)


@triton.jit
def _join(a, b):
    """`[a | b]`."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def _four_segments(a, b, c, d):
    """`[a | b | c | d]`."""
    parts = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.permute(parts, (0, 3, 2, 1)), (a.shape[0], 4 * a.shape[1]))


@triton.jit
def rows_of_x(x):
    """The vectors' rows, as four, four and two segments, and their terms:
    `(BLOCK_N, D_SEGMENT) -> (BLOCK_N, 4, 4, 2 and 4 D_SEGMENT)`."""
    high, middle, low = split_whole(x)
    zero = tl.zeros_like(x)
    i = tl.arange(0, x.shape[1])[None, :]
    one = tl.where(i == 0, 1.0, zero).to(tl.bfloat16)
    ones_for_rests = tl.where((i >= 3) & (i < 6), 1.0, zero).to(tl.bfloat16)
    whole = high.to(tl.float32)
    square = in_columns(tl.sum(whole * whole, 1)[:, None] * -0.5, 3, x.shape[1])
    return (
        _four_segments(low, high, middle, ones_for_rests),
        _four_segments(middle, high, low, middle),
        _join(tl.where(i < 3, 1.0, square).to(tl.bfloat16), high),
        _four_segments(high, middle, low, one),
    )


@triton.jit
def rows_of_g(g):
    """The same rows of g / unit, with zeros instead of ones: offsets and the attention itself are left out."""
    high, middle, low = split(g)
    zero = tl.zeros_like(high)
    return (
        _four_segments(low, high, middle, zero),
        _four_segments(middle, high, low, middle),
        _join(zero, high),
        _four_segments(high, middle, low, zero),
    )


@triton.jit
def table_four(table, offs_k, WHICH: tl.constexpr, D_SEGMENT: tl.constexpr):
    """The first (0) or the second (1) four segments of the rows of the centroids `offs_k`: `(BLOCK_K, 4 D_SEGMENT)`."""
    column = WHICH * 4 * D_SEGMENT + tl.arange(0, 4 * D_SEGMENT)
    return tl.load(table + offs_k[:, None] * (SEGMENTS * D_SEGMENT) + column[None, :])


@triton.jit
def _table_whole(table, offs_k, D_SEGMENT: tl.constexpr):
    """The last two segments: `(BLOCK_K, 2 D_SEGMENT)`."""
    column = 8 * D_SEGMENT + tl.arange(0, 2 * D_SEGMENT)
    return tl.load(table + offs_k[:, None] * (SEGMENTS * D_SEGMENT) + column[None, :])


@triton.jit
def distances_by_vector(
    first, second, whole, table, offs_k, D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Minus half the squared distances of vectors from the centroids `offs_k`, `(BLOCK_N, BLOCK_K)`, but for a small
    number per vector."""
    acc = _dot(whole, tl.trans(_table_whole(table, offs_k, D_SEGMENT)), tl.zeros((BLOCK_N, BLOCK_K), tl.float32))
    acc = _dot(second, tl.trans(table_four(table, offs_k, 1, D_SEGMENT)), acc)
    return _dot(first, tl.trans(table_four(table, offs_k, 0, D_SEGMENT)), acc)


@triton.jit
def distances_by_centroid(
    first, second, whole, table, offs_k, D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same, `(BLOCK_K, BLOCK_N)`.

    The same to the last bit: attention is their distance from the largest of `distances_by_vector`, and the rounding
    of logits is coarser than that of attention.  The tensor cores add up in the same order both ways; numpy does not.
    """
    if INTERPRETED:
        result = distances_by_vector(
            first=first, second=second, whole=whole, table=table, offs_k=offs_k, D_SEGMENT=D_SEGMENT, BLOCK_K=BLOCK_K,
            BLOCK_N=BLOCK_N,
        )  # fmt: skip
        return tl.trans(result)
    acc = _dot(_table_whole(table, offs_k, D_SEGMENT), tl.trans(whole), tl.zeros((BLOCK_K, BLOCK_N), tl.float32))
    acc = _dot(table_four(table, offs_k, 1, D_SEGMENT), tl.trans(second), acc)
    return _dot(table_four(table, offs_k, 0, D_SEGMENT), tl.trans(first), acc)


@triton.jit
def product_dA(
    first, second, whole, table, offs_k, D_SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The products of vectors with the rows of the centroids `offs_k`, `(BLOCK_N, BLOCK_K)`."""
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc = _dot(first, tl.trans(table_four(table, offs_k, 0, D_SEGMENT)), acc)
    acc = _dot(second, tl.trans(table_four(table, offs_k, 1, D_SEGMENT)), acc)
    return _dot(whole, tl.trans(_table_whole(table, offs_k, D_SEGMENT)), acc)


@triton.jit
def fold_segments(acc, D_SEGMENT: tl.constexpr):
    """From sums of rows of four segments to the values, the sum of the first three segments `(rows, D_SEGMENT)`, and to
    the sum of the first three columns of the last segment `(rows,)`: an offset, or what met the one."""
    parts = tl.reshape(acc, (acc.shape[0], 4, D_SEGMENT))
    values = tl.sum(tl.where((tl.arange(0, 4) < 3)[None, :, None], parts, 0.0), 1)
    column = tl.arange(0, 4 * D_SEGMENT)[None, :] - 3 * D_SEGMENT
    return values, tl.sum(tl.where((column >= 0) & (column < 3), acc, 0.0), 1)
