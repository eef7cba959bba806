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
    assert "file takes 7.8\xa0kB; in float32 the network’s parameters took 197.4\xa0kB, 25.3 times as much" in page.text
    assert "the size is 6.9\xa0kB: 28.6 times less" in page.text
    assert "Loaded dense, the weights take 197.4 kB of memory in float32, as before" in page.text
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
    assert "will take about 6.9\xa0kB" in page.text  # an older run: as the paper counts
    assert report.summary(folder).endswith("not finished")


def test_a_run_still_going_counts_as_a_finished_one(run: Callable[..., Path], tmp_path: Path):
    going, done = run(finished=False, steps=120, older=False), write_run(tmp_path / "done", older=False)
    page = write(going)
    assert report.read(going).size == report.read(done).size == report.read(done).bytes_file
    assert report.read(going).ratio == report.read(done).ratio
    assert "will take about 7.8\xa0kB" in page.text
    for text in ("7.8kB", "25.3×", "was 92.50\xa0%", "±\xa01.75 on 300 images", "begun 2026-11-19 with dkm"):
        assert text in page.text
    assert "25.3x smaller" in report.summary(going)


def test_the_accuracy_says_what_it_rests_on(run: Callable[..., Path]):
    folder = run(older=False)
    page = write(folder)
    assert "88.25%±\xa01.86 on 300 images−4.25, was 92.50\xa0%" in page.text
    assert "compressed 2026-11-20 with dkm" in page.text
    assert "measured  ± 1.86 on 300 images" in report.summary(folder)


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ('target-size = "60kB"', "asked for 60kB"),
        ('target-size = "60kB"\nplan = "fc:8"', "asked for 60kB, fc:8"),
        ('plan = "cv:4/4"', "asked for cv:4/4"),
        (f'plan = "{", ".join(f"layer{i}.weight:4/4" for i in range(25))}"', ""),
    ],
    ids=["size", "both", "plan", "wall"],
)
def test_above_the_title_is_what_was_asked_for(run: Callable[..., Path], settings: str, asked: str):
    folder = run()
    (folder / "config.toml").write_text(f'model = "zoo/layernet"\n{settings}\n')
    page = report.write(folder).read_text()
    kicker = re.search(r'<p class="kicker">(.*?)</p>', page)[1]
    assert re.sub("<[^>]*>", "", kicker) == "compressed with dkm" + (f", {asked}" if asked else "")


@pytest.mark.parametrize(
    ("model", "older", "title"),
    [
        ("zoo/resnet18", False, "resnet18"),
        ("own/file.py:make", False, "layerNet"),
        ("own/file.py:make", True, "make"),
    ],
)
def test_the_title_is_the_name_of_the_model(run: Callable[..., Path], model: str, older: bool, title: str):
    folder = run(older=older)
    (folder / "config.toml").write_text(f'model = "{model}"\n')
    assert f"<h1>{title}</h1>" in report.write(folder).read_text()


def test_a_run_without_training(run: Callable[..., Path]):
    page = write(run(steps=0, older=False))
    assert "Clustered by k-means, not trained." in page.text
    assert {"Weights", "Size by layer", "The plan"} <= set(page.headings)
    assert not {"Training", "Clustering", "Weights through time"} & set(page.headings)
    assert "e-10" not in page.text


def test_the_bars_at_the_top_have_labels(run: Callable[..., Path]):
    page = report.write(run(older=False)).read_text()
    top = re.search(r'<div class="compare">(.*?)</div>', page, re.DOTALL)[1]
    assert re.sub(r"\s*<[^>]*>\s*", " ", top).split() == ["in", "float32", "197.4", "kB", "the", "file", "7.8", "kB"]


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
