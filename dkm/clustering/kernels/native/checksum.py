"""The sum behind a weight's checksum, compiled: `dkm/modelling/checksum.py` says what it is for."""

import ctypes

from torch import Tensor

from ...threads import spread
from .compiling import library, pointer

SPANS = 16  # that a thread adds up at a time


def weighted_sums(bits: Tensor, factors: Tensor) -> list[int] | None:
    """For each row of bits `(spans, span)`, integers of 16 to 64 bits, the sum of bits times factors `(span,)` modulo
    2^64, as a signed number; None where there is no library."""
    compiled = library("checksum.c", f"BYTES={bits.element_size()}")
    if compiled is None:
        return None
    function, span = compiled.dkm_weighted_sum, ctypes.c_int64(bits.shape[1])
    function.restype = ctypes.c_int64
    bits, factors = bits.contiguous(), factors.contiguous()

    def piece(first: int) -> list[int]:
        return [function(pointer(row), span, pointer(factors)) for row in bits[first : first + SPANS]]

    return [total for sums in spread(piece, range(0, len(bits), SPANS)) for total in sums]
