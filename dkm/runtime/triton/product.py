"""`x @ weight.T` from packed codes, for few rows of x: nothing of the weight is written to memory.

A program takes some rows of the weight and a part of their columns.  It reads the codes, which lie side by side, once;
looks the centroids up in a table, which is small and stays in the cache of the chip; and multiplies on the tensor
cores.  With one row of x there are few rows of results, so the columns are divided among programs as well, and their
sums are added up afterwards, always in the same order.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...clustering.vectors import compute_dtype
from ..packed import PackedWeight
from .device.product import product_kernel

MOST_ROWS = 64  # of x; with more of them, decoding first costs less
BLOCK_N, BLOCK_K = 32, 64
DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
WAVES = 4  # programs for each multiprocessor


def computes(x: Tensor, weight: PackedWeight) -> bool:
    """Whether the kernel can compute this product, which must need no gradient."""
    return (
        x.dtype == weight.dtype
        and x.device == weight.device
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and len(weight.shape) == 2
        and 0 < x.numel() <= MOST_ROWS * weight.pitch
        and x.shape[-1:] == weight.shape[1:]
        and not (torch.is_grad_enabled() and x.requires_grad)
        and not torch.is_autocast_enabled(x.device.type)
        and not weight.straddles()
        and weight.positions is None  # of outliers, which are no centroids
    )


def product(x: Tensor, weight: PackedWeight) -> Tensor:
    """`(..., K)` times the transpose of `(N, K)` -> `(..., N)`, in the dtype of x."""
    (N, K), own, spec = weight.shape, weight.grouping, weight.spec
    rows = x.reshape(-1, K).contiguous()
    M = len(rows)
    splits = _splits(x.device, N, K)
    table = weight.centroids if weight.centroids.element_size() == 2 else weight.centroids.to(torch.float16)
    sums = torch.empty(splits, M, N, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        product_kernel[triton.cdiv(N, BLOCK_N), splits](
            x=rows,
            codes=weight.codes,
            table=table,
            scales=table if weight.scales is None else weight.scales,
            sums=sums,
            M=M,
            N=N,
            K=K,
            run=own.tile_columns,
            vectors=own.vectors,
            tile_rows=own.tile_rows,
            across=own.across,
            code_bytes=len(weight.codes),
            factor=2.0**weight.exponent,
            SPLIT=triton.cdiv(triton.cdiv(K, splits), BLOCK_K) * BLOCK_K,
            BITS=spec.bits,
            DIM=spec.dim,
            GROUPS=own.count > 1,
            TILES=own.rows > 1,
            SCALED=weight.scales is not None,
            WIDE=N * K * max(spec.bits, spec.dim) >= 2**31 or table.numel() >= 2**31,
            COMPUTE=DTYPES[compute_dtype(weight.source)],
            SOURCE=DTYPES[weight.source],
            BLOCK_M=max(16, triton.next_power_of_2(M)),
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            num_warps=4,
        )
    return (sums[0] if splits == 1 else sums.sum(0)).to(x.dtype).view(*x.shape[:-1], N)


def _splits(device: torch.device, N: int, K: int) -> int:
    """Among how many programs the columns are divided, so that there are enough of them for the whole chip."""
    wanted = WAVES * _multiprocessors(device) // triton.cdiv(N, BLOCK_N)
    splits = max(1, min(wanted, triton.cdiv(K, 4 * BLOCK_K)))
    return triton.cdiv(K, triton.cdiv(triton.cdiv(K, splits), BLOCK_K) * BLOCK_K)  # none of them is empty


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
