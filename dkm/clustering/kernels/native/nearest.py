"""The nearest centroid of every vector, compiled."""

import ctypes

import torch
from torch import Tensor

from ...threads import spread
from .compiling import passes, pointer, weight_type

PIECE = 1 << 16  # vectors that a thread takes at a time
BISECTED = 512  # from so many edges on, a bisection takes less time than to compare with all of them


def nearest(W: Tensor, C: Tensor) -> Tensor | None:
    """`(n, d), (k, d) -> (n,)` int64 by the squared distance, or None where there is no library."""
    library, kind = passes(C.dtype, C.shape[1]), weight_type(C.dtype)
    if library is None:
        return None
    (k, d), C = C.shape, C.contiguous()
    codes = torch.empty(len(W), dtype=torch.int64)

    def piece(first: int) -> None:
        part, into = W[first : first + PIECE].to(C.dtype).contiguous(), codes[first : first + PIECE]
        facts = kind(part.data_ptr(), part.numel(), d, k, len(part))
        if library.dkm_nearest(ctypes.byref(facts), pointer(C), pointer(into)):
            raise MemoryError(f"no memory is left to find the nearest of {k} centroids")

    spread(piece, range(0, len(W), PIECE))
    return codes


def positions(values: Tensor, edges: Tensor, labels: Tensor) -> Tensor | None:
    """`(n,)`, `(k - 1,)` ascending, `(k,)` int64 -> `(n,)` int64: the label for the number of edges below each value;
    the last one for NaN.  None where there is no library, or a bisection is faster."""
    library = passes(edges.dtype, 1) if len(edges) < BISECTED else None
    if library is None:
        return None
    edges, labels = edges.contiguous(), labels.contiguous()
    codes = torch.empty(len(values), dtype=torch.int64)
    count = ctypes.c_int64(len(edges))

    def piece(first: int) -> None:
        part, into = values[first : first + PIECE].to(edges.dtype).contiguous(), codes[first : first + PIECE]
        sizes = ctypes.c_int64(len(part)), pointer(edges), count
        library.dkm_positions(pointer(part), *sizes, pointer(labels), pointer(into))

    spread(piece, range(0, len(values), PIECE))
    return codes
