"""What a .dkm file holds, as text: `dkm inspect`."""

import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..clustering.groups import Grouping
from ..foundation.text import shown, table
from .codec import CHUNK
from .described import Codes, Described
from .dkm_file import read_bytes
from .rules import read

BLOCKS = "▁▂▃▄▅▆▇█"
BARS = 16  # of a histogram


class Line(NamedTuple):
    """A clustered tensor's cells of the table, and what it adds to the totals."""

    cells: tuple[str, ...]
    packed: int  # bytes of its codes
    centroids: int  # bytes
    scales: int  # bytes
    ideal: float  # bytes of its codes at their entropy


def describe(path: str | os.PathLike[str], columns: int = 100) -> str:
    """A row for each tensor: bits, centroids, bytes, how many centroids are used, the entropy of the codes, their
    histogram.  In a narrow terminal, k and the shape are left out.

    Where the tensor has groups, k is the number of centroids times that of groups, and the entropy is that of codes
    whose group is known.  The histogram orders the centroids of a group from the smallest (by its first value) to the
    largest, in at most 16 bars; a dot is a bar that nothing uses.  FileError for every file that `dkm.load`
    refuses; names are escaped.
    """
    data = read_bytes(Path(path))
    contents = read(data, str(path))
    lines, others = [], []
    for each in contents.tensors():
        if isinstance(each.content, Codes):
            lines.append(_line(each, each.content))
        else:
            others.append(each.content.nbytes)
    head = ("tensor", "shape", "b/d", "k", "bytes", "used", "entropy", "codes")
    packed, ideal = sum(line.packed for line in lines), sum(line.ideal for line in lines)
    centroids, scales = sum(line.centroids for line in lines), sum(line.scales for line in lines)
    scaled = f"; scales {scales:,} bytes" if scales else ""
    kept = sum(others)
    dense = sum(entry.numel * entry.dtype.itemsize for entry in contents.entries.values())
    ties = f"; {len(contents.ties)} tied names" if contents.ties else ""
    return "\n".join(
        [
            table([head, *(line.cells for line in lines)], "<<>>>>><", columns, spare=("k", "shape")),
            "",
            f"{len(lines)} clustered tensors; codes {packed:,} bytes, {ideal:,.0f} at their entropy; "
            f"centroids {centroids:,} bytes{scaled}",
            f"{len(others)} other tensors, {kept:,} bytes{ties}",
            f"{len(data):,} bytes in all, {dense / len(data):.1f} times smaller than the {dense:,} bytes of the model",
        ]
    )


def _line(each: Described, content: Codes) -> Line:
    grouping, k = each.grouping, 2**content.bits
    use = _use(content, grouping)
    codes, centroids = content.packed.nbytes, content.centroids.nbytes
    scales = 0 if content.scales is None else content.scales.nbytes
    cells = (
        shown(each.name),
        "x".join(map(str, each.shape)) or "()",
        content.spec.label,
        f"{k}" if content.group is None else f"{k} x {grouping.count}",
        f"{codes + centroids + scales:,}",
        f"{use.used}/{k * grouping.count}",
        f"{use.ideal / grouping.codes:.2f}",
        _histogram(use.by_rank),
    )
    return Line(cells, codes, centroids, scales, use.ideal / 8)


class Use(NamedTuple):
    """How a tensor's codes use its centroids."""

    used: int  # centroids that have a vector
    ideal: float  # bits of the codes at their entropy, where the group of each is known
    by_rank: Tensor  # (k,): vectors by the rank of their centroid in its group, from the smallest first value


def _use(content: Codes, grouping: Grouping) -> Use:
    """Groups are counted a few at a time, and so are codes."""
    k, ends = 2**content.bits, grouping.codes_per_group().cumsum(0)
    first = content.centroids.view(grouping.count, k, -1)[..., 0]
    used, ideal, by_rank, start = 0, 0.0, torch.zeros(k, dtype=torch.int64), 0
    for group in range(0, grouping.count, step := max(1, CHUNK // k)):
        own = ends[group : group + step]
        counts = torch.zeros(len(own) * k, dtype=torch.int64)
        for at in range(start, stop := int(own[-1]), CHUNK):
            codes = content.codes(at, min(at + CHUNK, stop))
            within = torch.searchsorted(own, torch.arange(at, at + len(codes)), right=True)
            counts += torch.bincount(within * k + codes, minlength=len(counts))
        counts, start = counts.view(-1, k), stop
        used += int((counts > 0).sum())
        ideal += _ideal_bits(counts.double())
        by_rank += counts.gather(1, first[group : group + step].float().argsort(1)).sum(0)
    return Use(used, ideal, by_rank)


def _ideal_bits(counts: Tensor) -> float:
    """`(groups, k)`: what codes with these counts take at the entropy of their groups."""
    bits = torch.special.xlogy(counts, counts.sum(1, keepdim=True)) - torch.special.xlogy(counts, counts)
    return float(bits.sum() / math.log(2))


def _histogram(counts: Tensor) -> str:
    groups = torch.stack([group.sum() for group in counts.tensor_split(min(BARS, len(counts)))])
    level = (8 * groups / groups.max()).int().clamp(max=7)
    return "".join(BLOCKS[at] if count else "·" for count, at in zip(groups, level, strict=True))
