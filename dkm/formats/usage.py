"""How the codes of a tensor use its centroids: what entropy coding starts from, and what `dkm inspect` shows."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .codec import CHUNK
from .described import Codes, Described


@dataclass(frozen=True)
class Block:
    """Some consecutive groups of a tensor."""

    content: Codes
    groups: slice
    start: int  # the place of their first code
    ends: Tensor  # (groups,): the place after the last code of each

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """The codes, a few at a time: the place of the first one, and the number of each one's group in this block
        times k, plus the code."""
        stop, k = int(self.ends[-1]), 2**self.content.bits
        for at in range(self.start, stop, CHUNK):
            codes = self.content.codes(at, min(at + CHUNK, stop))
            if len(self.ends) > 1:
                codes += k * torch.searchsorted(self.ends, torch.arange(at, at + len(codes)), right=True)
            yield at, codes

    @cached_property
    def counts(self) -> Tensor:
        """`(groups, k)`: how many codes each centroid has."""
        size = len(self.ends) * 2**self.content.bits
        counts = torch.zeros(size, dtype=torch.int64)
        for _, codes in self.pieces():
            counts += torch.bincount(codes, minlength=size)
        return counts.view(len(self.ends), -1)


def blocks(each: Described) -> Iterator[Block]:
    """All groups of a clustered tensor, a few at a time, so that their counts take little memory."""
    assert isinstance(each.content, Codes)
    ends, start = each.grouping.codes_per_group().cumsum(0), 0
    step = max(1, CHUNK // 2**each.content.bits)
    for group in range(0, len(ends), step):
        own = ends[group : group + step]
        yield Block(each.content, slice(group, group + len(own)), start, own)
        start = int(own[-1])


class Usage(NamedTuple):
    """How a tensor's codes use its centroids."""

    used: int  # centroids that have a code
    bound: float  # bits of all codes at their entropy, where the group of each is known
    by_value: Tensor  # (k,): codes by the rank of their centroid in its group, from the smallest first value
    by_count: Tensor  # (k,): codes by the rank of their centroid in its group, from the one that has most


def usage(each: Described) -> Usage:
    """Counted a few groups, and a few codes, at a time."""
    assert isinstance(each.content, Codes)
    k = 2**each.content.bits
    first = each.content.centroids.cpu().view(-1, k, each.content.dim)[..., 0]
    used, bound, by_value, by_count = 0, 0.0, torch.zeros(k, dtype=torch.int64), torch.zeros(k, dtype=torch.int64)
    for block in blocks(each):
        counts = block.counts
        used += int((counts > 0).sum())
        bound += _bits_at_entropy(counts.double())
        by_value += counts.gather(1, first[block.groups].float().argsort(1)).sum(0)
        by_count += counts.sort(1, descending=True).values.sum(0)
    return Usage(used, bound, by_value, by_count)


def _bits_at_entropy(counts: Tensor) -> float:
    """`(groups, k)`: what codes with these counts take at the entropy of their groups."""
    bits = torch.special.xlogy(counts, counts.sum(1, keepdim=True)) - torch.special.xlogy(counts, counts)
    return float(bits.sum() / math.log(2))
