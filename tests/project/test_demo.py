"""The demo, with too few epochs to learn much: all of it runs, and the file gives what evaluation promised."""

import copy
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dkm
from dkm.foundation import jsonl

EXAMPLES = Path(__file__).parents[2] / "examples"
BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks.md"


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

    # the documentation has these sizes, which depend on no training
    rows = {
        "bits per clustered weight, with the centroids": ["32", *(f"{r.plan.bits_per_weight:.2f}" for r in results)],
        "bytes of all parameters, as the paper counts": ["753,576", *(f"{r.plan.bytes:,}" for r in results)],
        "the file on disk, bytes": ["756,584", *(f"{r.size.file_bytes:,}" for r in results)],
    }
    assert (output / "digits.safetensors").stat().st_size == 756_584
    for title, values in rows.items():
        assert f"\n| {' | '.join([title, *values])} |\n" in BENCHMARKS.read_text(encoding="utf-8")

    # each has a report, and nothing is missing in it
    for result in results:
        page = result.file.with_name("report.html").read_text(encoding="utf-8")
        for part in ("Training", "Size by layer", "Weights through time", "Clustering", "The plan", "Run it again"):
            assert f"<h2>{part}</h2>" in page
        assert f"{result.loaded:.2f}<small>%</small>" in page

    # a second time, into the same folder
    importlib.import_module("digits").run(output, epochs=1)
    assert len(jsonl.read(output / "2-1" / "log.jsonl")) == len(jsonl.read(output / "4-4" / "log.jsonl")) == 9


def test_stories(tmp_path: Path):
    """A language model that nobody has trained: it is written, taught by itself, and stored."""
    pytest.importorskip("transformers")
    from small_language import make_language_model, write_texts
    from transformers import AutoModelForCausalLM

    model = make_language_model(tmp_path / "model", length=256)
    texts = write_texts(tmp_path / "valid.txt", 5)
    command = [sys.executable, str(EXAMPLES / "stories.py"), str(model), str(texts), "--plan", "*:2", "--steps", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *lines, sizes = done.stdout.splitlines()
    ends = ["before", "clustered, not trained", "trained, soft weights as in training"]
    assert [line.split("  ")[-1] for line in lines] == [*ends, "trained, snapped weights as in the file"]
    assert all(float(line.split()[1]) > 1 for line in lines)
    size = (tmp_path / "stories.dkm").stat().st_size
    loaded = dkm.load(tmp_path / "stories.dkm", into=AutoModelForCausalLM.from_pretrained(model))
    assert sizes == f"{size:,} bytes in stories.dkm, {sum(4 * p.numel() for p in loaded.parameters()):,} in float32"
    assert len(loaded.lm_head.weight.unique()) <= 4
