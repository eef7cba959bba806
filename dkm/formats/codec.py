"""Codes <-> bytes.  Arrays only: no model, no file.

Codes of b bits are written one after another, each from its lowest bit, into bytes from their lowest bit:
eight codes take exactly b bytes, and the last byte is filled up with zeros.
"""

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 20  # codes at a time: a multiple of 8, so that chunks end on a byte


def pack(codes: Tensor, bits: int) -> Tensor:
    """`(n,)` integers in [0, 2^bits) -> `(ceil(n * bits / 8),)` uint8, on the CPU."""
    values = codes.cpu().numpy()
    if len(values) and (values.min() < 0 or values.max() >= 1 << bits):
        raise ValueError(f"codes from {values.min()} to {values.max()} do not fit {bits} bits")
    place = np.arange(bits, dtype=np.uint16)
    packed = [
        np.packbits((values[i : i + CHUNK, None].astype(np.uint16) >> place) & 1, bitorder="little")
        for i in range(0, len(values), CHUNK)
    ]
    return torch.from_numpy(np.concatenate(packed or [np.zeros(0, np.uint8)]).astype(np.uint8))


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """The inverse of `pack`: the first n codes, `(n,)` int64."""
    data = packed.cpu().numpy()
    if data.dtype != np.uint8 or len(data) != packed_size(n, bits):
        raise ValueError(f"{n} codes of {bits} bits take {packed_size(n, bits)} bytes, got {len(data)} {data.dtype}")
    pieces = [unpack_range(data, bits, i, min(i + CHUNK, n)) for i in range(0, n, CHUNK)]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *pieces])


def unpack_range(data: np.ndarray, bits: int, start: int, stop: int) -> Tensor:
    """The codes from `start` to `stop`, `(stop - start,)` int64, of packed ones."""
    first = start * bits
    piece = np.unpackbits(data[first // 8 : packed_size(stop, bits)], bitorder="little")
    places = piece[first % 8 : first % 8 + (stop - start) * bits].reshape(-1, bits)
    return torch.from_numpy((places @ (1 << np.arange(bits)).astype(np.uint16)).astype(np.int64))


def padding_is_zero(data: np.ndarray, bits: int, n: int) -> bool:
    """Whether the bits of the last byte that no code uses are zero."""
    used = n * bits % 8
    return not used or not int(data[-1]) >> used


def packed_size(n: int, bits: int) -> int:
    """Bytes that n codes take."""
    return (n * bits + 7) // 8
