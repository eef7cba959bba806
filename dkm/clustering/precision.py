"""Which tensors can be clustered, and in what precision results are stored.  Tensors only, no model."""

import math

import torch
from torch import Tensor

MAX_BITS = 12


def check_bits_dim(bits: int, dim: int) -> None:
    """Raise ValueError unless these are numbers of bits and dimensions that a weight can be clustered with."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits must be an integer from 1 to {MAX_BITS}, got {bits!r}")
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
        raise ValueError(f"dim must be an integer of at least 1, got {dim!r}")


def check_weight(weight: Tensor, name: str = "the weight") -> None:
    """Raise unless the tensor can be clustered: floating point, not empty, finite, within 16-bit range."""
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise TypeError(f"{name} is {weight.dtype}: only float64, float32, bfloat16 and float16 can be clustered")
    if weight.numel() == 0:
        raise ValueError(f"{name} is empty, shape {tuple(weight.shape)}: there is nothing to cluster")
    if weight.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values: load the weights before compressing them")
    largest = float(weight.detach().abs().amax())  # the maximum of anything and NaN is NaN
    if not math.isfinite(largest):
        raise ValueError(f"{name} holds NaN or infinite values: repair the weights before compressing them")
    if largest > torch.finfo(stored_dtype(weight.dtype)).max:
        raise ValueError(f"{name} holds values up to {largest:.3g}, beyond the range of 16-bit centroids: keep it")


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit dtype that holds the centroids of a weight of this dtype."""
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16


def check_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError unless parameters can be rounded to this dtype."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype such as torch.float16, got {dtype!r}")


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter that is not clustered, in the precision of the file.

    A tensor wider than `dtype` is rounded.  One that `dtype` cannot hold (overflow) stays as it is, and so
    does one of 16 bit or of integers.
    """
    if not tensor.is_floating_point() or tensor.element_size() <= torch.empty((), dtype=dtype).element_size():
        return tensor
    narrow = tensor.to(dtype)
    return tensor if bool((narrow.isfinite() != tensor.isfinite()).any()) else narrow
