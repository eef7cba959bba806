"""A run folder -> a page that needs nothing else, and a few lines for the terminal.

`write(run)` makes `RUN/report.html`: one file, no script, no network; light, dark and print follow the reader's
settings.  It reads what is there of `config.toml`, `plan.json`, `log.jsonl` and `result.json`; a run that is still
going, or one without some of these, gets a shorter page.  MB are 2^20 bytes, as in the paper.
"""

import html
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..foundation import jsonl
from .settings import Problem

FILES = ("config.toml", "plan.json", "log.jsonl", "result.json")
BARS = 16  # tensors in the picture of the sizes; the others share a bar
FOLD = 40  # a longer table is folded away on the screen
POINTS = 240  # of a curve: more would be finer than a pixel

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Run:
    """What a run folder holds; what is missing is empty."""

    path: Path
    config: dict[str, Any]
    config_text: str
    plan: dict[str, Any]
    result: dict[str, Any]
    log: dict[str, list[dict[str, Any]]]  # kind -> records by step

    @property
    def name(self) -> str:
        """What was compressed: `resnet18`, of `folder/resnet18` and of `file.py:resnet18`, too."""
        model = str(self.config.get("model") or self.path.resolve().name)
        return model.rstrip("/").rpartition("/")[2].rpartition(":")[2] or model

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for row in self.plan.get("rows") or [] if isinstance(row, dict)]

    @property
    def finished(self) -> bool:
        return bool(self.result.get("finished"))

    @property
    def before(self) -> float | None:
        return number(self.result.get("accuracy_before"))

    @property
    def after(self) -> float | None:
        """The accuracy of the file; of a run still going, the last evaluation's."""
        if self.finished:
            return number(self.result.get("accuracy_after"))
        evaluated = (number(record.get("snapped")) for record in reversed(self.log["eval"]))
        return next((value for value in evaluated if value is not None), None)

    @property
    def untrained(self) -> float | None:
        """The accuracy of k-means alone, before any training step."""
        return next((number(r.get("snapped")) for r in self.log["eval"] if r.get("step") == 0), None)

    @property
    def dense(self) -> float | None:
        return number(self.result.get("bytes_dense")) or number(self.plan.get("dense_bytes"))

    @property
    def paper(self) -> float | None:
        """Bytes as the paper counts: codes, and 16 bit for every other parameter."""
        return number(self.result.get("bytes_paper")) or number(self.plan.get("bytes"))

    @property
    def small(self) -> float | None:
        """Bytes of the file; until there is one, as the paper counts."""
        return number(self.result.get("bytes_file")) or self.paper

    @property
    def ratio(self) -> float | None:
        return self.dense / self.small if self.dense and self.small else None

    @property
    def last(self) -> dict[str, Any]:
        """The latest step that was logged: its number and its epoch."""
        steps = [r for kind in ("step", "eval", "layers") for r in self.log[kind]]
        return max(steps, key=lambda record: record["step"], default={})

    def time(self, record: dict[str, Any]) -> float:
        """Where a record stands in the training: its epoch, where epochs are known."""
        return record["step"] * self.epochs_per_step if self.epochs_per_step else record["step"]

    @property
    def unit(self) -> str:
        return "epoch" if self.epochs_per_step else "step"

    @property
    def epochs_per_step(self) -> float:
        known = [r for kind in ("step", "eval") for r in self.log[kind] if r["step"] and number(r.get("epoch"))]
        return max((r["epoch"] / r["step"] for r in known[-1:]), default=0.0)


