"""What the kernels need: which GPU, which Triton, which weights."""

import functools

import torch
import triton
from torch import Tensor

from . import tiles

MAX_D = 64


@functools.cache
def runs_here() -> bool:
    """Whether this Triton has cooperative launches, whose programs may wait for one another, for an NVIDIA GPU."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= (3, 3) and torch.version.hip is None


def computes(W: Tensor, d: int) -> bool:
    """Whether the kernels can compute this weight with vectors of d values."""
    return W.dtype in (torch.float32, torch.bfloat16, torch.float16) and d <= MAX_D and W.numel() < 2**31


def check(W: Tensor, C: Tensor) -> None:
    """Raise ValueError unless the kernels can cluster this weight here."""
    if not (W.is_cuda or tiles.INTERPRETED):
        raise ValueError(f'impl="triton" needs a GPU, and the weight is on {W.device}: use impl="auto"')
    if not (runs_here() or tiles.INTERPRETED):
        raise ValueError(
            f'impl="triton" needs an NVIDIA GPU and Triton 3.3, which comes with PyTorch 2.7; '
            f'this is Triton {triton.__version__}: use impl="auto"'
        )
    if not computes(W, C.shape[1]):
        raise ValueError(
            f'impl="triton" computes in float32, for d up to {MAX_D} and under 2^31 weights; '
            f'got {W.dtype}, d = {C.shape[1]}, {W.numel()} weights: use impl="auto"'
        )
