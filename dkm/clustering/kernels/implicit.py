"""The linear system behind gradient="implicit": the gradient of a fixed point (IDKM), in a few backward passes."""

from collections.abc import Callable

import torch
from torch import Tensor

PASSES = 8  # products with J^T, of which each takes a backward pass through one iteration


def solve(v: Tensor, transposed: Callable[[Tensor], Tensor]) -> Tensor:
    """The u, shaped like v, that solves `u = v + J^T u`, as well as PASSES products allow.

    `transposed(u)` is `J^T u`, where J is the derivative of one iteration by the centroids.  The method is that of
    generalised conjugate residuals: after each product the residual is the smallest that the products so far allow, and
    J need not be symmetric.  No value is read on the host, so a GPU is not stalled.
    """
    u, residual = torch.zeros_like(v), v
    directions: list[tuple[Tensor, Tensor, Tensor]] = []  # p, q = p - J^T p, and |q|^2; the q are orthogonal
    for _ in range(PASSES):
        p = residual
        q = p - transposed(p)
        for p_before, q_before, norm in directions:
            share = (q * q_before).sum() / norm
            p, q = p - share * p_before, q - share * q_before
        norm = q.square().sum().clamp(min=torch.finfo(v.dtype).tiny)  # q is zero once the system is solved exactly
        share = (residual * q).sum() / norm
        u, residual = u + share * p, residual - share * q
        directions.append((p, q, norm))
    return u
