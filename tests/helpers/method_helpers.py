"""A weight, a gradient, a small network and the loop of the paper, for the tests of the methods."""

import re

import torch
from torch import Tensor, nn

from dkm import Clustered
from dkm.modelling.methods import METHODS

OTHERS = tuple(METHODS)[1:]  # all but DKM


CONFIGURATIONS = [(3, 1), (2, 3), (4, 2)]  # 85 weights: 3 does not divide them, 2 neither


def make_weight(dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn(5, 17, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype))


def make_gradient(weight: Tensor) -> Tensor:
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(weight.dtype)


def backward(W_tilde: Tensor, weight: Tensor) -> Tensor:
    return torch.autograd.grad(W_tilde, weight, make_gradient(weight))[0]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def moved(method: Clustered) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of `cluster`: centroids that are not yet those of the weight, at some step."""
    C = method.C + 0.3 * torch.randn(method.C.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return C, torch.tensor(7)


def literal(V: Tensor, C: Tensor, eps: float, max_iter: int, attention):
    """The loop of the paper, with an attention of one's own: A, C, C_next and the number of iterations."""
    for iteration in range(1, max_iter + 1):
        A = attention(V, C, iteration)
        mass = A.sum(0)[:, None]
        C_next = torch.where(mass > 0, A.T @ V / mass.clamp(min=1e-300), C)
        if iteration == max_iter or (C_next - C).abs().max() <= eps:
            return A, C, C_next, iteration
        C = C_next


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 30), nn.Linear(30, 5))


PLAN = "0:3, 3:4/3"


def within(method: str, plan: str) -> str:
    """The plan with as many bits and dimensions of each tensor as the method can have."""
    kind = METHODS[method]

    def limited(found: re.Match) -> str:
        bits, dim = min(int(found[1]), kind.most_bits), 1 if kind.only_scalars else int(found[2] or 1)
        return f":{bits}/{dim}"

    return re.sub(r":(\d+)(?:/(\d+))?", limited, plan)


def make(method: str, weight: Tensor, **options) -> Clustered:
    """The method on a weight, with 3 bits for 2 weights if it can."""
    bits, dim = within(method, ":3/2").removeprefix(":").split("/")
    clustered = METHODS[method](weight, int(bits), int(dim), steps=10, **options)
    for need in clustered.needs:
        clustered.give(need)
    return clustered
