"""The linear system behind gradient="implicit": the gradient of a fixed point (IDKM), in a few backward passes."""

from collections.abc import Callable

import torch
from torch import Tensor

PASSES = 8  # products with J^T, of which each takes a backward pass through one iteration


def solve(v: Tensor, transposed: Callable[[Tensor], Tensor]) -> Tensor:
    """The u, shaped like v, that solves `u = v + J^T u`, as well as PASSES products allow.

    v is `(k, d)`, or `(groups, k, d)` for as many systems that have nothing to do with one another.

    `transposed(u)` is `J^T u`, where J is the derivative of one iteration by the centroids.  The method is that of
    generalised conjugate residuals: after each product the residual is the smallest that the products so far allow, and
    J need not be symmetric.  No value is read on the host, so a GPU is not stalled.
    """

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum((-2, -1), keepdim=True)

    u, residual = torch.zeros_like(v), v
    directions: list[tuple[Tensor, Tensor, Tensor]] = []  # p, q = p - J^T p, and |q|^2; the q are orthogonal
    for _ in range(PASSES):
        p = residual
        q = p - transposed(p)
        for p_before, q_before, norm in directions:
            share = dot(q, q_before) / norm
            p, q = p - share * p_before, q - share * q_before
        norm = dot(q, q).clamp(min=torch.finfo(v.dtype).tiny)  # q is zero once the system is solved exactly
        share = dot(residual, q) / norm
        u, residual = u + share * p, residual - share * q
        directions.append((p, q, norm))
    return u
