"""Packed codes -> indices -> values, in operations of PyTorch that neither wait for a device nor depend on data.

Several codes that follow each other are read as one index into a table that has a row for every combination of them:
with 2 bits, a byte is an index into a table of 256 rows of 4 weights.  That is what makes it fast.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

WIDEST = 12  # bits of an index that stands for several codes: the table has 2^12 rows and stays in the cache
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}  # bytes -> what is copied as one


def joined(bits: int, row_bytes: int, codes: int, per_group: int, groups: int) -> int:
    """How many codes to read as one index: 1, 2, 4 or 8.

    `row_bytes` is what the values of one code take.  `codes` is how many are to be read: the table shall not be more
    work than they are.  Where there are several groups, an index must not reach from one into the next.
    """
    best, m = 1, 2
    while m * bits <= WIDEST and m * row_bytes <= max(WORDS):
        if (groups > 1 and per_group % m) or groups * m << (m * bits) > codes:
            break
        best, m = m, 2 * m
    return best


def unpack(stream: Tensor, width: int, start: int, stop: int) -> Tensor:
    """`(bytes,)` uint8 -> the numbers of `width` bits from place `start` to `stop`, `(stop - start,)` int32.

    Beyond the end of the stream there are zeros.
    """
    bytes_, numbers = width // math.gcd(width, 8), 8 // math.gcd(width, 8)  # so many numbers take so many bytes
    first, last = start // numbers, -(-stop // numbers)
    data = stream[first * bytes_ : last * bytes_]
    if missing := (last - first) * bytes_ - len(data):
        data = pad(data, (0, missing))
    if width == 8:
        return data.int()
    columns = data.view(-1, bytes_).int()
    read = [_number(columns, place * width, width) for place in range(numbers)]
    return torch.stack(read, 1).view(-1)[start - first * numbers : stop - first * numbers]


def _number(columns: Tensor, bit: int, width: int) -> Tensor:
    """`(n, bytes)` -> `(n,)`: the number of `width` bits that begins at this bit of each row."""
    byte, shift = divmod(bit, 8)
    number, known = columns[:, byte] >> shift if shift else columns[:, byte], 8 - shift
    while known < width:
        byte += 1
        number = number | columns[:, byte] << known
        known += 8
    return number & (1 << width) - 1 if known > width else number


def numbers_at(stream: Tensor, width: int, places: Tensor) -> Tensor:
    """The numbers of at most 16 bits at these places, in any order, of the shape of `places`, int64."""
    bit, last = places * width, len(stream) - 1
    byte, shift = bit >> 3, bit & 7
    found = stream[byte].int() | stream[(byte + 1).clamp(max=last)].int() << 8
    if width > 9:
        found = found | stream[(byte + 2).clamp(max=last)].int() << 16
    return (found >> shift & (1 << width) - 1).long()


def combinations(table: Tensor, codes: int) -> Tensor:
    """`(groups, k, dim)` -> `(groups, k^codes, codes * dim)`: the values of so many codes, of which the first one is
    in the lowest bits."""
    while codes > 1:
        groups, k, dim = table.shape
        first = table[:, None].expand(groups, k, k, dim)
        second = table[:, :, None].expand(groups, k, k, dim)
        table, codes = torch.cat((first, second), 3).view(groups, k * k, 2 * dim), codes // 2
    return table


def rows_of(table: Tensor, indices: Tensor) -> Tensor:
    """`(n, width)`, contiguous -> `(len(indices), width)`.  A row of 2 to 16 bytes is copied as one word."""
    word = WORDS.get(table.shape[1] * table.element_size())
    if word is None or torch.compiler.is_compiling():  # the compiler has no complex numbers, and needs no such help
        return table.index_select(0, indices)
    return table.view(-1).view(word).index_select(0, indices).view(table.dtype).view(-1, table.shape[1])
