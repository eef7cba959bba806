"""The demo, with too few epochs to learn much: all of it runs, and the file gives what evaluation promised."""

import copy
import importlib
import re
from pathlib import Path

import pytest
import torch

import dkm

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("COLUMNS", "80")
    results = importlib.import_module("digits").run(tmp_path / "output", epochs=1)

    # what it prints fits a terminal
    printed = capsys.readouterr().out.replace(str(tmp_path), "")
    assert max(map(len, printed.splitlines())) <= 80
    assert "loaded from the file" in printed

    # the files are there, and are what was evaluated
    files = {path.name: path for path in (tmp_path / "output").iterdir()}
    assert set(files) == {"digits.safetensors", "digits-2-1.dkm", "digits-4-4.dkm", "weights.png", "report.html"}
    for result in results:
        assert result.loaded == pytest.approx(result.recalibrated, abs=0.2)  # biases are rounded: an image, at most
        loaded, snapped = dkm.load(result.file), dkm.snap_(copy.deepcopy(result.model)).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in snapped.items())
        assert result.file.stat().st_size == result.size.file_bytes
    assert [round(result.plan.bits_per_weight) for result in results] == [2, 1]
    assert len(dkm.load(files["digits-2-1.dkm"])["conv3.weight"].unique()) == 4
    assert len(dkm.load(files["digits-4-4.dkm"])["conv3.weight"].view(-1, 4).unique(dim=0)) <= 16

    # the page needs nothing else
    page = files["report.html"].read_text(encoding="utf-8")
    assert not re.search(r"""(src|href|srcset)=["'](?!data:)""", page)
    assert page.count("data:image/png;base64,") == 2  # light and dark
    assert files["weights.png"].read_bytes().startswith(b"\x89PNG")
