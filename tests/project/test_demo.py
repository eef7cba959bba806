"""The demo, with too few epochs to learn much: all of it runs, and the file gives what evaluation promised."""

import copy
import importlib
from pathlib import Path

import pytest
import torch

import dkm
from dkm.foundation import jsonl

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("COLUMNS", "80")
    results = importlib.import_module("digits").run(tmp_path / "output", epochs=1)

    # what it prints fits a terminal
    printed = capsys.readouterr().out.replace(str(tmp_path), "")
    assert max(map(len, printed.splitlines())) <= 80
    assert printed.count("k-means alone") == 2  # the summary of each

    # the files are there, and are what was evaluated
    output = tmp_path / "output"
    assert {path.name for path in output.iterdir()} == {"digits.safetensors", "2-1", "4-4"}
    for result in results:
        assert result.loaded == pytest.approx(result.recalibrated, abs=0.2)  # biases are rounded: an image, at most
        loaded, snapped = dkm.load(result.file), dkm.snap_(copy.deepcopy(result.model)).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in snapped.items())
        assert result.file.stat().st_size == result.size.file_bytes
    assert [round(result.plan.bits_per_weight) for result in results] == [2, 1]
    assert len(dkm.load(output / "2-1" / "model.dkm")["conv3.weight"].unique()) == 4
    assert len(dkm.load(output / "4-4" / "model.dkm")["conv3.weight"].view(-1, 4).unique(dim=0)) <= 16

    # each has a report, and nothing is missing in it
    for result in results:
        page = result.file.with_name("report.html").read_text(encoding="utf-8")
        for part in ("Training", "Size by layer", "Weights through time", "Clustering", "The plan", "Run it again"):
            assert f"<h2>{part}</h2>" in page
        assert f"{result.loaded:.2f}<small>%</small>" in page

    # a second time, into the same folder
    importlib.import_module("digits").run(output, epochs=1)
    assert len(jsonl.read(output / "2-1" / "log.jsonl")) == len(jsonl.read(output / "4-4" / "log.jsonl")) == 9
