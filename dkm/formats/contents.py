"""What a .dkm file holds, as text: `dkm inspect`."""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..foundation.text import shown, table
from .described import Codes, Described
from .dkm_file import read_bytes
from .entropy import CodeBytes, code_bytes, totals
from .rules import Packed, read
from .usage import usage

BLOCKS = "▁▂▃▄▅▆▇█"
BARS = 16  # of a histogram


class Line(NamedTuple):
    """A clustered tensor's cells of the table, and what it adds to the totals."""

    cells: tuple[str, ...]
    stored: int  # bytes of its codes, in the file
    codes: CodeBytes
    centroids: int  # bytes
    scales: int  # bytes


def describe(path: str | os.PathLike[str], columns: int = 100) -> str:
    """A row for each tensor: bits, centroids, bytes in the file, what its codes take packed, entropy-coded and at their
    entropy, how many centroids are used, the entropy in bits per code, the histogram of the codes.  In a narrow
    terminal, some of these are left out.

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
            stored = contents.entries[each.name].content
            assert isinstance(stored, Packed)
            lines.append(_line(each, each.content, stored))
        else:
            others.append(each.content.nbytes)
    head = ("tensor", "shape", "b/d", "k", "bytes", *CodeBytes._fields, "used", "entropy", "codes")
    spare = ("bound", "packed", "k", "shape", "coded")
    codes = sum(line.stored for line in lines)
    centroids, scales = sum(line.centroids for line in lines), sum(line.scales for line in lines)
    scaled = f", scales {scales:,} bytes" if scales else ""
    kept = sum(others)
    dense = sum(entry.numel * entry.dtype.itemsize for entry in contents.entries.values())
    ties = f"; {len(contents.ties)} tied names" if contents.ties else ""
    return "\n".join(
        [
            table([head, *(line.cells for line in lines)], "<<>>>>>>>><", columns, spare=spare),
            "",
            f"{len(lines)} clustered tensors; codes {codes:,} bytes, centroids {centroids:,} bytes{scaled}",
            f"codes: {totals(line.codes for line in lines)}",
            f"{len(others)} other tensors, {kept:,} bytes{ties}",
            f"{len(data):,} bytes in all, {dense / len(data):.1f} times smaller than the {dense:,} bytes of the model",
        ]
    )


def _line(each: Described, content: Codes, stored: Packed) -> Line:
    groups, k, use, codes = each.grouping.count, 2**content.bits, usage(each), len(stored.codes.data)
    taken = code_bytes(each, use)
    taken = taken._replace(coded=codes) if stored.coded else taken
    centroids, scales = content.centroids.nbytes, 0 if content.scales is None else content.scales.nbytes
    cells = (
        shown(each.name),
        "x".join(map(str, each.shape)) or "()",
        content.spec.label,
        f"{k}" if content.group is None else f"{k} x {groups}",
        f"{codes + centroids + scales:,}",
        *(f"{number:,}" for number in taken),
        f"{use.used}/{k * groups}",
        f"{use.bound / each.grouping.codes:.2f}",
        _histogram(use.by_value),
    )
    return Line(cells, codes, taken, centroids, scales)


def _histogram(counts: Tensor) -> str:
    groups = torch.stack([group.sum() for group in counts.tensor_split(min(BARS, len(counts)))])
    level = (8 * groups / groups.max()).int().clamp(max=7)
    return "".join(BLOCKS[at] if count else "·" for count, at in zip(groups, level, strict=True))
