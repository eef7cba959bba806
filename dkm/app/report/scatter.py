"""What runs measured against the size of their files, as SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from .axes import Axis, linear_axis, log_axis, tick_text
from .charts import RIGHT, TOP, Figure, Point, path_data, svg, svg_text

WIDE, NARROW = 900, 420  # the picture is drawn twice, because a label keeps its size where the page becomes narrow
HEIGHT = 380
LEFT, BOTTOM = 56, 44
LABEL = 13  # the height of a line of text
CHARACTER = 6.6  # the width of one, about
FAR_APART = 3.0  # sizes that lie this many times apart have a logarithmic axis

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Dot:
    """A run."""

    label: str
    look: str  # its class in `templates/style.css`
    size: float  # bytes
    value: float
    error: float | None  # the standard error of the value
    tip: str  # what is shown where a pointer rests


def scatter(title: str, dots: Sequence[Dot], *, level: float | None, lower_is_better: bool, note: str) -> Figure | None:
    """The dots with their standard errors; None where there are none.

    A line joins the dots that no other dot beats in both ways, and a dashed one is at `level`: the value of the
    uncompressed model.
    """
    if not dots:
        return None
    best = unbeaten(dots, lower_is_better)
    drawn = [
        Markup('<div class="{}">{}</div>').format(look, _picture(title, dots, best, level, width))
        for look, width in (("if-wide", WIDE), ("if-narrow", NARROW))
    ]
    return Figure(title, Markup("").join(drawn), note=note)


def _picture(title: str, dots: Sequence[Dot], best: Sequence[Dot], level: float | None, width: float) -> Markup:
    ends = [end for dot in dots for end in (dot.value - (dot.error or 0), dot.value + (dot.error or 0))]
    vertical = linear_axis(min([*ends, *_known(level)]), max([*ends, *_known(level)]))
    across = _size_axis([dot.size for dot in dots])
    is_log = across.low > 0 and across.high > FAR_APART * across.low
    right, floor = width - RIGHT - 8, HEIGHT - BOTTOM

    def x(size: float) -> float:
        low, high, at = (math.log(value) if is_log else value for value in (across.low, across.high, size))
        return round(LEFT + (at - low) / (high - low) * (right - LEFT), 1)

    def y(value: float) -> float:
        share = (value - vertical.low) / (vertical.high - vertical.low)
        return round(floor - share * (floor - TOP), 1)

    drawn = [Markup('<path class="grid" d="M{} {}H{}"/>').format(LEFT, y(tick), right) for tick in vertical.ticks]
    drawn += [svg_text(LEFT - 8, y(tick) + 4, "end", tick_text(tick)) for tick in vertical.ticks]
    for tick in across.ticks:
        anchor = "end" if x(tick) > right - 20 else "middle"
        drawn.append(svg_text(x(tick) + (8 if anchor == "end" else 0), floor + 18, anchor, _bytes_text(tick)))
    drawn.append(svg_text(right + 8, HEIGHT - 6, "end", "size of the file"))
    taken = [(x(dot.size) - 6, y(dot.value) - 6, x(dot.size) + 6, y(dot.value) + 6) for dot in dots]
    for value in _known(level):
        drawn.append(Markup('<path class="line plain dashed" d="M{} {}H{}"/>').format(LEFT, y(value), right))
        low = y(value) + (-6 if y(value) > TOP + LABEL else LABEL + 3)
        drawn.append(svg_text(LEFT + 4, low, "start", "not compressed"))
        taken += [(LEFT, y(value) - 1, right, y(value) + 1), _box(LEFT + 4, low, "start", "not compressed")]
    if len(best) > 1:
        line = path_data((x(dot.size), y(dot.value)) for dot in best)
        drawn.append(Markup('<path class="line thin plain" d="{}"/>').format(line))
    for dot in dots:
        drawn += _drawn(dot, (x(dot.size), y(dot.value)), [y(dot.value + side * (dot.error or 0)) for side in (1, -1)])
    for dot in dots:
        drawn.append(_label(dot.label, (x(dot.size), y(dot.value)), taken, width))
    return svg(HEIGHT, drawn, title, width=width)


def unbeaten(dots: Sequence[Dot], lower_is_better: bool) -> list[Dot]:
    """The dots to which no other one is both smaller and better, from the smallest to the largest."""
    found: list[Dot] = []
    sign = -1 if lower_is_better else 1
    for dot in sorted(dots, key=lambda dot: (dot.size, -sign * dot.value)):
        if not found or sign * dot.value > sign * found[-1].value:
            found.append(dot)
    return found


def _known(value: float | None) -> list[float]:
    return [] if value is None else [value]


def _size_axis(sizes: Sequence[float]) -> Axis:
    low, high = min(sizes), max(sizes)
    return log_axis(low, high) if low > 0 and high > FAR_APART * low else linear_axis(low, high)


def _bytes_text(count: float) -> str:
    """A round number of bytes: 250 kB, 1.5 MB."""
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count:g} B"


def _drawn(dot: Dot, place: Point, ends: list[float]) -> list[Markup]:
    drawn = []
    if dot.error:
        bar = Markup('<path class="error {0}" d="M{1} {2}V{3}M{4} {2}h8M{4} {3}h8"/>')
        drawn.append(bar.format(dot.look, place[0], ends[0], ends[1], round(place[0] - 4, 1)))
    circle = Markup('<circle class="{}" cx="{}" cy="{}" r="5"><title>{}</title></circle>')
    return [*drawn, circle.format(dot.look, *place, dot.tip)]


def _label(label: str, place: Point, taken: list[Box], width: float) -> Markup:
    """The label, beside its dot, where it covers nothing as far as that is possible.  Its place is taken afterwards."""
    shifts = [(4, 10), (-9, 8), (18, 8), (-24, 0), (33, 0)]  # down, and to the side
    choices = [
        (place[0] + (side if anchor == "start" else -side), place[1] + down, anchor)
        for down, side in shifts
        for anchor in ("start", "end")
    ]

    def is_inside(box: Box) -> bool:
        return box[0] >= LEFT and box[2] <= width and box[1] >= 0 and box[3] <= HEIGHT - BOTTOM

    def covered(box: Box) -> int:
        return sum(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken)

    boxes = [(_box(at, low, anchor, label), at, low, anchor) for at, low, anchor in choices]
    box, at, low, anchor = min(boxes, key=lambda choice: (not is_inside(choice[0]), covered(choice[0])))
    taken.append(box)
    return svg_text(round(at, 1), round(low, 1), anchor, label)


def _box(at: float, low: float, anchor: str, label: str) -> Box:
    """What a text covers, about."""
    wide = len(label) * CHARACTER
    start = at if anchor == "start" else at - wide
    return start, low - LABEL + 2, start + wide, low + 3
