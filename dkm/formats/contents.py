"""What a .dkm file holds, as text: `dkm inspect`."""

import json
import math
import os
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from ..foundation.errors import FileError
from ..foundation.text import table
from .codec import unpack
from .dkm_file import verified_metadata

BLOCKS = "▁▂▃▄▅▆▇█"
BARS = 16  # of a histogram


def describe(path: str | os.PathLike, columns: int = 100) -> str:
    """A row for each tensor: bits, bytes, how many centroids are used, the entropy of the codes, their histogram.

    The histogram has the centroids from the smallest (by its first weight) to the largest, in at most 16 groups; a dot
    is one that nothing uses.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    metadata, arrays = verified_metadata(data, str(path)), safetensors.torch.load(data)
    entries, ties = json.loads(metadata["tensors"]), json.loads(metadata["ties"])
    rows = [("tensor", "shape", "b/d", "bytes", "used", "entropy", "codes")]
    packed = ideal = kept = dense = 0.0
    for name, entry in entries.items():
        shape = torch.Size(entry["shape"])
        dense += shape.numel() * getattr(torch, entry["dtype"]).itemsize
        if "bits" not in entry:
            kept += arrays[f"dense/{name}"].nbytes
            continue
        C = arrays[f"centroids/{name}"]
        codes = unpack(arrays[f"codes/{name}"], entry["bits"], -(-shape.numel() // entry["dim"]))
        counts = torch.bincount(codes, minlength=len(C)).double()
        entropy = _entropy(counts)
        packed += arrays[f"codes/{name}"].nbytes
        ideal += len(codes) * entropy / 8
        rows.append(
            (
                name,
                "x".join(map(str, shape)),
                f"{entry['bits']}/{entry['dim']}",
                f"{arrays[f'codes/{name}'].nbytes + C.nbytes:,}",
                f"{int((counts > 0).sum())}/{len(C)}",
                f"{entropy:.2f}",
                _histogram(counts[C[:, 0].float().argsort()]),
            )
        )
    unclustered = sum("bits" not in entry for entry in entries.values())
    lines = [
        table(rows, "<<>>>><", columns),
        "",
        f"{len(rows) - 1} clustered tensors; codes {packed:,.0f} bytes, {ideal:,.0f} at their entropy",
        f"{unclustered} other tensors, {kept:,.0f} bytes" + (f"; {len(ties)} tied names" if ties else ""),
        f"{len(data):,} bytes in all, {dense / len(data):.1f} times smaller than the {dense:,.0f} bytes of the model",
    ]
    return "\n".join(lines)


def _entropy(counts: Tensor) -> float:
    share = counts / counts.sum()
    return float(-torch.special.xlogy(share, share).sum() / math.log(2))


def _histogram(counts: Tensor) -> str:
    groups = torch.stack([group.sum() for group in counts.tensor_split(min(BARS, len(counts)))])
    level = (8 * groups / groups.max()).int().clamp(max=7)
    return "".join(BLOCKS[at] if count else "·" for count, at in zip(groups, level, strict=True))
