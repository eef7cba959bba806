"""The page: whole and true for a finished run, shorter for one that is not, and safe with any text."""

import functools
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_run import SECTIONS, Page, write, write_run

from dkm.app import report
from dkm.app.errors import WriteProblem
from dkm.app.report.sizes import BARS
from dkm.app.run_folder import FILES
from dkm.foundation import jsonl


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run folder; see `write_run`."""
    return functools.partial(write_run, tmp_path / "run")


def test_a_finished_run_has_all_of_it(run: Callable[..., Path]):
    page = write(run())
    assert set(page.headings) > SECTIONS
    for text in ("88.25", "−4.25, was 92.50\xa0%", "7.8kB", "was 197.4 kB", "25.3×", "layernet"):
        assert text in page.text
    assert "file takes 7.8 kB; in float32 the network’s parameters took 197.4 kB, 25.3 times as much" in page.text
    assert "the size is 6.9 kB: 28.6 times less" in page.text
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
    for name in FILES:
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


@pytest.mark.parametrize("name", FILES)
def test_any_one_file_is_enough(run: Callable[..., Path], name: str):
    folder = run()
    for other in set(FILES) - {name}:
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
    assert "will take about 6.9 kB" in page.text
    assert report.summary(folder).endswith("not finished")


@pytest.mark.parametrize("layers", [1, 400])
def test_one_layer_or_hundreds(run: Callable[..., Path], layers: int):
    folder = run(layers=layers)
    page = write(folder)
    assert set(page.headings) > SECTIONS
    assert page.count("tr") == 1 + 2 * layers
    bars = [attributes for _, attributes in page.tags if attributes.get("class") == "track"]
    assert len(bars) == min(2 * layers, BARS + 1) + 3  # two for the whole, and what is of no tensor
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


def test_a_full_disk_leaves_the_old_report(run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    folder = run()
    (folder / "report.html").write_text("old")

    def full(source: Path, target: Path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    before = sorted(folder.iterdir())
    with pytest.raises(WriteProblem, match=r"report\.html: No space left on device; .* dkm report .* writes it"):
        report.write(folder)
    assert (folder / "report.html").read_text() == "old"
    assert sorted(folder.iterdir()) == before
