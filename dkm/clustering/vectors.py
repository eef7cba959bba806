"""A weight as vectors: flattened contiguously, across kernel and channel boundaries."""

import math

import torch
from torch import Tensor


def to_vectors(weight: Tensor, dim: int) -> Tensor:
    """Any shape -> `(ceil(numel / dim), dim)`: flattened contiguously, with zeros after the last value if needed."""
    flat = weight.reshape(-1)
    if missing := -flat.numel() % dim:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(-1, dim)


def from_vectors(W: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `to_vectors`: drops the zeros that were added."""
    return W.reshape(-1)[: math.prod(shape)].view(shape)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that weights of this dtype are clustered in, and that their centroids have: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def in_memory(X: Tensor) -> bool:
    """Whether the values are in the CPU's memory, where compiled code and numpy can read them: not for torch.compile,
    and not inside torch.func.grad."""
    if X.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None
