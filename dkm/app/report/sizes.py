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
    """What the section shows; None where no sizes are known.  The parts, and the bars too, add up to `run.size`."""
    stored = stored_sizes(run)
    total = sum(stored.tensors.values()) + stored.buffers + stored.rest
    if not total:
        return None
    rows = sorted(run.rows, key=lambda row: -stored.tensors[row["name"]])
    taken = stored.tensors
    shown = [row for row in rows[:BARS] if row["bits"] is not None or taken[row["name"]] >= LEAST_SHARE * total]
    others = rows[len(shown) :]
    if len(others) == 1:
        shown, others = rows, []
    more = {f"{len(others):,} smaller tensors": sum(taken[row["name"]] for row in others)} if others else {}
    more |= {title: count for title, count in ((BUFFERS, stored.buffers), (stored.rest_is, stored.rest)) if count}
    longest = max([*(taken[row["name"]] for row in shown), *more.values()])

    def bar(name: str, precision: str, is_kept: bool, count: float) -> Bar:
        look = "plain" if is_kept else "a"
        return Bar(name, precision, look, 100 * count / longest, size_text(count), 100 * count / total)

    bars = [bar(row["name"], row["label"], row["bits"] is None, taken[row["name"]]) for row in shown]
    bars += [bar(title, "", True, count) for title, count in more.items()]
    return Sizes(_parts(run, stored, total), bars)


BUFFERS = "buffers, such as running statistics"
HEADER = "names and shapes"


@dataclass(frozen=True)
class Stored:
    """What takes how many bytes, in the file where that is known, and otherwise as the paper counts."""

    tensors: dict[str, int]  # the names of the plan's tensors -> all that the file has of them
    codes: float  # the tensors' parts, together
    centroids: float
    buffers: int
    rest: int
    rest_is: str


def stored_sizes(run: Run) -> Stored:
    """The sizes of a run."""
    tensors = {row["name"]: row["bytes"] for row in run.rows}
    if not run.stored:  # an older run, or one of the user's own training loop
        rest = round(max(0, (run.size or 0) - sum(tensors.values()))) if tensors else 0
        return Stored(tensors, *_codes_and_centroids(run.rows), 0, rest, f"{BUFFERS}; {HEADER}")
    tensors, kinds = dict.fromkeys(tensors, 0), dict.fromkeys(("codes", "centroids", "scales"), 0)
    buffers, header = 0, 0
    for name, count in run.stored.items():
        kind, _, tensor = name.partition("/")
        if tensor in tensors:
            tensors[tensor] += count
            if kind in kinds:
                kinds[kind] += count
        elif tensor:
            buffers += count
        else:
            header += count
    return Stored(tensors, kinds["codes"], kinds["centroids"] + kinds["scales"], buffers, header, HEADER)


def _codes_and_centroids(rows: list[PlanRow]) -> tuple[float, float]:
    """As the paper counts."""
    codes, centroids = 0.0, 0.0
    for row in rows:
        if row["bits"] is not None:
            weights = math.prod(row["shape"]) if row["shape"] else 0
            codes += -(-weights // row["dim"]) * row["bits"] / 8
            centroids += 2 ** row["bits"] * row["dim"] * 2
    return codes, centroids


def _parts(run: Run, stored: Stored, total: float) -> list[Part]:
    kept = max(0.0, sum(stored.tensors.values()) - stored.codes - stored.centroids)
    scaled = any("scaled" in row["label"] for row in run.rows)
    found = [
        ("a", "codes", stored.codes),
        ("b", "centroids and scales" if scaled else "centroids", stored.centroids),
        ("plain", "not clustered", kept),
        ("e", BUFFERS, stored.buffers),
        ("h", stored.rest_is, stored.rest),
    ]
    return [Part(look, name, size_text(count), 100 * count / total) for look, name, count in found if count]
