"""The report: whole and true for a finished run, shorter for one that is not, and safe with any text."""

import json
import math
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dkm.app import report
from dkm.app.settings import Problem
from dkm.foundation import jsonl

VOID = {"meta", "wbr"}
SECTIONS = {
    "Training",
    "Size by layer",
    "Weights through time",
    "Clustering",
    "The plan",
    "Run it again",
    "Environment",
}


class Page(HTMLParser):
    """Tags with their attributes, headings and the visible text; an error where the tags do not nest."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.headings, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str):
        assert self.open.pop() == tag

    def handle_data(self, data: str):
        if self.open[-1:] == ["h2"]:
            self.headings.append(data)
        if self.open[-1:] != ["style"]:
            self.text += data

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.tags)


def write(folder: Path) -> Page:
    return Page(report.write(folder).read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run folder: `layers` clustered tensors and a bias each, `steps` steps, an epoch is 50 of them."""

    def make(layers: int = 3, steps: int = 200, finished: bool = True, word: str = "layer") -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        model = json.dumps(f"zoo/{word}net", ensure_ascii=False)
        (folder / "config.toml").write_text(f"model = {model}\nepochs = 4\n", encoding="utf-8")
        rows = [
            dict(
                name=f"{word}{i}.{part}", shape=shape, bits=bits, dim=4 if bits else 1, reason=f"{word} why", bytes=size
            )
            for i in range(layers)
            for part, shape, bits, size in (("weight", [64, 256], 4, 2176), ("bias", [64], None, 128))
        ]
        total, dense = sum(row["bytes"] for row in rows), layers * 4 * (64 * 256 + 64)
        plan = dict(text=f"{word}*:4/4", rows=rows, bytes=total, dense_bytes=dense)
        (folder / "plan.json").write_text(json.dumps(plan))
        for step in range(0, steps + 1, 10):
            cold = math.exp(-step / 100)
            numbers = dict(iterations=1 + round(4 * cold), tau=cold * 1e-3, gap=cold * 0.2, dead=1, entropy=3.5)
            tensors = {row["name"]: {**numbers, "changed": cold if step else None} for row in rows if row["bits"]}
            record = dict(kind="layers", step=step, tensors=tensors, total=dict(gap=cold * 0.2, changed=None, dead=3))
            jsonl.append(folder / "log.jsonl", record)
            if step:
                record = dict(kind="step", step=step, epoch=step / 50, loss=cold, lr=1e-3, per_second=1.0)
                jsonl.append(folder / "log.jsonl", record)
            if step % 50 == 0:
                soft = 91.0 - 20 * cold if step else None
                record = dict(kind="eval", step=step, epoch=step / 50, soft=soft, snapped=90.0 - 30 * cold, loss=cold)
                jsonl.append(folder / "log.jsonl", record)
                bins = dict(edges=[-0.2, -0.1, 0, 0.1, 0.2], counts=[5, 40, 30, 6], centroids=[0.1 - cold / 10, -0.1])
                jsonl.append(folder / "log.jsonl", dict(kind="histogram", step=step, name=f"{word}0.weight", **bins))
        if finished:
            result = dict(accuracy_before=92.5, accuracy_after=88.25, bytes_dense=dense, bytes_paper=total)
            result |= dict(bytes_file=total + 900, ratio=dense / total, seconds=90, steps=steps, seed=7, finished=True)
            result |= dict(command=f"dkm compress --model {word}net", environment=dict(torch="2.15", device=word))
            (folder / "result.json").write_text(json.dumps(result))
        return folder

    return make


def test_a_finished_run_has_all_of_it(run: Callable[..., Path]):
    page = write(run())
    assert set(page.headings) > SECTIONS
    for text in ("88.25", "−4.25, was 92.50\xa0%", "7.6kB", "was 192.8 kB", "25.3×", "layernet"):
        assert text in page.text
    assert "file takes 7.6 kB; in float32 the network’s parameters took 192.8 kB, 25.3 times as much" in page.text
    assert "the size is 6.8 kB: 28.6 times less" in page.text
    assert "without training would give 60.00\xa0%" in page.text  # the evaluation of step 0
    for title in ("Accuracy, %", "Loss", "Snap gap, %", "Iterations", "Codes that changed, %", "Temperature"):
        assert f"{title}" in page.text
    assert "dkm compress --model layernet" in page.text
    assert "epochs = 4" in page.text  # the configuration
    assert "Not finished" not in page.text


