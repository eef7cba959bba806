"""The gradient at the fixed point: IDKM's linear system, in a few backward passes."""

from collections.abc import Callable

import torch
from torch import Tensor

PASSES = 8


def solve(v: Tensor, transposed: Callable[[Tensor], Tensor]) -> Tensor:
    """`u = v + J^T u`, where `transposed(u)` is `J^T u`: like v, in PASSES products.

    Generalised conjugate residuals: each product makes the residual as small as the products so far allow, for
    a J of any symmetry.  Nothing is read on the host.
    """
    u, residual = torch.zeros_like(v), v
    directions: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(PASSES):
        p = residual
        q = p - transposed(p)
        for p_before, q_before, norm in directions:
            share = (q * q_before).sum() / norm
            p, q = p - share * p_before, q - share * q_before
        norm = q.square().sum().clamp(min=torch.finfo(v.dtype).tiny)  # all zero once it is solved exactly
        share = (residual * q).sum() / norm
        u, residual = u + share * p, residual - share * q
        directions.append((p, q, norm))
    return u
