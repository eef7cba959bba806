"""Section 3 of the paper, literally: the attention A `(n, k)` is a tensor, and autograd differentiates.

It takes O(iterations * n * k) memory.  Every other implementation is tested against this one.
"""

import torch
from torch import Tensor

from ..options import ClusterOptions


def distance(W: Tensor, C: Tensor, metric: str) -> Tensor:
    """The squared or the plain Euclidean distance of every vector to every centroid: `(n, d), (k, d) -> (n, k)`."""
    difference = W[:, None, :] - C[None, :, :]
    if metric == "sqeuclidean":
        return difference.square().sum(-1)
    return torch.linalg.vector_norm(difference, dim=-1)  # unlike that of sqrt, its gradient at 0 is 0 and not NaN


def no_mass(dtype: torch.dtype) -> float:
    """The attention mass up to which a centroid counts as empty: below it, products of mass and weight underflow."""
    info = torch.finfo(dtype)
    return info.tiny / info.eps


def cluster(W: Tensor, C: Tensor, tau: Tensor, options: ClusterOptions) -> tuple[Tensor, Tensor, Tensor]:
    """W_tilde `(n, d)`, the next centroids `(k, d)` and the number of iterations, from W `(n, d)` and C `(k, d)`.

    W_tilde is differentiable in W, C and tau, as `options.gradient` says.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and options.gradient == "unrolled"):
        for iteration in range(1, options.max_iter + 1):
            A, C_next = update(W, C, tau, options.metric)
            if iteration == options.max_iter or (C_next - C).abs().max() <= options.eps:
                break
            C = C_next
    if options.gradient != "unrolled":
        C = C.detach()
        if options.gradient == "implicit":
            C = _fixed_point(W, C, tau, options.metric)
        A, _ = update(W, C, tau, options.metric)
    return A @ C, C_next.detach(), torch.tensor(iteration)


def update(W: Tensor, C: Tensor, tau: Tensor, metric: str) -> tuple[Tensor, Tensor]:
    """One iteration: the attention `(n, k)`, and the centroids `(k, d)` that follow from it; an empty one stays."""
    A = torch.softmax(-distance(W, C, metric) / tau, dim=1)
    mass = A.sum(0)[:, None]
    empty = mass <= no_mass(W.dtype)
    return A, torch.where(empty, C, (A.T @ W) / torch.where(empty, 1.0, mass))


def _fixed_point(W: Tensor, C: Tensor, tau: Tensor, metric: str) -> Tensor:
    """C, with the gradient that it has as the solution of C = update(W, C, tau), a function of W and tau.

    The gradient is exact: for the gradient v that arrives, a hook solves u = v + J^T u, and u goes on to W and tau.
    """
    A, C_next = update(W, C, tau, metric)
    attached = C + (C_next - C_next.detach())
    if not attached.requires_grad:
        return attached
    empty = A.detach().sum(0)[:, None, None, None] <= no_mass(W.dtype)
    W, tau = W.detach(), tau.detach()

    def solve(v: Tensor) -> Tensor:
        J = torch.autograd.functional.jacobian(lambda c: update(W, c, tau, metric)[1], C)
        J = torch.where(empty, 0.0, J).reshape(C.numel(), C.numel())  # an empty centroid does not depend on anything
        return torch.linalg.solve(torch.eye(len(J), dtype=J.dtype, device=J.device) - J.T, v.reshape(-1)).view_as(C)

    attached.register_hook(solve)
    return attached
