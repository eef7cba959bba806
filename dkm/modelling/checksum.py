"""Whether a weight has changed: a checksum of its bits, with which a few operations on the device tell."""

import torch
from torch import Tensor

from ..clustering.kernels.native.checksum import weighted_sums
from ..clustering.vectors import in_memory

SPAN = 1 << 16  # positions that one table of factors is for
ROWS = 16  # spans that are handled at once; so many integers of 64 bits are in memory
# Two odd numbers without a pattern, below 2^63.  The kernels (`triton/device/checksum.py`) have the same.
SPREAD = 0x1E3779B97F4A7C15
MIX = 0x3F58476D1CE4E5B9


def checksum(weight: Tensor, first: int = 0) -> Tensor:
    """`()` int64: the sum of the values' bit patterns, each times a factor that depends on its position.

    Position i counts in the order of the shape, whatever the order in memory, and its factor is
    `mixed(i mod SPAN) * mixed(i div SPAN)`, all modulo 2^64.  So shards can be added up: `first` is the position of the
    first value.  Two different weights have the same sum about never.
    """
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    bits = weight.detach().reshape(-1).view(integer)
    inner = mixed(torch.arange(min(SPAN, first % SPAN + len(bits)), device=weight.device))
    outer = mixed(torch.arange(first // SPAN, (first + len(bits)) // SPAN + 1, device=weight.device))
    head = min(-first % SPAN, len(bits))  # the values before the first whole span
    spans = (len(bits) - head) // SPAN
    tail = head + spans * SPAN
    total = (bits[:head].long() * inner[first % SPAN :][:head]).sum() * outer[0]
    whole, factors = bits[head:tail].view(spans, SPAN), outer[len(outer) - 1 - spans : -1]
    if in_memory(weight) and (sums := weighted_sums(whole, inner[:SPAN])) is not None:
        total = total + (torch.tensor(sums, dtype=torch.int64) * factors).sum()
        spans = 0
    # the compiler needs no pieces: it writes nothing in between to memory
    step = max(spans, 1) if torch.compiler.is_compiling() else ROWS
    for row in range(0, spans, step):
        piece = (whole[row : row + step].long() * inner).sum(1)
        total = total + (piece * factors[row : row + step]).sum()
    return total + (bits[tail:].long() * inner[: len(bits) - tail]).sum() * outer[-1]


def mixed(x: Tensor) -> Tensor:
    """A factor for each number: odd, and without a pattern."""
    x = (x + 1) * SPREAD
    return (x ^ (x >> 32)) * MIX | 1
