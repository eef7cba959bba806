"""d = 1 in 16 bit: there are at most 65,536 different weights.

The loop runs on a table of all values, each counted as often as it occurs, and a weight then only looks its result up.
In the backward pass, the gradients of equal weights are added up first.  For large weights the cost depends neither on
the number of centroids nor on that of iterations, because the loop over the table is so much smaller.
"""

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .device.value_kernels import (
    COPIED,
    TABLE_SIZE,
    add_up_kernel,
    gather_kernel,
    look_up_gradient_kernel,
    look_up_kernel,
)

LOOK_UP = dict(BLOCK_N=4096, num_warps=8)


class Population(NamedTuple):
    """Which values a weight has, by the bits of the value; zero for values that do not occur."""

    values: Tensor  # (65536,), float32
    counts: Tensor  # int32; the first 65,536 elements count, what follows is scratch memory
    gradients: Tensor | None  # (65536,), float32: the sums of the gradients of equal weights, where there are any


def population(W: Tensor, G: Tensor | None = None) -> Population:
    """Count the values of a 16-bit weight `(N,)` and, where its gradient G `(N,)` is given, add up that."""
    N = W.numel()
    copies = max(1, N >> 19)  # together with the sums, they take a fortieth of the weight's memory
    counts = torch.zeros(TABLE_SIZE.value + copies * 2 * COPIED.value, dtype=torch.int32, device=W.device)
    # where there is no gradient, its pointers point to something that is not used
    sums = counts if G is None else torch.zeros_like(counts, dtype=torch.int64)
    largest = _largest(W)
    largest_gradient = largest if G is None else _largest(G)
    all_values = _all_values(W.dtype, W.device)
    values = torch.empty_like(all_values)
    gradients = None if G is None else torch.empty_like(values)
    common = dict(
        largest=largest,
        largest_gradient=largest_gradient,
        counts=counts,
        sums=sums,
        N=N,
        COPIES=copies,
        GRADIENTS=G is not None,
        num_warps=4,
    )
    add_up_kernel[(min(triton.cdiv(N, 1024), 8 * copies + 64),)](
        W=W.view(torch.int16), G=W if G is None else G, BLOCK_N=1024, **common
    )
    gather_kernel[(TABLE_SIZE.value // 512,)](
        all_values=all_values,
        values=values,
        gradients=values if gradients is None else gradients,
        BLOCK_N=512,
        **common,
    )
    return Population(values, counts, gradients)


def look_up(W: Tensor, table: Tensor) -> Tensor:
    """W_tilde `(N,)`: for each weight the entry of the table `(65536,)` for its value."""
    W_tilde = torch.empty_like(W)
    look_up_kernel[_look_up_grid(W)](W=W.view(torch.int16), table=table, W_tilde=W_tilde, N=W.numel(), **LOOK_UP)
    return W_tilde


def look_up_gradient(W: Tensor, G: Tensor, slopes: Tensor, offsets: Tensor) -> Tensor:
    """dW = g slopes[w] + offsets[w], with two tables `(65536,)`."""
    dW = torch.empty_like(W)
    look_up_gradient_kernel[_look_up_grid(W)](
        W=W.view(torch.int16), G=G, slopes=slopes, offsets=offsets, dW=dW, N=W.numel(), **LOOK_UP
    )
    return dW


def _look_up_grid(W: Tensor) -> tuple[int]:
    return (triton.cdiv(W.numel(), LOOK_UP["BLOCK_N"]),)


@functools.lru_cache(maxsize=8)
def _all_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """All values of a 16-bit type, in the order of their bits, as float32."""
    return torch.arange(TABLE_SIZE.value, dtype=torch.int32, device=device).to(torch.int16).view(dtype).float()


def _largest(X: Tensor) -> Tensor:
    """The largest magnitude; with a dtype, because autocast would make it a float32, and the kernel reads its bits."""
    return torch.linalg.vector_norm(X, torch.inf, dtype=X.dtype)
