"""How the weights of a tensor gather around their centroids: histograms one below the other, as SVG."""

from collections.abc import Callable
from itertools import pairwise

from markupsafe import Markup

from .axes import linear_axis, tick_text
from .charts import RIGHT, TOP, WIDTH, Figure, Point, path_data, svg, svg_text
from .reader import Histogram, Run

MARGIN = 64  # on the left
ROW = 52  # the height of one histogram
MOMENTS = 6  # histograms in a picture
MANY = 32  # more centroids than this are short ticks: lines would hide the histogram
CUT_OFF = 5e-4  # the share of the weights that may lie outside of the picture, at either end


def weight_figures(run: Run) -> list[Figure]:
    """A figure for each tensor of which there are histograms."""
    tensors: dict[str, list[Histogram]] = {}
    for record in run.histograms:
        tensors.setdefault(record.name, []).append(record)
    rows = {row["name"]: row for row in run.rows}
    figures = []
    for name, records in tensors.items():
        row = rows.get(name)
        title = name if row is None else f"{name}, {row['label']}"
        note = f"Of every {row['dim']} weights the first." if row is not None and row["dim"] > 1 else ""
        figures.append(ridges(records, lambda step: _moment(run, step), run.unit, title, note))
    return figures


def _moment(run: Run, step: int) -> str:
    return f"{run.time(step):.3g}" if run.unit == "epoch" else f"{step:,}"


def ridges(records: list[Histogram], moment: Callable[[int], str], unit: str, title: str, note: str = "") -> Figure:
    """The weights of one tensor at up to six moments, and its centroids, which are followed from one to the next.

    `moment` gives the text beside the histogram of a step, and `unit` what it counts.
    """
    count = min(MOMENTS, len(records))
    shown = [records[round(i * (len(records) - 1) / max(1, count - 1))] for i in range(count)]
    ranges = [middle(record.edges, record.counts) for record in shown]
    low, high = min(a for a, _ in ranges), max(b for _, b in ranges)
    low, high = (low, high) if high > low else (low - 1, high + 1)

    def across(value: float) -> float:
        return round(MARGIN + (value - low) / (high - low) * (WIDTH - MARGIN - RIGHT), 1)

    drawn: list[Markup] = []
    places: list[list[Point | None]] = []  # of the centroids, in every histogram; None: outside of the picture
    for i, record in enumerate(shown):
        base = TOP + (i + 1) * ROW - 8
        outline = _outline(record, base, low, high, across)
        drawn.append(Markup('<path class="weights" d="{}Z"/>').format(path_data(outline)))
        drawn.append(Markup('<path class="grid" d="M{} {}H{}"/>').format(MARGIN, base, WIDTH - RIGHT))
        label = moment(record.step)
        label = f"{unit} {label}" if i == 0 else label
        drawn += [svg_text(MARGIN - 6, base - 2, "end", label)] if len(shown) > 1 else []
        places.append([(across(c), base) if low <= c <= high else None for c in record.centroids])
    drawn += _centroids(places)
    bottom = TOP + len(shown) * ROW - 8
    for tick in linear_axis(low, high).ticks:
        if low <= tick <= high:
            drawn.append(svg_text(across(tick), bottom + 16, "middle", tick_text(tick, 7)))
    return Figure(title, svg(bottom + 22, drawn, f"weights of {shown[0].name}"), note=note)


def _outline(record: Histogram, base: float, low: float, high: float, across: Callable[[float], float]) -> list[Point]:
    """The outline of a histogram whose bottom is at `base`, cut off at `low` and `high`."""
    top = max(record.counts) or 1
    outline = [(across(max(low, min(high, record.edges[0]))), float(base))]
    for (left, right), count in zip(pairwise(record.edges), record.counts, strict=True):
        if right >= low and left <= high:
            y = round(base - count / top * (ROW - 12), 1)
            outline += [(across(max(low, left)), y), (across(min(high, right)), y)]
    outline.append((outline[-1][0], float(base)))
    return outline


def _centroids(places: list[list[Point | None]]) -> list[Markup]:
    """A line for each centroid in each histogram, and those that join the places of one centroid."""
    many = max(map(len, places)) > MANY
    look, length = ("centroid many", 10) if many else ("centroid", ROW - 12)
    drawn = []
    for above, below in () if many else pairwise(places):  # a centroid keeps its number
        for start, end in zip(above, below, strict=False):
            if start and end:
                way = Markup('<path class="way" d="M{} {}L{} {}"/>')
                drawn.append(way.format(start[0], start[1], end[0], end[1] - ROW + 12))
    for place in (place for row in places for place in row if place is not None):
        drawn.append(Markup('<path class="{}" d="M{} {}v-{}"/>').format(look, place[0], place[1], length))
    return drawn


def middle(edges: list[float], counts: list[float]) -> tuple[float, float]:
    """Where all but a thousandth of the weights are: one far weight must not flatten the others."""
    total, before, low, high = sum(counts), 0.0, edges[0], edges[-1]
    for (left, right), count in zip(pairwise(edges), counts, strict=True):
        if before <= total * CUT_OFF:
            low = left
        if before < total * (1 - CUT_OFF):
            high = right
        before += count
    return low, high
