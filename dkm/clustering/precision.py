"""Which tensors can be clustered, and in what precision results are stored.  Tensors only, no model."""

import math

import torch
from torch import Tensor

MAX_BITS = 12
FLOAT8 = torch.float8_e4m3fn  # of centroids of 8 bits
MAX_EXPONENT = 112  # weights from 2^-112 to 2^112 (2e-34 to 5e33) can be clustered
LARGEST_EXPONENT = 120  # of the power of two that a weight is divided by
# A weight whose root mean square is 2^e is clustered as it is for e in this range, and otherwise divided by 2^e first:
# squares of smaller or larger values leave float32, and centroids leave float16.
PLAIN_EXPONENTS = range(-12, 13)


def check_bits_dim(bits: int, dim: int) -> None:
    """Raise ValueError unless these are numbers of bits and dimensions that a weight can be clustered with."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits must be an integer from 1 to {MAX_BITS}, got {bits!r}")
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
        raise ValueError(f"dim must be an integer of at least 1, got {dim!r}")


def check_weight(weight: Tensor, name: str = "the weight") -> None:
    """Raise unless the tensor can be clustered: floating point, not empty, finite, of a scale that float32 has."""
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise TypeError(f"{name} is {weight.dtype}: only float64, float32, bfloat16 and float16 can be clustered")
    if weight.numel() == 0:
        raise ValueError(f"{name} is empty, shape {tuple(weight.shape)}: there is nothing to cluster")
    if weight.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values: load the weights before compressing them")
    largest = float(weight.detach().abs().amax())  # the maximum of anything and NaN is NaN
    if not math.isfinite(largest):
        raise ValueError(f"{name} holds NaN or infinite values: repair the weights before compressing them")
    if largest and not 2.0**-MAX_EXPONENT <= largest < 2.0**MAX_EXPONENT:
        raise ValueError(f"{name} holds values up to {largest:.3g}, beyond what float32 can cluster: scale or keep it")


def exponent_of(values: Tensor) -> int:
    """e, such that 2^e is the power of two nearest to the root mean square of the values; 0 where all are zero.

    Limited to what float32 can multiply by.
    """
    mean_square = float(values.detach().double().square().mean())
    exponent = round(math.log2(mean_square) / 2) if mean_square > 0 else 0
    return max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, exponent))


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit dtype that holds the centroids of a weight of this dtype."""
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16


def stored_centroids(C: Tensor, dtype: torch.dtype, float8: bool = False) -> Tensor:
    """Centroids of a weight of this dtype in the precision of the file."""
    if float8:  # beyond its range, the conversion gives NaN
        largest = torch.finfo(FLOAT8).max
        return C.clamp(-largest, largest).to(FLOAT8)
    return C.to(stored_dtype(dtype))


def check_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError unless parameters can be rounded to this dtype."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype such as torch.float16, got {dtype!r}")


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter that is not clustered, in the precision of the file.

    A tensor wider than `dtype` is rounded, provided that this moves no value by more than the rounding of `dtype` moves
    the largest one (2^-11 of it for float16).  Otherwise, for values that are too large or too small for `dtype`, the
    tensor stays as it is, and so does one of 16 bit or of integers.
    """
    if not tensor.is_floating_point() or tensor.element_size() <= torch.empty((), dtype=dtype).element_size():
        return tensor
    narrow, finite = tensor.to(dtype), tensor.isfinite()
    moved = torch.where(finite, narrow.to(tensor.dtype) - tensor, 0).abs()  # infinite where dtype overflows
    sizes = torch.where(finite, tensor, 0).abs()
    allowed = sizes.amax() * (torch.finfo(dtype).eps / 2) if tensor.numel() else sizes
    return narrow if bool((moved <= allowed).all()) else tensor