def number(value: Any) -> float | None:
    """A finite number, or None."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return value if real and math.isfinite(value) else None


def read(path: str | os.PathLike) -> Run:
    """A run folder.  An error where there is none, or where a file in it is not what it should be."""
    path = Path(path)
    if not path.is_dir():
        raise Problem(f"there is no run folder {path}: name one that dkm compress wrote")
    if not any((path / name).exists() for name in FILES):
        raise Problem(f"{path} is not a run folder: it has none of {', '.join(FILES)}")
    text = _text(path / "config.toml")
    try:
        config = tomllib.loads(text)
        records = jsonl.read(path / "log.jsonl")
    except tomllib.TOMLDecodeError as error:
        raise Problem(f"{path / 'config.toml'} is not TOML: {error}") from None
    except ValueError as error:
        raise Problem(str(error)) from None
    log: dict[str, dict[tuple, dict]] = {kind: {} for kind in ("step", "eval", "layers", "histogram")}
    for record in records:
        # a step that was repeated after a crash counts once, the last time
        if record.get("kind") in log and isinstance(record.get("step"), int):
            log[record["kind"]][record["step"], str(record.get("name"))] = record
    ordered = {kind: sorted(found.values(), key=lambda record: record["step"]) for kind, found in log.items()}
    return Run(path, config, text, _json(path / "plan.json"), _json(path / "result.json"), ordered)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path) or "{}")
    except ValueError as error:
        raise Problem(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Problem(f"{path} should hold a JSON object, and holds {type(found).__name__}")
    return found


# --- words ---------------------------------------------------------------------------------------


def size_text(count: float) -> str:
    """1.09 MB, 12.3 kB, 812 B."""
    if count >= 2**20:
        return f"{count / 2**20:,.2f} MB"
    return f"{count / 2**10:.1f} kB" if count >= 2**10 else f"{count:.0f} B"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.1f}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _points(difference: float) -> str:
    """A difference of accuracies; the minus is a minus."""
    return f"{difference:+.2f}".replace("-", "−")


def _gap(run: Run) -> float | None:
    return next((number((r.get("total") or {}).get("gap")) for r in reversed(run.log["layers"])), None)


def summary(run: str | os.PathLike) -> str:
    """The run in a few lines of at most 80 columns."""
    run = read(run)
    plan = run.plan.get("text")
    lines = [f"{run.name}, {plan}" if plan else run.name]
    if run.after is not None:
        more = [] if run.before is None else [f"was {run.before:.2f} %", f"{run.after - run.before:+.2f}"]
        more += [] if run.untrained is None else [f"k-means alone {run.untrained:.2f}"]
        lines.append(f"  accuracy  {f'{run.after:.2f} %':<14}" + ", ".join(more))
    if run.small:
        more = [f"was {size_text(run.dense)}", f"{_ratio_text(run.ratio)}x smaller"] if run.ratio else []
        more += [f"paper's count {size_text(run.paper)}"] if run.finished and run.paper else []
        lines.append(f"  size      {size_text(run.small):<14}" + ", ".join(more))
    if run.last:
        steps, seconds = run.last["step"], number(run.result.get("seconds"))
        more = [f"in {_duration(seconds)}"] if seconds is not None else []
        more += [f"snapping changes weights by {_percent(_gap(run))}"] if _gap(run) is not None else []
        lines.append(f"  trained   {f'{steps:,} steps':<14}" + ", ".join(more))
    if not run.finished:
        lines.append("  not finished")
    return "\n".join(line if len(line) <= 80 else line[:79] + "…" for line in map(str.rstrip, lines))


# --- pictures: SVG whose colours are the page's ---------------------------------------------------

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 34


@dataclass(frozen=True)
class Line:
    """A curve: `look` names its colour in the style sheet."""

    label: str
    look: str
    points: Points
    value: str = ""  # for the legend
    marks: bool = False
    band: tuple[Points, Points] = field(default=([], []))  # lowest and highest, drawn behind


def chart(
    title: str, lines: Iterable[Line], unit: str, note: str = "", *, log: bool = False, floor: bool = False
) -> str:
    """Curves over the training, as a figure; nothing where there are no points.  `floor`: the axis starts at 0."""
    lines = [line for line in lines if line.points]
    points = [p for line in lines for p in (*line.points, *line.band[0], *line.band[1]) if not log or p[1] > 0]
    if not points:
        return ""
    scale = math.log10 if log else float
    low, high = min(y for _, y in points), max(y for _, y in points)
    ticks, low, high = _log_ticks(low, high) if log else _ticks(0.0 if floor else low, high)
    end = max(x for x, _ in points) or 1.0

    def place(point: tuple[float, float]) -> tuple[float, float]:
        share = (scale(max(point[1], low)) - scale(low)) / (scale(high) - scale(low))
        x, y = LEFT + point[0] / end * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    drawn = []
    for tick in ticks:
        y = place((0, tick))[1]
        drawn.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{_tick(tick)}</text>')
    for tick in _ticks(0.0, end)[0]:
        if tick <= end * 1.001:
            x = place((tick, high))[0]
            drawn.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_tick(tick, 7)}</text>')
    drawn.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{html.escape(unit)}</text>')
    for line in lines:
        if line.band[0]:
            outline = [*map(place, _thin(line.band[0])), *map(place, reversed(_thin(line.band[1])))]
            drawn.append(f'<path class="band {line.look}" d="{_path(outline)}Z"/>')
    for line in lines:
        placed = [place(point) for point in _thin(line.points)]
        marked = len(placed) == 1 or (line.marks and len(placed) <= 40)
        drawn.append(f'<path class="line {line.look}" d="{_path(placed)}"/>')
        for (x, y), point in zip(placed, _thin(line.points), strict=True) if marked else ():
            tip = html.escape(f"{line.label}, {unit} {point[0]:.3g}: {point[1]:.4g}")
            drawn.append(f'<circle class="{line.look}" cx="{x}" cy="{y}" r="3"><title>{tip}</title></circle>')
    legend = "".join(
        f'<li><i class="{line.look}"></i>{html.escape(line.label)}'
        + (f" <b>{html.escape(line.value)}</b></li>" if line.value else "</li>")
        for line in lines
    )
    return _figure(title, legend, _svg(HEIGHT, drawn, title), note)


def _figure(title: str, legend: str, picture: str, note: str) -> str:
    legend = f"<ul>{legend}</ul>" if legend else ""
    note = f"<figcaption>{html.escape(note)}</figcaption>" if note else ""
    return f"<figure><h3>{_name(title)}</h3>{legend}{picture}{note}</figure>"


def _svg(height: float, drawn: Sequence[str], title: str) -> str:
    label = html.escape(title)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'


def _path(placed: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in placed)


def _thin(points: Points) -> Points:
    """At most POINTS of them, each the mean of its neighbours; the first and the last stay."""
    if len(points) <= POINTS:
        return points
    bounds = [round(1 + i * (len(points) - 2) / (POINTS - 2)) for i in range(POINTS - 1)]
    groups = [points[a:b] for a, b in pairwise(bounds)]
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return [points[0], *means, points[-1]]


def _tick(value: float, room: int = 5) -> str:
    text = f"{value:,.10g}"
    if len(text.lstrip("-")) <= room and "e" not in text:
        return text
    power = math.floor(math.log10(abs(value)) + 1e-9)
    return f"{value / 10.0**power:.3g}e{power}"


def _ticks(low: float, high: float) -> tuple[list[float], float, float]:
    """Four or so round numbers, and the range that they span; it holds low and high."""
    most = max(abs(low), abs(high))
    if high - low <= 1e-9 * most or most < 1e-30:  # as good as equal: a flat line in the middle
        room = most / 10 if most >= 1e-30 else 1.0
        low, high = low - room, high + room
    size = (high - low) / 4
    power = 10 ** math.floor(math.log10(size))
    size = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= size * 0.999)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    ticks = [float(f"{i * size:.12g}") for i in range(first, last + 1)]
    return ticks, ticks[0], ticks[-1]


def _log_ticks(low: float, high: float) -> tuple[list[float], float, float]:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    if last - first < 2:  # a decade or two: 1, 2, 5, 10
        fine = [f * 10.0**p for p in range(first - 1, last + 1) for f in (1, 2, 5, 10)]
        below = max(t for t in fine if t <= low * 1.0001)
        above = min(t for t in fine if t >= high * 0.9999 and t > below)
        ticks = sorted({float(f"{t:.3g}") for t in fine if below <= t <= above})
    else:
        every = -(-(last - first) // 5)
        ticks = [10.0**p for p in range(first, last + 1, every)]
        ticks += [ticks[-1] * 10.0**every] if ticks[-1] < high else []
    return ticks, ticks[0], ticks[-1]


ROW = 52  # the height of one histogram


def ridges(
    name: str, records: list[dict[str, Any]], time: Callable[[dict], float], unit: str, title: str, note: str
) -> str:
    """A tensor's weights at up to six moments, one below the other; its centroids go through them."""
    records = [r for r in records if _is_histogram(r)]
    if not records:
        return ""
    count = min(6, len(records))
    shown = [records[round(i * (len(records) - 1) / max(1, count - 1))] for i in range(count)]
    ranges = [_middle(r["edges"], r["counts"]) for r in shown]
    low, high = min(a for a, _ in ranges), max(b for _, b in ranges)
    low, high = (low, high) if high > low else (low - 1, high + 1)
    margin = 64

    def across(value: float) -> float:
        return round(margin + (value - low) / (high - low) * (WIDTH - margin - RIGHT), 1)

    drawn, ways = [], []
    for i, record in enumerate(shown):
        base = TOP + (i + 1) * ROW - 8
        top = max(record["counts"]) or 1
        outline = [(across(max(low, min(high, record["edges"][0]))), float(base))]
        for (left, right), bin_count in zip(pairwise(record["edges"]), record["counts"], strict=True):
            if right >= low and left <= high:
                y = round(base - bin_count / top * (ROW - 12), 1)
                outline += [(across(max(low, left)), y), (across(min(high, right)), y)]
        outline.append((outline[-1][0], float(base)))
        drawn.append(f'<path class="weights" d="{_path(outline)}Z"/>')
        drawn.append(f'<path class="grid" d="M{margin} {base}H{WIDTH - RIGHT}"/>')
        moment = f"{time(record):.3g}" if unit == "epoch" else f"{record['step']:,}"
        moment = f"{unit} {moment}" if i == 0 else moment
        drawn.append(f'<text x="{margin - 6}" y="{base - 2}" text-anchor="end">{html.escape(moment)}</text>')
        ways.append([(across(c), base) if low <= c <= high else None for c in record["centroids"]])
    many = max(map(len, ways)) > 32  # as ticks: lines would hide the histogram
    look, length = ("centroid many", 10) if many else ("centroid", ROW - 12)
    for above, below in () if many else pairwise(ways):  # a centroid keeps its number: follow it
        joined = [(a, b) for a, b in zip(above, below, strict=False) if a and b]
        drawn += [f'<path class="way" d="M{x} {y}L{z} {base - ROW + 12}"/>' for (x, y), (z, base) in joined]
    for place in filter(None, (place for way in ways for place in way)):
        drawn.append(f'<path class="{look}" d="M{place[0]} {place[1]}v-{length}"/>')
    bottom = TOP + len(shown) * ROW - 8
    for tick in _ticks(low, high)[0]:
        if low <= tick <= high:
            drawn.append(f'<text x="{across(tick)}" y="{bottom + 16}" text-anchor="middle">{_tick(tick, 7)}</text>')
    return _figure(title, "", _svg(bottom + 22, drawn, f"weights of {name}"), note)


