"""What a .dkm file holds, as text: `dkm inspect`."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..foundation.text import shown, table
from .described import Codes, Described
from .dkm_file import read_bytes
from .entropy import CodeBytes, code_bytes, totals
from .rules import Packed, read
from .usage import Usage, usage

BLOCKS = "▁▂▃▄▅▆▇█"
BARS = 16  # of a histogram


class Line(NamedTuple):
    """What there is to say about a clustered tensor."""

    each: Described
    content: Codes
    stored: int  # bytes of its codes, in the file
    codes: CodeBytes
    usage: Usage

    @property
    def centroids(self) -> int:
        """Bytes."""
        return self.content.centroids.nbytes

    @property
    def scales(self) -> int:
        """Bytes."""
        return 0 if self.content.scales is None else self.content.scales.nbytes

    @property
    def outliers(self) -> int:
        """Bytes."""
        return 0 if self.content.outliers is None else self.content.outliers.nbytes(self.each.numel)

    @property
    def outlier_count(self) -> int:
        """How many weights have values of their own."""
        return 0 if self.content.outliers is None else len(self.content.outliers.values)

    @property
    def bytes(self) -> int:
        """All that the tensor takes in the file."""
        return self.stored + self.centroids + self.scales + self.outliers

    @property
    def entropy(self) -> float:
        """Bits per code."""
        return self.usage.bound / self.each.grouping.codes

    def cells(self) -> tuple[str, ...]:
        """Of the table."""
        groups, k = self.each.grouping.count, 2**self.content.bits
        return (
            shown(self.each.name),
            "x".join(map(str, self.each.shape)) or "()",
            self.content.spec.label,
            f"{k}" if self.content.group is None else f"{k} x {groups}",
            f"{self.bytes:,}",
            *(f"{number:,}" for number in self.codes),
            f"{self.usage.used}/{k * groups}",
            f"{self.entropy:.2f}",
            _histogram(self.usage.by_value),
        )

    def figures(self) -> dict[str, Any]:
        """As numbers."""
        content = self.content
        return dict(
            name=self.each.name,
            shape=list(self.each.shape),
            aliases=list(self.each.aliases),
            label=content.spec.label,
            bits=content.bits,
            dim=content.dim,
            groups=self.each.grouping.count,
            centroids=2**content.bits * self.each.grouping.count,
            centroids_used=self.usage.used,
            bytes=self.bytes,
            code_bytes=self.stored,
            centroid_bytes=self.centroids,
            scale_bytes=self.scales,
            outliers=self.outlier_count,
            outlier_bytes=self.outliers,
            packed_bytes=self.codes.packed,
            coded_bytes=self.codes.coded,
            entropy=self.entropy,
            histogram=self.usage.by_value.tolist(),
        )


class Contents(NamedTuple):
    """What a file holds."""

    lines: list[Line]
    others: list[Described]  # tensors that are not clustered
    ties: int  # names that are another one's tensor
    bytes_file: int
    bytes_dense: int  # of the tensors of the model, in its own precision


def read_contents(path: str | os.PathLike[str]) -> Contents:
    """What a file holds; FileError for every file that `dkm.load` refuses."""
    data = read_bytes(Path(path))
    contents = read(data, str(path))
    lines, others = [], []
    for each in contents.tensors():
        if isinstance(each.content, Codes):
            stored = contents.entries[each.name].content
            assert isinstance(stored, Packed)
            lines.append(_line(each, each.content, stored))
        else:
            others.append(each)
    dense = sum(entry.numel * entry.dtype.itemsize for entry in contents.entries.values())
    return Contents(lines, others, len(contents.ties), len(data), dense)


def figures(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file holds as numbers, which JSON can hold.  FileError for every file that `dkm.load` refuses."""
    lines, others, ties, size, dense = read_contents(path)
    kept = [
        dict(name=each.name, shape=list(each.shape), aliases=list(each.aliases), bytes=_nbytes(each)) for each in others
    ]
    return dict(
        bytes_file=size,
        bytes_dense=dense,
        ratio=dense / size,
        tied_names=ties,
        clustered=[line.figures() for line in lines],
        kept=kept,
    )


def describe(path: str | os.PathLike[str], columns: int = 100) -> str:
    """A row for each tensor: bits, centroids, bytes in the file, what its codes take packed, entropy-coded and at their
    entropy, how many centroids are used, the entropy in bits per code, the histogram of the codes.  In a narrow
    terminal, some of these are left out.

    Where the tensor has groups, k is the number of centroids times that of groups, and the entropy is that of codes
    whose group is known.  The histogram orders the centroids of a group from the smallest (by its first value) to the
    largest, in at most 16 bars; a dot is a bar that nothing uses.  FileError for every file that `dkm.load`
    refuses; names are escaped.
    """
    lines, others, tied, size, dense = read_contents(path)
    head = ("tensor", "shape", "b/d", "k", "bytes", *CodeBytes._fields, "used", "entropy", "codes")
    spare = ("bound", "packed", "k", "shape", "coded")
    codes = sum(line.stored for line in lines)
    centroids, scales = sum(line.centroids for line in lines), sum(line.scales for line in lines)
    scaled = f", scales {scales:,} bytes" if scales else ""
    beside = sum(line.outliers for line in lines)
    apart = f", {sum(line.outlier_count for line in lines):,} outliers {beside:,} bytes" if beside else ""
    kept = sum(map(_nbytes, others))
    ties = f"; {tied} tied names" if tied else ""
    return "\n".join(
        [
            table([head, *(line.cells() for line in lines)], "<<>>>>>>>><", columns, spare=spare),
            "",
            f"{len(lines)} clustered tensors; codes {codes:,} bytes, centroids {centroids:,} bytes{scaled}{apart}",
            f"codes: {totals(line.codes for line in lines)}",
            f"{len(others)} other tensors, {kept:,} bytes{ties}",
            f"{size:,} bytes in all, {dense / size:.1f} times smaller than the {dense:,} bytes of the model",
        ]
    )


def _nbytes(kept: Described) -> int:
    assert isinstance(kept.content, Tensor)
    return kept.content.nbytes


def _line(each: Described, content: Codes, stored: Packed) -> Line:
    use, codes = usage(each), len(stored.codes.data)
    taken = code_bytes(each, use)
    return Line(each, content, codes, taken._replace(coded=codes) if stored.coded else taken, use)


def _histogram(counts: Tensor) -> str:
    groups = torch.stack([group.sum() for group in counts.tensor_split(min(BARS, len(counts)))])
    level = (8 * groups / groups.max()).int().clamp(max=7)
    return "".join(BLOCKS[at] if count else "·" for count, at in zip(groups, level, strict=True))