def test_the_page_needs_nothing_else(run: Callable[..., Path]):
    text = report.write(run()).read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|<img|<iframe|\bsrc=|href=|url\(|@import|https?:", text)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


HOSTILE = """</style></title><script>alert(1)</script><b onload="x">'&amp;\u202e🙂"""


def test_every_text_is_escaped(run: Callable[..., Path]):
    """Names, reasons, the plan, the command and the environment can be anything."""
    folder = run(word=HOSTILE)
    page, plain = write(folder), write_plain(folder)
    assert not {"script", "b onload"} & {tag for tag, _ in page.tags}
    assert not any("onload" in attributes for _, attributes in page.tags)
    assert HOSTILE in page.text
    assert [tag for tag, _ in page.tags if tag != "wbr"] == [tag for tag, _ in plain.tags if tag != "wbr"]


def write_plain(folder: Path) -> Page:
    """The same run with a harmless word."""
    for name in report.FILES:
        text = (folder / name).read_text(encoding="utf-8")
        for form in (HOSTILE, json.dumps(HOSTILE)[1:-1], json.dumps(HOSTILE, ensure_ascii=False)[1:-1]):
            text = text.replace(form, "word")
        (folder / name).write_text(text, encoding="utf-8")
    return write(folder)


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("config.toml", set()),
        ("plan.json", {"Size by layer", "The plan"}),
        ("log.jsonl", {"Training", "Weights through time", "Clustering"}),
        ("result.json", {"Run it again"}),
    ],
)
def test_without_a_file_the_page_is_shorter(run: Callable[..., Path], name: str, sections: set[str]):
    folder = run()
    (folder / name).unlink()
    assert SECTIONS - set(write(folder).headings) == sections
    report.summary(folder)


@pytest.mark.parametrize("name", report.FILES)
def test_any_one_file_is_enough(run: Callable[..., Path], name: str):
    folder = run()
    for other in set(report.FILES) - {name}:
        (folder / other).unlink()
    assert write(folder).count("h1") == 1
    assert report.summary(folder)


@pytest.mark.parametrize("kind", ["step", "eval", "layers", "histogram"])
def test_any_kind_of_record_may_be_missing(run: Callable[..., Path], kind: str):
    folder = run()
    records = [record for record in jsonl.read(folder / "log.jsonl") if record["kind"] != kind]
    (folder / "log.jsonl").unlink()
    for record in records:
        jsonl.append(folder / "log.jsonl", record)
    gone = {"layers": {"Clustering"}, "histogram": {"Weights through time"}}.get(kind, set())
    assert SECTIONS - set(write(folder).headings) == gone


def test_a_run_still_going_shows_its_latest(run: Callable[..., Path]):
    folder = run(finished=False, steps=120)
    page = write(folder)
    assert "Not finished: epoch 2.4 of 4" in page.text
    assert f"{90 - 30 * math.exp(-1):.2f}" in page.text  # the evaluation of step 100
    assert "will take about 6.8 kB" in page.text
    assert report.summary(folder).endswith("not finished")


def test_a_log_that_was_cut_off_counts_to_its_last_whole_line(run: Callable[..., Path]):
    folder = run(finished=False)
    with open(folder / "log.jsonl", "ab") as stream:
        stream.write(b'{"kind": "eval", "step": 999, "ep')
    assert "epoch 4.0 of 4" in write(folder).text


@pytest.mark.parametrize("layers", [1, 400])
def test_one_layer_or_hundreds(run: Callable[..., Path], layers: int):
    folder = run(layers=layers)
    page = write(folder)
    assert set(page.headings) > SECTIONS
    assert page.count("tr") == 1 + 2 * layers
    bars = [attributes for _, attributes in page.tags if attributes.get("class") == "track"]
    assert len(bars) == min(2 * layers, report.BARS + 1)
    assert page.count("details") == (2 if layers > 1 else 1)  # a long table is folded
    assert (folder / "report.html").stat().st_size < 1_000_000
    assert "Shaded" in page.text if layers > 1 else "Shaded" not in page.text


def test_numbers_that_are_missing_leave_gaps(run: Callable[..., Path]):
    """A training that diverged logs null."""
    folder = run()
    text = re.sub(r'"(snapped|soft|loss|gap|tau)": [0-9.e-]+', r'"\1": null', (folder / "log.jsonl").read_text())
    (folder / "log.jsonl").write_text(text.replace('"counts": [5', '"counts": [null'))
    page = write(folder)
    assert "Training" not in page.headings
    assert "Weights through time" not in page.headings
    assert "nan" not in page.text.lower()


def test_steps_repeated_after_a_crash_count_once(run: Callable[..., Path]):
    folder = run(finished=False)
    again = dict(kind="eval", step=200, epoch=4.0, soft=None, snapped=12.34, loss=1.0)
    jsonl.append(folder / "log.jsonl", again)
    assert [record["step"] for record in report.read(folder).log["eval"]] == [0, 50, 100, 150, 200]
    assert "12.34" in write(folder).text


def test_the_summary_fits_a_terminal(run: Callable[..., Path]):
    summary = report.summary(run(word="a_rather_long_name_of_a_layer_" * 3))
    assert max(map(len, summary.splitlines())) <= 80
    for text in ("88.25 %", "-4.25", "k-means alone 60.00", "7.6 kB", "25.3x", "count 6.8 kB", "200 steps", "90 s"):
        assert text in summary


