"""`--json`: on standard output is one JSON object with the documented keys, and nothing else."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("accelerate")
from command_place import call, flags, make_place

import dkm
from dkm.app import run

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "command-line.md"


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    make_place(tmp_path)
    call("compress", *flags(epochs="0"))
    capsys.readouterr()


def printed_by(capsys: pytest.CaptureFixture, *words: str) -> dict[str, Any]:
    call(*words, "--json")
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # NaN and Infinity are not JSON


def keys_in(found: Any) -> set[str]:
    """The names of all objects in it, at every depth."""
    if isinstance(found, list):
        return set().union(*map(keys_in, found))
    return set(found).union(*map(keys_in, found.values())) if isinstance(found, dict) else set()


def documented(name: str) -> set[str]:
    """The keys that the documentation names in the row of this command."""
    (row,) = (line for line in DOCUMENTATION.read_text().splitlines() if line.startswith(f"| `{name} --json`"))
    return set(re.findall(r"`(\w+)`", row.split("|")[2]))


def test_eval(capsys: pytest.CaptureFixture):
    found = printed_by(capsys, "eval", "run")
    result = json.loads(Path("run/result.json").read_text())
    assert found == {"metric": "accuracy", "unit": "images"} | result["after"]
    assert keys_in(found) == documented("dkm eval")


def test_the_notes_of_eval_go_to_standard_error(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    from dkm.app import screen

    monkeypatch.setattr(screen, "PATIENCE", -1.0)
    call("eval", "run", "--json")
    printed = capsys.readouterr()
    assert json.loads(printed.out)["examples"] == 2
    assert "2 of 2 examples measured" in printed.err
    call("eval", "run")
    assert "2 of 2 examples measured" in capsys.readouterr().out


def test_a_loss_that_is_no_number_is_null(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    evaluate = run.evaluate
    monkeypatch.setattr(run, "evaluate", lambda *arguments: evaluate(*arguments)._replace(loss=math.nan))
    assert printed_by(capsys, "eval", "run")["loss"] is None


def test_plan(capsys: pytest.CaptureFixture):
    found = printed_by(capsys, "plan", "network.py:network", "0:2, 4:2")
    stored = json.loads(Path("run/plan.json").read_text())
    del stored["beginning"]  # which only a run has
    assert found == stored
    assert keys_in(found) == documented("dkm plan")
    assert sum(row["bytes"] for row in found["rows"]) == found["bytes"]


def test_inspect(capsys: pytest.CaptureFixture):
    found = printed_by(capsys, "inspect", "run")
    assert printed_by(capsys, "inspect", "run/model.dkm") == found
    assert keys_in(found) == documented("dkm inspect")
    loaded = dkm.load("run/model.dkm")
    assert {each["name"]: tuple(each["shape"]) for each in found["clustered"] + found["kept"]} == {
        name: tuple(tensor.shape) for name, tensor in loaded.items()
    }
    assert found["bytes_file"] == Path("run/model.dkm").stat().st_size
    first = found["clustered"][0]
    assert (first["name"], first["bits"], first["dim"], first["centroids"], first["groups"]) == ("0.weight", 2, 1, 4, 1)
    assert first["centroids_used"] == len(loaded["0.weight"].unique())
    assert sum(first["histogram"]) == loaded["0.weight"].numel()
    assert (
        first["bytes"] == first["code_bytes"] + first["centroid_bytes"] + first["scale_bytes"] + first["outlier_bytes"]
    )


@pytest.mark.parametrize("words", [["eval", "nowhere"], ["plan", "network.py:network", "x:"], ["inspect", "no.dkm"]])
def test_what_is_wrong_is_still_a_sentence(words: list[str], capsys: pytest.CaptureFixture):
    call(*words, "--json", code=2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
