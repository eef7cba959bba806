"""The kernel of `..product`, which explains it.

M, N, K        rows of x, rows of the weight, columns of both
BITS, DIM      of a code, and of a vector
SPLIT          columns of a program: K is divided among programs, each of which writes sums of its own
TILES          the groups are tiles of the matrix; otherwise runs of `run` consecutive weights, which have `vectors`
               codes each
WIDE           whether a bit's place in the codes needs 64 bits
COMPUTE        the dtype in which centroids, scales and the power of two are multiplied
SOURCE         the dtype of the tensor in the file, to which that is rounded
"""

import triton
import triton.language as tl


@triton.jit
def _place(n, k, K, N, run, vectors, tile_rows, across, DIM: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr):
    """Of the weights in these rows n and columns k: the number of the code, the group, the place in the vector."""
    if TILES:  # of tile_rows x run weights; no vector has weights of two rows
        band, row, tile, column = n // tile_rows, n % tile_rows, k // run, k % run
        tall = tl.minimum(N - band * tile_rows, tile_rows)
        wide = tl.minimum(K - tile * run, run)
        number = (band * tile_rows * K + tile * run * tall + row * wide + column - column % DIM) // DIM
        group = band * across + tile
        offset = column % DIM
    else:
        flat = n * K + k
        if GROUPS:
            group = flat // run
            flat -= group * run
            number = group * vectors + flat // DIM
        else:
            group = flat * 0
            number = flat // DIM
        offset = flat % DIM
    return number, group, offset


@triton.jit
def _code(codes, number, there, code_bytes, BITS: tl.constexpr):
    """The code of this number, from the one to three bytes that it is in."""
    bit = number * BITS
    byte = bit >> 3
    code = tl.load(codes + byte, mask=there, other=0).to(tl.int32)
    if 8 % BITS:
        code |= tl.load(codes + byte + 1, mask=there & (byte + 1 < code_bytes), other=0).to(tl.int32) << 8
    if BITS > 9:
        code |= tl.load(codes + byte + 2, mask=there & (byte + 2 < code_bytes), other=0).to(tl.int32) << 16
    return (code >> (bit & 7).to(tl.int32)) & ((1 << BITS) - 1)


@triton.jit
def _rounded(w, SOURCE: tl.constexpr):
    """The nearest value of this dtype, of two equally near the even one."""
    if SOURCE == tl.bfloat16:  # by its bits, because the interpreter's conversion cuts them off
        bits = w.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    else:
        return w.to(SOURCE)


@triton.jit
def product_kernel(
    x, codes, table, scales, sums, M, N, K, run, vectors, tile_rows, across, code_bytes, factor, SPLIT,
    BITS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr, SCALED: tl.constexpr,
    WIDE: tl.constexpr, COMPUTE: tl.constexpr, SOURCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """sums[split, m, n] = sum over the columns of this split of x[m, k] weight[n, k]."""
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, K)
    rows = offs_n.to(tl.int64) if WIDE else offs_n
    if SCALED:
        scale = tl.load(scales + offs_n, mask=offs_n < N, other=1.0).to(COMPUTE)
    acc = tl.zeros((BLOCK_M, BLOCK_N), sums.dtype.element_ty)
    for first in range(begin, end, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        there = (offs_n < N)[:, None] & (offs_k < end)[None, :]
        number, group, offset = _place(
            n=rows[:, None],
            k=offs_k[None, :],
            K=K,
            N=N,
            run=run,
            vectors=vectors,
            tile_rows=tile_rows,
            across=across,
            DIM=DIM,
            GROUPS=GROUPS,
            TILES=TILES,
        )
        code = _code(codes, number, there, code_bytes, BITS)
        w = tl.load(table + ((group << BITS) + code) * DIM + offset, mask=there, other=0.0).to(COMPUTE)
        if SCALED:
            w *= scale[:, None]
        w = _rounded(w * factor, SOURCE)  # x may have another dtype
        v = tl.load(
            x + offs_m[:, None].to(tl.int64) * K + offs_k[None, :],
            mask=(offs_m < M)[:, None] & (offs_k < end)[None, :],
            other=0.0,
        )
        acc = tl.dot(v, tl.trans(w.to(v.dtype)), acc, input_precision="ieee", out_dtype=sums.dtype.element_ty)
    at = (split * M + offs_m)[:, None].to(tl.int64) * N + offs_n[None, :]
    tl.store(sums + at, acc, mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])
