"""dkm export: from a file and from a run."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

pytest.importorskip("typer")
pytest.importorskip("accelerate")
import accelerate
import torch
from command_place import make_place

import dkm
from dkm.app import cli
from dkm.app.own_code import load_function


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with a network, its weights and its compressed file."""
    monkeypatch.chdir(tmp_path)
    make_place(tmp_path)
    model = load_function("network.py:network")()
    dkm.compress_(model, "0:2, 4:2", tau=1.0)
    dkm.save(model, "model.dkm")
    return tmp_path


def call(*arguments: str, code: int = 0) -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    with pytest.raises(SystemExit) as end:
        cli.main(["export", *arguments])
    assert end.value.code == code


def test_a_file(place: Path, capsys: pytest.CaptureFixture):
    call("model.dkm", "--to", "safetensors")
    printed = capsys.readouterr().out
    for part in ("0.weight", "dense: 4.weight, this format has dense tensors only", "model.safetensors: "):
        assert part in printed
    expected = dkm.load("model.dkm")
    found = load_file("model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


PROBLEMS = {
    ("model.dkm", "--to", "onxx"): "to= must be one of",
    ("model.dkm", "--to", "safetensors", "--option", "a=1"): "has no option a: it takes no options",
    ("model.dkm", "--to", "safetensors", "--option", "a"): "--option must be NAME=VALUE, got a",
    ("model.dkm", "--to", "safetensors", "--example", "1x5"): "takes no --example",
    ("absent.dkm", "--to", "safetensors"): "there is no file absent.dkm",
    ("images", "--to", "safetensors"): "images is not the folder of a run",
    ("images", "--to", "safetensors", "--model", "resnet18"): "leave --model and --classes out",
    ("weights.safetensors", "--to", "safetensors"): "weights.safetensors is a safetensors file that dkm did not write",
}


@pytest.mark.parametrize("arguments", PROBLEMS, ids=lambda arguments: " ".join(arguments))
def test_problems(arguments: tuple[str, ...], place: Path, capsys: pytest.CaptureFixture):
    before = set(place.iterdir())
    call(*arguments, code=2)
    printed = capsys.readouterr()
    assert PROBLEMS[arguments] in printed.err
    assert len(printed.err.splitlines()) == 1
    assert {path for path in place.iterdir() if path.name != "__pycache__"} == before - {place / "__pycache__"}