def _is_histogram(record: dict[str, Any]) -> bool:
    lists = [record.get(key) for key in ("edges", "counts", "centroids")]
    if not all(isinstance(values, list) and all(number(v) is not None for v in values) for values in lists):
        return False
    return len(lists[0]) == len(lists[1]) + 1 > 1


def _middle(edges: list[float], counts: list[float]) -> tuple[float, float]:
    """Where all but a thousandth of the weights are: one far weight must not flatten the others."""
    total, before, low, high = sum(counts), 0.0, edges[0], edges[-1]
    for (left, right), bin_count in zip(pairwise(edges), counts, strict=True):
        if before <= total * 5e-4:
            low = left
        if before < total * (1 - 5e-4):
            high = right
        before += bin_count
    return low, high


# --- the page ------------------------------------------------------------------------------------


def write(run: str | os.PathLike) -> Path:
    """Write `RUN/report.html`, whole or not at all; returns its path."""
    run = read(run)
    target, part = run.path / "report.html", run.path / f".report.{os.getpid()}.html"
    try:
        part.write_text(page(run), encoding="utf-8")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


def page(run: Run) -> str:
    """The whole page, as text."""
    parts = [_head(run), _training(run), _sizes(run), _weights(run), _clustering(run), _plan(run), _again(run)]
    title = html.escape(f"{run.name}, compressed with dkm")
    return PAGE.format(title=title, style=STYLE, body="\n".join(part for part in parts if part))


