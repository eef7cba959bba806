"""Section 3 of the paper, literally: the attention is a tensor and autograd does the rest.

Memory is O(iterations * n * k).  Every other implementation is tested against this one.
"""

import torch
from torch import Tensor


def distance(W: Tensor, C: Tensor, metric: str) -> Tensor:
    """`(n, d), (k, d) -> (n, k)`: the squared or the plain Euclidean distance of every pair."""
    difference = W[:, None, :] - C[None, :, :]
    if metric == "sqeuclidean":
        return difference.square().sum(-1)
    return torch.linalg.vector_norm(difference, dim=-1)  # its gradient at 0 is 0, not NaN


def no_mass(dtype: torch.dtype) -> float:
    """Attention mass up to which a centroid counts as empty: below it, products with a weight underflow."""
    info = torch.finfo(dtype)
    return info.tiny / info.eps


def cluster(W: Tensor, C: Tensor, tau: Tensor, eps: float, max_iter: int, metric: str):
    """`(n, d), (k, d) -> (W_tilde, C_next, iterations)`, differentiable in W, C and tau."""
    for iteration in range(1, max_iter + 1):
        A = torch.softmax(-distance(W, C, metric) / tau, dim=1)
        mass = A.sum(0)[:, None]
        empty = mass <= no_mass(W.dtype)
        C_next = torch.where(empty, C, (A.T @ W) / torch.where(empty, 1.0, mass))
        if iteration == max_iter or (C_next - C).abs().max() <= eps:
            break
        C = C_next
    return A @ C, C_next.detach(), torch.tensor(iteration)
