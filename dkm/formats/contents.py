"""What a .dkm file holds, as text: `dkm inspect`."""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..foundation.text import table
from .codec import unpack
from .container import Contents, from_bytes
from .dkm_file import read_bytes

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
    dot is a group that nothing uses.
    """
    data = read_bytes(Path(path))
    contents = from_bytes(data, str(path))
    clustered = [name for name, entry in contents.entries.items() if "bits" in entry]
    others = [name for name in contents.entries if name not in clustered]
    lines = [_line(name, contents) for name in clustered]
    head = ("tensor", "shape", "b/d", "bytes", "used", "entropy", "codes")
    packed, ideal = sum(line.packed for line in lines), sum(line.ideal for line in lines)
    kept = sum(contents.arrays[f"dense/{name}"].nbytes for name in others)
    dense = sum(_dense_bytes(entry) for entry in contents.entries.values())
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


def _line(name: str, contents: Contents) -> Line:
    entry, C = contents.entries[name], contents.arrays[f"centroids/{name}"]
    packed, shape = contents.arrays[f"codes/{name}"], torch.Size(entry["shape"])
    codes = unpack(packed, entry["bits"], -(-shape.numel() // entry["dim"]))
    counts = torch.bincount(codes, minlength=len(C)).double()
    entropy = _entropy(counts)
    cells = (
        name,
        "x".join(map(str, shape)),
        f"{entry['bits']}/{entry['dim']}",
        f"{packed.nbytes + C.nbytes:,}",
        f"{int((counts > 0).sum())}/{len(C)}",
        f"{entropy:.2f}",
        _histogram(counts[C[:, 0].float().argsort()]),
    )
    return Line(cells, packed.nbytes, len(codes) * entropy / 8)


def _dense_bytes(entry: dict[str, Any]) -> int:
    return torch.Size(entry["shape"]).numel() * getattr(torch, entry["dtype"]).itemsize


def _entropy(counts: Tensor) -> float:
    share = counts / counts.sum()
    return float(-torch.special.xlogy(share, share).sum() / math.log(2))


def _histogram(counts: Tensor) -> str:
    groups = torch.stack([group.sum() for group in counts.tensor_split(min(BARS, len(counts)))])
    level = (8 * groups / groups.max()).int().clamp(max=7)
    return "".join(BLOCKS[at] if count else "·" for count, at in zip(groups, level, strict=True))
