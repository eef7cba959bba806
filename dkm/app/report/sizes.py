"""The section about sizes: what takes how many bytes."""

import math
from dataclasses import dataclass

from ...foundation.text import size_text
from ..run_folder import PlanRow
from .reader import Run

BARS = 16  # tensors with a bar of their own; the others share one
LEAST_SHARE = 0.005  # of all bytes: a tensor that is not clustered needs this for a bar of its own


@dataclass(frozen=True)
class Part:
    """Codes, centroids, or what is not clustered: its share of all bytes."""

    look: str
    name: str
    size: str
    percent: float


@dataclass(frozen=True)
class Bar:
    """A tensor, or several small ones."""

    name: str
    precision: str  # 4/2, or keep
    look: str
    width: float  # in percent of the longest
    size: str
    percent: float  # of all bytes


@dataclass(frozen=True)
class Sizes:
    """The whole section."""

    parts: list[Part]
    bars: list[Bar]


def sizes(run: Run) -> Sizes | None:
    """What the section shows; None where no sizes are known."""
    rows = sorted(run.rows, key=lambda row: -row["bytes"])
    total = sum(row["bytes"] for row in rows)
    if not total:
        return None
    shown = [row for row in rows[:BARS] if row["bits"] is not None or row["bytes"] >= LEAST_SHARE * total]
    rest = rows[len(shown) :]
    if len(rest) == 1:
        shown, rest = rows, []
    rest_bytes = sum(row["bytes"] for row in rest)
    longest = max(shown[0]["bytes"], rest_bytes)

    def bar(name: str, precision: str, is_kept: bool, count: float) -> Bar:
        look = "plain" if is_kept else "a"
        return Bar(name, precision, look, 100 * count / longest, size_text(count), 100 * count / total)

    bars = [bar(row["name"], row["label"], row["bits"] is None, row["bytes"]) for row in shown]
    if rest:
        bars.append(bar(f"{len(rest):,} smaller tensors", "", True, rest_bytes))
    return Sizes(_parts(run.rows, total), bars)


def _parts(rows: list[PlanRow], total: float) -> list[Part]:
    codes, centroids = 0.0, 0.0
    for row in rows:
        if row["bits"] is not None:
            weights = math.prod(row["shape"]) if row["shape"] else 0
            codes += -(-weights // row["dim"]) * row["bits"] / 8
            centroids += 2 ** row["bits"] * row["dim"] * 2
    kept = max(0.0, total - codes - centroids)
    found = [("a", "codes", codes), ("b", "centroids", centroids), ("plain", "not clustered", kept)]
    return [Part(look, name, size_text(count), 100 * count / total) for look, name, count in found]