def test_a_full_disk_leaves_the_old_report(run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    folder = run()
    (folder / "report.html").write_text("old")

    def full(source: Path, target: Path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    before = sorted(folder.iterdir())
    with pytest.raises(OSError, match="No space"):
        report.write(folder)
    assert (folder / "report.html").read_text() == "old"
    assert sorted(folder.iterdir()) == before


def test_what_is_not_a_run_folder(tmp_path: Path):
    with pytest.raises(Problem, match=r"there is no run folder .*nowhere"):
        report.write(tmp_path / "nowhere")
    with pytest.raises(Problem, match=r"is not a run folder: it has none of config\.toml"):
        report.write(tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["[[[", "[1]\n"])
@pytest.mark.parametrize("name", report.FILES)
def test_a_file_of_another_kind_is_named(run: Callable[..., Path], name: str, text: str):
    folder = run()
    (folder / name).write_text(text if name != "config.toml" else "a = = 1")
    if name == "log.jsonl":
        (folder / name).write_text("[1]\n")
    with pytest.raises(Problem, match=re.escape(name)):
        report.write(folder)


# --- the drawing ---------------------------------------------------------------------------------


def drawn(figure: str, look: str) -> list[tuple[float, float]]:
    """The points of a curve."""
    path = re.search(rf'class="line {look}" d="M([^"]*)"', figure)[1]
    return [tuple(map(float, point.split())) for point in path.split("L")]


@pytest.mark.parametrize("log", [False, True])
def test_a_curve_is_where_its_numbers_are(log: bool):
    points = [(0.0, 1.0), (5.0, 100.0), (10.0, 10.0)]
    (x0, y0), (x1, y1), (x2, y2) = drawn(report.chart("t", [report.Line("l", "a", points)], "epoch", log=log), "a")
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert (y2 - y0) / (y1 - y0) == pytest.approx(0.5 if log else 1 / 11, abs=0.01)
    assert y1 < y2 < y0  # up is more


def test_a_chart_of_nothing_is_nothing():
    assert report.chart("t", [report.Line("l", "a", [])], "epoch") == ""
    assert report.chart("t", [report.Line("l", "a", [(0.0, 0.0)])], "epoch", log=True) == ""


def test_a_curve_of_many_points_keeps_its_ends_and_its_mean():
    points = [(float(i), float(i % 2)) for i in range(100_001)]
    thin = report._thin(points)
    assert len(thin) == report.POINTS
    assert (thin[0], thin[-1]) == (points[0], points[-1])
    assert all(y == pytest.approx(0.5, abs=0.01) for _, y in thin[1:-1])


def check_axis(ticks: list[float], first: float, last: float, low: float, high: float) -> None:
    slack = 1e-3 * (last - first)
    assert first <= low + slack
    assert last >= high - slack
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))
    assert (ticks[0], ticks[-1]) == (first, last)


@given(st.floats(-1e12, 1e12), st.floats(0, 1e12))
@example(1e9, 1e-7)
@example(1e-14, 1e-25)
@example(0.0, 5e-324)
def test_the_axis_holds_its_numbers(low: float, width: float):
    check_axis(*report._ticks(low, low + width), low, low + width)


@given(st.floats(1e-30, 1e12), st.floats(1, 1e12))
def test_the_logarithmic_axis_holds_its_numbers(low: float, factor: float):
    ticks, first, last = report._log_ticks(low, low * factor)
    check_axis([*map(math.log, ticks)], math.log(first), math.log(last), math.log(low), math.log(low * factor))


def test_centroids_are_followed_by_their_number(run: Callable[..., Path]):
    """Two that pass each other cross; they do not bounce."""
    records = [
        dict(step=step, edges=[-1, 0, 1], counts=[1, 1], centroids=centroids)
        for step, centroids in ((0, [-0.5, 0.5]), (1, [0.5, -0.5]))
    ]
    figure = report.ridges("w", records, lambda record: record["step"], "epoch", "w", "")
    ways = re.findall(r'class="way" d="M([\d.]+) [\d.]+L([\d.]+) ', figure)
    assert len(ways) == 2
    assert ways[0] == ways[1][::-1]
    assert ways[0][0] != ways[0][1]


def test_one_far_weight_does_not_flatten_the_others():
    edges = [float(i) for i in range(1001)]
    counts = [500_000, 499_999, *[0] * 997, 1]
    assert report._middle(edges, counts) == (0.0, 2.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (1e-4, "1e-4"),
        (1e-5, "1e-5"),
        (-0.00015, "-1.5e-4"),
        (125_000, "1.25e5"),
        (100, "100"),
    ],
)
def test_ticks_are_short(value: float, text: str):
    assert report._tick(value) == text
