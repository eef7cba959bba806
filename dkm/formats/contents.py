"""What a .dkm file holds, as text: `dkm inspect`."""

import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..foundation.text import shown, table
from .codec import unpack_pieces
from .dkm_file import read_bytes
from .rules import Entry, Packed, read

BLOCKS = "▁▂▃▄▅▆▇█"
BARS = 16  # of a histogram


class Line(NamedTuple):
    """A clustered tensor's cells of the table, and what it adds to the totals."""

    cells: tuple[str, ...]
    packed: int  # bytes of its codes
    ideal: float  # bytes of its codes at their entropy


def describe(path: str | os.PathLike[str], columns: int = 100) -> str:
    """A row for each tensor: bits, bytes, how many centroids are used, the entropy of the codes, their histogram.

    The histogram orders the centroids from the smallest (by its first value) to the largest, in at most 16 groups; a
    dot is a group that nothing uses.  FileError for every file that `dkm.load` refuses; names are escaped.
    """
    data = read_bytes(Path(path))
    contents = read(data, str(path))
    lines = [
        _line(name, entry, entry.content)
        for name, entry in contents.entries.items()
        if isinstance(entry.content, Packed)
    ]
    others = [entry.content for entry in contents.entries.values() if not isinstance(entry.content, Packed)]
    head = ("tensor", "shape", "b/d", "bytes", "used", "entropy", "codes")
    packed, ideal = sum(line.packed for line in lines), sum(line.ideal for line in lines)
    kept = sum(len(array.data) for array in others)
    dense = sum(entry.numel * entry.dtype.itemsize for entry in contents.entries.values())
    ties = f"; {len(contents.ties)} tied names" if contents.ties else ""
    return "\n".join(
        [
            table([head, *(line.cells for line in lines)], "<<>>>><", columns),
            "",
            f"{len(lines)} clustered tensors; codes {packed:,} bytes, {ideal:,.0f} at their entropy",
            f"{len(others)} other tensors, {kept:,} bytes{ties}",
            f"{len(data):,} bytes in all, {dense / len(data):.1f} times smaller than the {dense:,} bytes of the model",
        ]
    )


def _line(name: str, entry: Entry, content: Packed) -> Line:
    vectors, k = -(-entry.numel // content.dim), 2**content.bits
    counts = torch.zeros(k, dtype=torch.float64)
    for codes in unpack_pieces(content.codes.data, content.bits, vectors):
        counts += torch.bincount(codes, minlength=k)
    entropy = _entropy(counts)
    cells = (
        shown(name),
        "x".join(map(str, entry.shape)),
        f"{content.bits}/{content.dim}",
        f"{len(content.codes.data) + len(content.centroids.data):,}",
        f"{int((counts > 0).sum())}/{k}",
        f"{entropy:.2f}",
        _histogram(counts[content.centroids.tensor()[:, 0].float().argsort()]),
    )
    return Line(cells, len(content.codes.data), vectors * entropy / 8)


def _entropy(counts: Tensor) -> float:
    share = counts / counts.sum()
    return float(-torch.special.xlogy(share, share).sum() / math.log(2))


def _histogram(counts: Tensor) -> str:
    groups = torch.stack([group.sum() for group in counts.tensor_split(min(BARS, len(counts)))])
    level = (8 * groups / groups.max()).int().clamp(max=7)
    return "".join(BLOCKS[at] if count else "·" for count, at in zip(groups, level, strict=True))
