"""The product of few inputs and a packed weight on a CPU, without the weight: sums of numbers that are looked up.

`y[o] = sum_j x[j] . C[codes[o, j]]`, where `x[j]` are as many inputs as a vector has weights.  There are only `2^bits`
different terms for each `j`.  So all terms are computed once, `T[j, c] = x[j] . C[c]`, and each output adds up one of
each: for vectors of 8 weights that is an eighth of the additions of a product, and no multiplication.  Several short
codes that follow each other are read as one, whose terms are the sums of theirs.

The results are those of the dense weight up to rounding.
"""

import torch
from torch import Tensor

from .packed import PackedWeight
from .unpacking import unpack

WIDEST = 10  # bits of a number that stands for several codes; the terms of wider ones leave the cache
SHORTEST = 4  # weights that one term stands for; with fewer, decoding and multiplying is as fast


def codes_at_once(x: Tensor, weight: PackedWeight) -> int:
    """How many codes to read as one for this product; 0 where the weight had better be decoded, or must be."""
    if not x.numel() or x.shape[-1:] != weight.shape[1:]:
        return 0
    own, inputs = weight.spec, x.numel() // weight.pitch
    plain = (
        weight.device.type == x.device.type == "cpu"
        and x.dtype == weight.dtype == weight.source  # else dense weights are rounded twice
        and x.dtype in (torch.float32, torch.float64)
        and own.group is None
        and weight.positions is None
    )
    recorded = torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
    if not plain or recorded or (x.requires_grad and torch.is_grad_enabled()):
        return 0

    def work(m: int) -> int:  # terms to compute, and to look up
        return weight.pitch // (m * own.dim) * (2 ** (m * own.bits) + weight.count)

    found = [m for m in (1, 2, 4, 8) if m * own.bits <= WIDEST and weight.pitch % (m * own.dim) == 0]
    best = min(found, key=work, default=0)
    # each input takes look-ups of its own, whereas the weight is decoded once for all of them
    return best if best * own.dim >= SHORTEST * inputs and 2 ** (best * own.bits) <= weight.count else 0


def product(x: Tensor, weight: PackedWeight, m: int) -> Tensor:
    """`(..., in), (out, in) -> (..., out)`, reading `m` codes as one."""
    own, places = weight.spec, weight.pitch // (m * weight.spec.dim)
    terms = [_terms(each, weight, m) for each in x.reshape(-1, weight.pitch)]
    firsts = torch.arange(places, dtype=torch.int32) << m * own.bits
    y = x.new_empty(len(terms), weight.count)
    for start, stop in weight.blocks():
        numbers = unpack(weight.codes, m * own.bits, start * places, stop * places).view(-1, places)
        at = (numbers + firsts).view(-1)
        for row, each in zip(y, terms, strict=True):
            torch.sum(each.index_select(0, at).view(-1, places), 1, out=row[start:stop])
    if weight.scales is not None:
        y = y * weight.scales.to(y.dtype) * 2.0**weight.exponent
    return y.view(*x.shape[:-1], weight.count)


def _terms(x: Tensor, weight: PackedWeight, m: int) -> Tensor:
    """`(in,) -> (in / (m dim) 2^(m bits),)`: what `m` codes at each place give, the first one in the lowest bits."""
    terms = x.view(-1, weight.spec.dim) @ weight.values().t()
    while m > 1:
        first, second = terms.view(-1, 2, terms.shape[1]).unbind(1)
        terms, m = (second[:, :, None] + first[:, None, :]).flatten(1), m // 2
    return terms.view(-1)
