"""Curves over the training, as SVG.  Colours and line widths are in `templates/style.css`."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from markupsafe import Markup

from .axes import Axis, linear_axis, log_axis, tick_text

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 34  # margins
MAX_POINTS = 240  # of a curve: more would be finer than a pixel
MAX_MARKS = 40  # points of a curve that are drawn as circles

Point = tuple[float, float]
Points = list[Point]


@dataclass(frozen=True)
class Line:
    """A curve.  `look` is its class in `templates/style.css`: "a" to "e" are colours, "thin" and "dashed" strokes."""

    label: str
    look: str
    points: Points
    value: str = ""  # for the legend
    marks: bool = False  # a circle at each point
    band: tuple[Points, Points] = field(default=([], []))  # the lowest and the highest values, shaded behind the curve


@dataclass(frozen=True)
class Figure:
    """A picture with what the page writes around it."""

    title: str
    svg: Markup
    legend: Sequence[Line] = ()
    note: str = ""


def chart(
    title: str,
    lines: Iterable[Line],
    unit: str,
    note: str = "",
    *,
    log: bool = False,
    from_zero: bool = False,
) -> Figure | None:
    """The curves over the training; None where there are no points, or none but those of the start.

    `unit` names what is counted along the training.  The vertical axis is logarithmic with `log`, and starts at 0 with
    `from_zero`.
    """
    lines = [line for line in lines if line.points]
    points = [p for line in lines for p in (*line.points, *line.band[0], *line.band[1]) if not log or p[1] > 0]
    end = max((x for x, _ in points), default=0.0)
    if not end:
        return None
    low, high = min(y for _, y in points), max(y for _, y in points)
    axis = log_axis(low, high) if log else linear_axis(0.0 if from_zero else low, high)
    scale: Callable[[float], float] = math.log10 if log else float

    def place(point: Point) -> Point:
        share = (scale(max(point[1], axis.low)) - scale(axis.low)) / (scale(axis.high) - scale(axis.low))
        x, y = LEFT + point[0] / end * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    drawn = _axes(axis, end, unit, place)
    for line in lines:
        if line.band[0]:
            edge = [*map(place, thinned(line.band[0])), *map(place, reversed(thinned(line.band[1])))]
            drawn.append(Markup('<path class="band {}" d="{}Z"/>').format(line.look, path_data(edge)))
    for line in lines:
        drawn += _curve(line, unit, place)
    return Figure(title, svg(HEIGHT, drawn, title), lines, note)


def _axes(axis: Axis, end: float, unit: str, place: Callable[[Point], Point]) -> list[Markup]:
    """The grid with the numbers beside it, and those below it up to `end`."""
    drawn = []
    for tick in axis.ticks:
        y = place((0, tick))[1]
        drawn.append(Markup('<path class="grid" d="M{} {}H{}"/>').format(LEFT, y, WIDTH - RIGHT))
        drawn.append(svg_text(LEFT - 6, y + 4, "end", tick_text(tick)))
    for tick in linear_axis(0.0, end).ticks:
        if tick <= end * 1.001:
            drawn.append(svg_text(place((tick, axis.high))[0], HEIGHT - BOTTOM + 16, "middle", tick_text(tick, 7)))
    drawn.append(svg_text(WIDTH - RIGHT, HEIGHT - 3, "end", unit))
    return drawn


def _curve(line: Line, unit: str, place: Callable[[Point], Point]) -> list[Markup]:
    points = thinned(line.points)
    placed = [place(point) for point in points]
    drawn = [Markup('<path class="line {}" d="{}"/>').format(line.look, path_data(placed))]
    if len(placed) == 1 or (line.marks and len(placed) <= MAX_MARKS):
        circle = Markup('<circle class="{}" cx="{}" cy="{}" r="3"><title>{}</title></circle>')
        for (x, y), point in zip(placed, points, strict=True):
            tip = f"{line.label}, {unit} {point[0]:.3g}: {point[1]:.4g}"
            drawn.append(circle.format(line.look, x, y, tip))
    return drawn


def svg(height: float, drawn: Iterable[Markup], label: str, *, width: float = WIDTH) -> Markup:
    """The picture of these elements; `label` is for readers who cannot see it."""
    start = Markup('<svg viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">').format(width, height, label)
    return start + Markup("").join(drawn) + Markup("</svg>")


def svg_text(x: float, y: float, anchor: str, text: str) -> Markup:
    """A text whose start, middle or end, as `anchor` says, is at `x`."""
    return Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


def path_data(placed: Iterable[Point]) -> str:
    """Straight lines from point to point."""
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in placed)


def thinned(points: Points) -> Points:
    """At most MAX_POINTS points: the first, the last, and between them the means of neighbouring ones."""
    if len(points) <= MAX_POINTS:
        return points
    bounds = [round(1 + i * (len(points) - 2) / (MAX_POINTS - 2)) for i in range(MAX_POINTS - 1)]
    groups = [points[a:b] for a, b in pairwise(bounds)]
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return [points[0], *means, points[-1]]