def _head(run: Run) -> str:
    tiles = []
    if run.after is not None:
        change = "" if run.before is None else f"{_points(run.after - run.before)}, was {run.before:.2f}&nbsp;%"
        tiles.append(("accuracy", f"{run.after:.2f}<small>%</small>", change))
    if run.small:
        amount, unit = size_text(run.small).split()
        tiles.append(("size", f"{amount}<small>{unit}</small>", f"was {size_text(run.dense)}" if run.dense else ""))
    if run.ratio:
        bits = f"{32 / run.ratio:.2f} bits a parameter"
        tiles.append(("smaller", f"{_ratio_text(run.ratio)}<small>×</small>", bits))
    cells = "".join(f'<div><h2>{n}</h2><p class="big">{big}</p><p>{more}</p></div>' for n, big, more in tiles)
    bars = ""
    if run.ratio:
        bars = (
            '<div class="compare" role="img" aria-label="the size before and after, as bars">'
            f'<div class="before"><b></b></div><div class="after">'
            f'<b style="width:{100 / run.ratio:.3f}%"></b></div></div>'
        )
    state = "" if run.finished else f'<p class="state">{html.escape(_unfinished(run))}</p>'
    text = run.plan.get("text")
    kicker = f"<p class=kicker>compressed with dkm{f', <code>{html.escape(str(text))}</code>' if text else ''}</p>"
    cells = f'<section class="tiles">{cells}</section>' if cells else ""
    sentence = html.escape(_sentence(run)).replace(" %", "&nbsp;%")
    heading = f"{kicker}<h1>{html.escape(run.name)}</h1>{state}<p class=lead>{sentence}</p>"
    return f"<header>{heading}</header>{cells}{bars}"


