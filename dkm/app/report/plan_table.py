"""The table of all tensors: the plan, and how each tensor is clustered at the end."""

import math
from dataclasses import dataclass

from .reader import Measured, Run
from .sizes import stored_sizes
from .words import percent_text

FOLD = 40  # rows; a longer table is folded away on the screen
LONG = 200  # rows; a longer table is not printed on paper, where it would be many pages


@dataclass(frozen=True)
class TableRow:
    """A tensor."""

    name: str
    cells: list[str]
    reason: str


@dataclass(frozen=True)
class PlanTable:
    """The table and the sentences above it."""

    columns: list[str]  # between those of the name and the reason
    rows: list[TableRow]
    text: str

    @property
    def is_folded(self) -> bool:
        """Whether it is folded away on the screen."""
        return len(self.rows) > FOLD

    @property
    def is_long(self) -> bool:
        """Whether it is left out on paper."""
        return len(self.rows) > LONG


def plan_table(run: Run) -> PlanTable | None:
    """The table; None where there is no plan."""
    if not run.rows:
        return None
    measured = next((record.tensors for record in reversed(run.layers) if record.tensors), {})
    grouped = any(" x " in row["centroids"] for row in run.rows)
    columns = ["shape", "weights", "bits/dim", *(["centroids"] if grouped else []), "bytes"]
    columns += ["entropy", "unused", "snap gap"] if measured else []
    rows, taken = [], stored_sizes(run).tensors
    for row in run.rows:
        shape = row["shape"]
        cells = ["×".join(map(str, shape)) or "–", f"{math.prod(shape):,}", row["label"]]
        cells += [row["centroids"].replace("x", "×")] if grouped else []
        cells += [f"{taken[row['name']]:,}"]
        cells += _measured_cells(measured.get(row["name"], Measured())) if measured else []
        rows.append(TableRow(row["name"], cells, row["reason"]))
    clustered = sum(row["bits"] is not None for row in run.rows)
    text = f"{clustered:,} of {len(run.rows):,} tensors are clustered."
    if grouped:
        text += " 8 × 96 centroids are 8 in each of 96 groups."
    if measured:
        text += " Entropy is in bits per code: as many as bits where every centroid is used equally often."
    return PlanTable(columns, rows, text)


def _measured_cells(measured: Measured) -> list[str]:
    return [
        "" if measured.entropy is None else f"{measured.entropy:.2f}",
        "" if measured.dead is None else f"{measured.dead:g}",
        "" if measured.gap is None else percent_text(measured.gap),
    ]
