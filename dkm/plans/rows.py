"""A plan as data: a row for every tensor, with its bits, its bytes and the reason."""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..clustering.spec import Spec
from ..foundation.text import size_text
from ..foundation.text import table as text_table
from .language import quoted


@dataclass(frozen=True)
class Row:
    """One tensor of the model and what becomes of it."""

    name: str
    shape: tuple[int, ...]
    kind: str  # cv, lin, rnn or emb, which words select; bare, which must be named; "" for what is never clustered
    spec: Spec | None  # how it is clustered; None: kept as it is
    reason: str
    aliases: tuple[str, ...] = ()  # other names of the same tensor
    width: int = 16  # bits per value where the tensor is kept
    frozen: bool = False  # requires no gradient
    beside: int = 0  # bits of what is stored besides codes, centroids and scales: outliers

    @property
    def parameters(self) -> int:
        """How many weights the tensor has."""
        return math.prod(self.shape)

    @property
    def bits(self) -> int | None:
        """Of a code; None where the tensor is kept."""
        return None if self.spec is None else self.spec.bits

    @property
    def dim(self) -> int:
        """How many weights a vector has; 1 where the tensor is kept."""
        return 1 if self.spec is None else self.spec.dim

    @property
    def label(self) -> str:
        """`4/2` for 4 bits and vectors of 2, `3/1 scaled per 8x64`, or `keep`."""
        return "keep" if self.spec is None else self.spec.label

    @property
    def centroids(self) -> str:
        """How many there are, `16`, or `8 x 96` for 8 in each of 96 groups; empty where the tensor is kept."""
        if self.spec is None:
            return ""
        groups = "" if self.spec.group is None else f" x {self.spec.grouping(self.shape).count}"
        return f"{2**self.spec.bits}{groups}"

    @property
    def why(self) -> str:
        """The reason, in words for a reader."""
        return f"{self.reason}, frozen" if self.frozen else self.reason

    @property
    def stored_bytes(self) -> int:
        """`stored_bits`, rounded up to whole bytes."""
        return -(-self.stored_bits // 8)

    @property
    def stored_bits(self) -> int:
        """Codes, centroids, scales and outliers, or 16 bit per value: the paper's count."""
        return self.parameters * self.width if self.spec is None else self.spec.stored_bits(self.shape) + self.beside


@dataclass(frozen=True)
class Plan:
    """A row for every tensor; prints as a table."""

    rows: tuple[Row, ...]
    file_bytes: int | None = None  # of the file, packed; None where that was not asked for

    @property
    def bytes(self) -> int:
        """The paper's count: codes, centroids, scales and other parameters, but no running statistics."""
        return -(-sum(row.stored_bits for row in self.rows) // 8)

    @property
    def clustered(self) -> tuple[Row, ...]:
        """The rows of the tensors that are clustered."""
        return tuple(row for row in self.rows if row.spec is not None)

    @property
    def text(self) -> str:
        """The plan as text that names every clustered tensor: `plan(model, this)` decides the same."""
        return ", ".join(f"{quoted(row.name)}:{row.label}" for row in self.clustered)

    @property
    def megabytes(self) -> float:
        """`bytes` in millions.  The paper's tables are in MiB: `bytes / 2**20`."""
        return self.bytes / 1e6

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
        return sum(row.parameters for row in self.rows)

    @property
    def bits_per_weight(self) -> float:
        """Codes, centroids and scales of the clustered tensors over their weights."""
        stored = sum(row.stored_bits for row in self.clustered)
        return stored / max(1, sum(row.parameters for row in self.clustered))

    @property
    def ratio(self) -> float:
        """How many times smaller than the parameters in float32."""
        return self.parameters * 4 / max(self.bytes, 1)

    def __getitem__(self, name: str) -> Row:
        """The row of a tensor, by any of its names."""
        for row in self.rows:
            if name == row.name or name in row.aliases:
                return row
        raise KeyError(name)

    def summary(self) -> str:
        """The plan in two lines, or three where the size of the file is known."""
        counts = f"{len(self.clustered)} of {len(self.rows)} tensors clustered"
        return (
            f"{counts} at {self.bits_per_weight:.3f} bits per weight\n"
            f"{size_text(self.bytes)} as the paper counts, {self.ratio:.1f}x smaller than float32{self._file}"
        )

    @property
    def _file(self) -> str:
        if self.file_bytes is None:
            return ""
        return f"\nthe file takes {self.file_bytes:,} bytes ({size_text(self.file_bytes)})"

    @property
    def columns(self) -> "tuple[Column, ...]":
        """Of the table."""
        return COLUMNS

    def __str__(self) -> str:
        return self.table(shutil.get_terminal_size((100, 24)).columns) + "\n" + self.summary()

    def table(self, columns: int, rows: Sequence[Row] | None = None, *, fold: bool = False) -> str:
        """All rows, or these, as text of at most so many columns.

        Where names and reasons would have too little room, columns that follow from the others are left out.  With
        `fold`, tensors that no plan could cluster share a last line for each reason.
        """
        shown = self.rows if rows is None else rows
        own = self.columns
        folded: dict[str, list[Row]] = {}
        for row in shown if fold else ():
            if not row.kind:
                folded.setdefault(row.reason, []).append(row)
        lines = [[column.title for column in own]]
        lines += ([column.cell(row) for column in own] for row in shown if row.kind or not fold)
        for rows_of_one_reason in folded.values():
            together = _together(rows_of_one_reason)
            lines.append([together.get(column.title, column.cell(rows_of_one_reason[0])) for column in own])
        align = "".join(column.align for column in own)
        spare = [column.title for column in own if column.spare]
        return text_table(lines, align, columns, shrink_last=True, spare=spare)


def _together(rows: Sequence[Row]) -> dict[str, str]:
    """The cells of a line for several kept tensors, where they differ from those of the first."""
    if len(rows) == 1:
        return {}
    return {
        "tensor": f"({len(rows):,} tensors)",
        "shape": "",
        "params": f"{sum(row.parameters for row in rows):,}",
        "bytes": f"{sum(row.stored_bytes for row in rows):,}",
        "why": rows[0].reason,
    }


class Column(NamedTuple):
    """A column of the plan's table."""

    title: str
    align: str  # "<" or ">"
    cell: Callable[[Row], str]
    spare: bool = False  # left out where there is too little room


COLUMNS = (
    Column("tensor", "<", lambda row: row.name),
    Column("shape", "<", lambda row: "x".join(map(str, row.shape)) or "()"),
    Column("params", ">", lambda row: f"{row.parameters:,}", spare=True),
    Column("b/d", ">", lambda row: row.label),
    Column("k", ">", lambda row: row.centroids, spare=True),
    Column("bytes", ">", lambda row: f"{row.stored_bytes:,}"),
    Column("why", "<", lambda row: row.why + (f", also {', '.join(row.aliases)}" if row.aliases else "")),
)