def _unfinished(run: Run) -> str:
    if not run.last:
        return "Not trained yet."
    epochs = number(run.config.get("epochs"))
    where = f"epoch {run.time(run.last):.1f}" if run.unit == "epoch" else f"step {run.last['step']:,}"
    of = f" of {epochs:g}" if epochs and run.unit == "epoch" else ""
    return f"Not finished: {where}{of}. The figures are the latest."


def _sentence(run: Run) -> str:
    """What a colleague should know, in words."""
    words = []
    if run.ratio:
        words.append(
            f"The file {'takes' if run.finished else 'will take about'} {size_text(run.small)}; in float32 the "
            f"network’s parameters took {size_text(run.dense)}, {_ratio_text(run.ratio)} times as much."
        )
    if run.after is not None:
        words.append(f"The network answers {run.after:.2f} % of the evaluation examples correctly.")
        if run.before is not None:
            words[-1] = words[-1][:-1] + f"; the original answered {run.before:.2f} %."
        if run.untrained is not None and run.log["eval"][-1]["step"] > 0:
            words.append(f"Clustering the same weights without training would give {run.untrained:.2f} %.")
    if run.finished and run.paper and run.dense:
        words.append(
            f"As the paper counts, without the file’s names and running statistics, the size is "
            f"{size_text(run.paper)}: {_ratio_text(run.dense / run.paper)} times less."
        )
    return " ".join(words)


def _curve(run: Run, records: list[dict[str, Any]], key: str) -> Points:
    return [(run.time(r), number(r.get(key))) for r in records if number(r.get(key)) is not None]


def _last(points: Points, form: str) -> str:
    return format(points[-1][1], form) if points else ""


def _training(run: Run) -> str:
    evaluated, steps = run.log["eval"], run.log["step"]
    snapped, soft = _curve(run, evaluated, "snapped"), _curve(run, evaluated, "soft")
    lines = [
        Line("train-time weights", "b", soft, _last(soft, ".2f"), True),
        Line("snapped, as in the file", "a", snapped, _last(snapped, ".2f"), True),
    ]
    if run.before is not None and snapped:
        end = max(snapped[-1][0], 1e-9)
        lines.append(Line("before", "plain dashed", [(0, run.before), (end, run.before)], f"{run.before:.2f}"))
    loss, held = _curve(run, steps, "loss"), _curve(run, evaluated, "loss")
    losses = [Line("training", "b", loss, _last(loss, ".3g")), Line("evaluation", "a", held, _last(held, ".3g"), True)]
    note = "Train-time weights are averages of centroids; snapped ones are each weight’s nearest centroid."
    positive = [y for line in losses for _, y in line.points if y > 0]
    wide = bool(positive) and len(positive) == len(loss) + len(held) and max(positive) > 30 * min(positive)
    charts = [chart("Accuracy, %", lines, run.unit, note), chart("Loss", losses, run.unit, log=wide)]
    return _section("Training", "", charts)


def _section(title: str, text: str, figures: Sequence[str]) -> str:
    figures = [figure for figure in figures if figure]
    text = f"<p>{html.escape(text)}</p>" if text else ""
    return f'<section><h2>{title}</h2>{text}<div class="grid">{"".join(figures)}</div></section>' if figures else ""


