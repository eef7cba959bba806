"""The report of a run that is still going, as `dkm report` writes it: its figures are those that it will have."""

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("accelerate")
from command_place import call, flags, make_place
from sample_run import write

from dkm.app import report
from dkm.foundation.text import size_text


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with pictures, a network and its weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    make_place(tmp_path)
    return tmp_path


def test_the_expected_size_is_that_of_the_file(place: Path, capsys):
    call("compress", *flags(epochs="2"))
    printed = capsys.readouterr().out
    result, plan = (json.loads(Path("run", name).read_text()) for name in ("result.json", "plan.json"))
    size = Path("run/model.dkm").stat().st_size
    assert result["file"] == plan["beginning"]["file"]
    assert sum(result["file"].values()) == result["bytes_file"] == size
    assert f"the file will take {size_text(size)}, {result['ratio']:.1f}x smaller" in printed
    assert "loaded with packed=True, those that are clustered take as little" in " ".join(printed.split())

    for name in ("result.json", "model.dkm"):
        Path("run", name).unlink()
    call("report", "run")
    page, run = write(Path("run")), report.read("run")
    assert (run.finished, run.size, run.ratio) == (False, size, result["ratio"])
    assert (run.before, run.after) == (result["accuracy_before"], run.evaluations[-1].snapped)
    assert run.examples == result["after"]["examples"]
    for text in ("Not finished", f"was {result['accuracy_before']:.2f}\xa0%", f"{run.ratio:.1f}×", "begun 20"):
        assert text in page.text


def test_entropy_coded_sizes_are_expected_too(place: Path):
    call("compress", *flags(coding="entropy", plan="0:2, 4:2", epochs="0"))
    result, plan = (json.loads(Path("run", name).read_text()) for name in ("result.json", "plan.json"))
    assert result["file"] == plan["beginning"]["file"]  # without training, the codes are those of the beginning


def test_an_older_run_is_read(place: Path):
    call("compress", *flags())
    for name, key in (("plan.json", "beginning"), ("result.json", "file")):
        path = Path("run", name)
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != key}))
    call("report", "run")
    assert report.read("run").size == Path("run/model.dkm").stat().st_size