def _sizes(run: Run) -> str:
    sized = [(number(row.get("bytes")) or 0, row) for row in run.rows]
    total = sum(count for count, _ in sized)
    if not total:
        return ""
    sized.sort(key=lambda pair: -pair[0])
    shown = [(n, row) for n, row in sized[:BARS] if row.get("bits") is not None or n >= 0.005 * total]
    rest = sized[len(shown) :]
    if len(rest) == 1:
        shown, rest = sized, []
    top = max(shown[0][0], sum(count for count, _ in rest))
    bars = [_bar(str(row.get("name")), _fine(row), count, top, total, row.get("bits") is None) for count, row in shown]
    if rest:
        bars.append(_bar(f"{len(rest):,} smaller tensors", "", sum(count for count, _ in rest), top, total, True))
    codes, tables = 0.0, 0.0
    for row in run.rows:
        if number(row.get("bits")) is not None:
            weights, dim = math.prod(row.get("shape") or [0]), number(row.get("dim")) or 1
            codes += -(-weights // dim) * row["bits"] / 8
            tables += 2 ** row["bits"] * dim * 2
    kept = max(0.0, total - codes - tables)
    shares = [("a", "codes", codes), ("b", "centroids", tables), ("plain", "not clustered", kept)]
    stack = "".join(f'<b class="{look}" style="width:{100 * part / total:.3f}%"></b>' for look, _, part in shares)
    legend = "".join(f'<li><i class="{look}"></i>{n} <b>{size_text(part)}</b></li>' for look, n, part in shares)
    return (
        f'<section><h2>Size by layer</h2><figure class="wide"><ul>{legend}</ul><div class="stack">{stack}</div>'
        f'<div class="bars">{"".join(bars)}</div></figure></section>'
    )


def _bar(name: str, fine: str, count: float, top: float, total: float, kept: bool) -> str:
    look = "plain" if kept else "a"
    return (
        f'<span class="name">{_name(name)}</span><span class="fine">{html.escape(fine)}</span>'
        f'<span class="track"><b class="{look}" style="width:{100 * count / top:.2f}%"></b></span>'
        f'<span class="amount">{size_text(count)}</span><span class="share">{100 * count / total:.1f} %</span>'
    )


def _name(name: str) -> str:
    """A tensor's name; it may break at its dots."""
    return html.escape(name).replace(".", ".<wbr>")


def _fine(row: dict[str, Any]) -> str:
    return "keep" if row.get("bits") is None else f"{row['bits']}/{row.get('dim', 1)}"


def _weights(run: Run) -> str:
    tensors: dict[str, list[dict]] = {}
    for record in run.log["histogram"]:
        tensors.setdefault(str(record.get("name")), []).append(record)
    dims = {str(row.get("name")): (_fine(row), number(row.get("dim")) or 1) for row in run.rows}
    figures = []
    for name, records in tensors.items():
        fine, dim = dims.get(name, ("", 1))
        title, note = f"{name}, {fine}" if fine else name, f"Of every {dim} weights the first." if dim > 1 else ""
        figures.append(ridges(name, records, run.time, run.unit, title, note))
    text = (
        "How the weights gather around their centroids while they train: a histogram of the weights at some moments, "
        "from the start, above, to the end. The lines are the centroids."
    )
    return _section("Weights through time", text, figures)


def _clustering(run: Run) -> str:
    """The paper's figures 8 and 9, from the records of the monitor."""
    records = [r for r in run.log["layers"] if isinstance(r.get("tensors"), dict) and r["tensors"]]
    if len(records) < 2:
        return ""
    names = list(records[-1]["tensors"])
    chosen = [names[round(i * (len(names) - 1) / 3)] for i in range(4)] if len(names) > 4 else names
    looks = ("b", "c", "d", "e")

    def values(record: dict, key: str) -> list[float]:
        found = (number(numbers.get(key)) for numbers in record["tensors"].values() if isinstance(numbers, dict))
        return [value for value in found if value is not None]

    def lines(key: str, total: Callable[[dict], float | None], label: str, form: str, factor: float = 1) -> list[Line]:
        """The chosen tensors, and over them the whole network."""
        drawn = []
        for name, look in zip(chosen, looks, strict=False) if len(names) > 1 else ():
            own = [(run.time(r), number((r["tensors"].get(name) or {}).get(key))) for r in records]
            own = [(x, y * factor) for x, y in own if y is not None]
            drawn.append(Line(name, look + " thin", own, _last(own, form)))
        whole = [(run.time(r), total(r)) for r in records]
        whole = [(x, y * factor) for x, y in whole if y is not None]
        spread = [(run.time(r), values(r, key)) for r in records]
        band = ([(x, min(v) * factor) for x, v in spread if v], [(x, max(v) * factor) for x, v in spread if v])
        return [*drawn, Line(label, "a", whole, _last(whole, form), band=band if len(names) > 1 else ([], []))]

    def mean(key: str) -> Callable[[dict], float | None]:
        return lambda r: sum(v) / len(v) if (v := values(r, key)) else None

    def whole(key: str) -> Callable[[dict], float | None]:
        return lambda r: number((r.get("total") or {}).get(key))

    every = "all layers together" if len(names) > 1 else names[0]
    average = "mean of all layers" if len(names) > 1 else names[0]
    band = " Shaded: from the lowest layer to the highest." if len(names) > 1 else ""
    charts = [
        chart(
            "Snap gap, %", lines("gap", whole("gap"), every, ".2g", 100), run.unit,
            "By how much snapping changes the weights: |train-time − snapped| / |train-time|." + band, log=True,
        ),
        chart(
            "Iterations", lines("iterations", mean("iterations"), average, ".3g"), run.unit,
            "How many rounds of clustering a training step took before the centroids stood still." + band, floor=True,
        ),
        chart(
            "Codes that changed, %", lines("changed", whole("changed"), every, ".2g", 100), run.unit,
            "Vectors whose nearest centroid is another one than at the record before." + band, floor=True,
        ),
        chart(
            "Temperature", lines("tau", mean("tau"), average, ".2g"), run.unit,
            "tau: how softly weights are shared between centroids." + band, log=True,
        ),
    ]  # fmt: skip
    return _section("Clustering", "", charts)


def _plan(run: Run) -> str:
    if not run.rows:
        return ""
    last = next((r["tensors"] for r in reversed(run.log["layers"]) if isinstance(r.get("tensors"), dict)), {})
    columns = ["tensor", "shape", "weights", "bits/dim", "bytes"]
    columns += ["entropy", "unused", "snap gap"] if last else []
    lines = []
    for row in run.rows:
        shape = row.get("shape") or []
        cells = ["×".join(map(str, shape)) or "–", f"{math.prod(shape):,}", _fine(row)]
        cells.append(f"{number(row.get('bytes')) or 0:,.0f}")
        if last:
            numbers = last.get(row.get("name")) or {}
            entropy, dead, gap = (number(numbers.get(key)) for key in ("entropy", "dead", "gap"))
            cells.append("" if entropy is None else f"{entropy:.2f}")
            cells.append("" if dead is None else f"{dead:g}")
            cells.append("" if gap is None else _percent(gap))
        line = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        why = html.escape(str(row.get("reason") or ""))
        lines.append(
            f'<tr><td class="name">{html.escape(str(row.get("name")))}</td>{line}<td class="why">{why}</td></tr>'
        )
    head = "".join(f"<th>{column}</th>" for column in columns) + '<th class="why">why</th>'
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    if len(lines) > FOLD:
        long = " class=long" if len(lines) > 5 * FOLD else ""  # not printed: it would be many pages
        table = f"<details{long}><summary>All {len(lines):,} tensors</summary>{table}</details>"
    clustered = sum(row.get("bits") is not None for row in run.rows)
    text = f"{clustered:,} of {len(run.rows):,} tensors are clustered."
    if last:
        text += " Entropy is in bits a code: as many as bits where every centroid is used equally often."
    plan = run.plan.get("text")
    code = f"<pre>{html.escape(str(plan))}</pre>" if plan else ""
    return f"<section><h2>The plan</h2>{code}<p>{text}</p>{table}</section>"


def _again(run: Run) -> str:
    parts = []
    command = run.result.get("command") or run.config.get("command")
    if isinstance(command, list):
        command = " ".join(map(str, command))
    if command:
        parts.append(f"<h2>Run it again</h2><pre>{html.escape(str(command))}</pre>")
    facts = [(key, value) for key, value in _flat(run.result.get("environment") or {})]
    seconds = number(run.result.get("seconds"))
    facts += [("seed", run.result["seed"])] if run.result.get("seed") is not None else []
    facts += [("optimizer steps", f"{run.last['step']:,}")] if run.last else []
    facts += [("time", _duration(seconds))] if seconds is not None else []
    if facts:
        items = "".join(f"<div><dt>{html.escape(str(k))}</dt><dd>{html.escape(str(v))}</dd></div>" for k, v in facts)
        parts.append(f"<h2>Environment</h2><dl>{items}</dl>")
    if run.config_text.strip():
        parts.append(f"<details><summary>Configuration</summary><pre>{html.escape(run.config_text)}</pre></details>")
    return f"<section>{''.join(parts)}</section>" if parts else ""


def _flat(environment: Any) -> list[tuple[str, Any]]:
    return list(environment.items()) if isinstance(environment, dict) else [("environment", environment)]


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

STYLE = """
:root { --fore: #1b2430; --soft: #5c6878; --back: #fbfbfa; --card: #fff; --line: #e3e6ea; --fill: #b9c4d1;
  --a: #c2410c; --b: #2563a8; --c: #0f8a6d; --d: #8a4fa8; --e: #a17a10; }
@media screen and (prefers-color-scheme: dark) {
  :root { --fore: #dbe1e9; --soft: #93a0b0; --back: #0e1217; --card: #161b22; --line: #2a323d; --fill: #4a5868;
    --a: #fb923c; --b: #6cb0f5; --c: #4fcfae; --d: #cf9bea; --e: #e3c25a; }
}
* { box-sizing: border-box; }
body { margin: 0; padding: 2.5rem 1.25rem 4rem; background: var(--back); color: var(--fore);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  -webkit-text-size-adjust: 100%; }
main { max-width: 60rem; margin: 0 auto; }
h1 { font-size: 2.1rem; line-height: 1.15; margin: .1rem 0 .8rem; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 3rem 0 .6rem; }
h3 { font-size: .95rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
p { margin: .5rem 0; max-width: 44rem; }
.kicker { color: var(--soft); font-size: .9rem; margin: 0; }
.lead { font-size: 1.1rem; }
.state { display: inline-block; border: 1px solid var(--a); color: var(--a); border-radius: 4px; padding: .1rem .6rem;
  font-size: .9rem; }
code, pre, .name { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: .86em; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .7rem .9rem; margin: .5rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
.tiles { display: grid; grid-template-columns: repeat(3, 1fr); gap: 0 2rem; margin: 1.8rem 0 1rem; }
.tiles > div { border-top: 2px solid var(--fore); padding-top: .5rem; }
.tiles h2 { font-size: .85rem; font-weight: 500; color: var(--soft); margin: 0; }
.tiles p { margin: 0; color: var(--soft); font-size: .9rem; }
.tiles .big { color: var(--fore); font-size: 3.2rem; line-height: 1.15; font-weight: 600; letter-spacing: -.03em;
  white-space: nowrap; }
.big small { font-size: .42em; font-weight: 500; letter-spacing: 0; margin-left: .15em; color: var(--soft); }
.compare div { height: 10px; margin: 4px 0; }
.compare b, .stack b, .track b { display: block; height: 100%; min-width: 1px; }
.compare .before b { background: var(--fill); }
.compare .after b { background: var(--a); min-width: 2px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1rem;
  min-width: 0; break-inside: avoid; max-width: 60rem; }
.grid figure:only-child { max-width: 34rem; }
figure ul { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: 0 0 .4rem; padding: 0;
  font-size: .82rem; color: var(--soft); }
figure li { overflow-wrap: anywhere; }
figure li b { color: var(--fore); font-weight: 600; font-variant-numeric: tabular-nums; }
figure i { display: inline-block; width: .9em; height: 3px; margin-right: .4em; vertical-align: .25em;
  background: currentColor; }
figure i.dashed { background: repeating-linear-gradient(90deg, currentColor 0 5px, transparent 5px 8px); width: 1.3em; }
figcaption { font-size: .82rem; color: var(--soft); margin-top: .4rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--line); fill: none; }
.line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.line.thin { stroke-width: 1.1; }
.band { fill: currentColor; opacity: .1; }
circle { fill: currentColor; }
.a { color: var(--a); } .b { color: var(--b); } .c { color: var(--c); } .d { color: var(--d); } .e { color: var(--e); }
.plain { color: var(--soft); } .dashed { stroke-dasharray: 5 4; }
.weights { fill: var(--fill); }
.centroid { stroke: var(--a); stroke-width: 1.3; } .centroid.many { stroke-width: .8; opacity: .7; }
.way { stroke: var(--a); stroke-width: .8; opacity: .45; }
.stack { display: flex; height: 14px; margin: 0 0 1rem; gap: 1px; }
.stack b, .track b { background: currentColor; }
.stack .plain, .track .plain { color: var(--fill); }
.wide li .plain { color: var(--fill); }
.bars { display: grid; grid-template-columns: minmax(5rem, max-content) auto 1fr auto auto; gap: .15rem .7rem;
  align-items: center; font-size: .85rem; font-variant-numeric: tabular-nums; }
.bars .name { overflow-wrap: anywhere; font-size: .8rem; }
.bars .track { height: 11px; }
.bars .fine, .bars .share { color: var(--soft); }
.bars .amount, .bars .share { text-align: right; white-space: nowrap; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; background: var(--card); }
table { width: 100%; border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
tbody tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child, .why { text-align: left; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .8rem 1.5rem;
  margin: .5rem 0 1.5rem; }
dt { color: var(--soft); font-size: .82rem; } dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); padding: .3rem 0; }
@media (max-width: 36rem) {
  body { padding: 1.5rem 1rem 3rem; }
  h1 { font-size: 1.6rem; } h2 { margin-top: 2.2rem; } .lead { font-size: 1rem; }
  .tiles { gap: 0 .8rem; } .tiles .big { font-size: 1.7rem; }
  .tiles p, .tiles h2 { font-size: .76rem; line-height: 1.35; } svg text { font-size: 13.5px; }
  figure { padding: .7rem .6rem; } .bars .share { display: none; }
  .bars { grid-template-columns: minmax(4rem, 9.5rem) auto 1fr auto; gap: .3rem .5rem; }
}
@media print {
  body { padding: 0; font-size: 11pt; background: #fff; }
  h2, section > p { break-after: avoid; } .grid { grid-template-columns: 1fr 1fr; } summary { display: none; }
  details:not(.long)::details-content { content-visibility: visible; display: block; height: auto; }
  .scroll { overflow: visible; } th, td { white-space: normal; padding: .15rem .35rem; } table { font-size: 8pt; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
