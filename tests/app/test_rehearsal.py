"""Less than a whole run: `--dry-run`, which only looks, and `--no-training`, which stops after k-means."""

import json
import os
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("accelerate")
from command_place import call, flags, make_place

import dkm


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    make_place(tmp_path)


def files() -> dict[str, bytes]:
    found = (path for path in Path(".").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path): path.read_bytes() for path in found}


def test_a_dry_run_shows_everything_and_writes_nothing(capsys: pytest.CaptureFixture):
    before = files()
    call("compress", *flags(epochs="4", out="new/run"), "--dry-run")
    printed = capsys.readouterr().out
    assert files() == before
    assert not Path("new").exists()
    for part in (
        'plan="0:2, 4:2"',
        "0.weight",
        "as the paper counts",
        "12 steps on 18 images, 6 in each; 2 to measure",
    ):
        assert part in printed
    assert printed.splitlines()[-1] == "all of this can be run; nothing was written to new/run"


def test_a_dry_run_for_a_size_says_that_the_plan_is_to_come(capsys: pytest.CaptureFixture):
    call("compress", *flags(plan=None, target_size="1kB"), "--dry-run")
    assert "the run begins by choosing the plan for 1kB" in capsys.readouterr().out
    assert not Path("run").exists()


WRONG = {
    "the model": (dict(model="network.py:nothing"), "has no function 'nothing'"),
    "the weights": (dict(weights="none.pth"), "there is no weights file none.pth"),
    "the data": (dict(data="nowhere"), "there is no folder or file nowhere"),
    "an image": (dict(data="broken"), "it is no image; repair it"),
    "the plan": (dict(plan="9:2"), "unknown selector '9'"),
    "the size": (dict(plan=None, target_size="big"), "'big' is not a size"),
    "a setting": (dict(tau="warm"), "tau must be auto"),
    "no folder": (dict(out=None), "where to? give --out"),
    "a folder with something in it": (dict(out="images"), "images exists and is not a run"),
    "a folder that cannot be": (dict(out="network.py/run"), "cannot make the folder network.py/run"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_dry_run_finds_what_a_run_would(case: str, capsys: pytest.CaptureFixture):
    for name in "ab":
        Path("broken", name).mkdir(parents=True)
        for i in range(2):
            Path("broken", name, f"{i}.png").write_bytes(b"no picture")
    changes, sentence = WRONG[case]
    before = files()
    call("compress", *flags(**changes), "--dry-run", code=2)
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert files() == before


OWN = """
import dkm
from network import network

class Fails(type(network())):
    def forward(self, x):
        raise dkm.DKMError(f"no picture of {tuple(x.shape)} for me")

def fails(classes=2):
    return Fails(*network(classes))
"""


def test_a_batch_goes_through_the_model(capsys: pytest.CaptureFixture):
    Path("own.py").write_text(OWN)
    call("compress", *flags(model="own.py:fails"), "--dry-run", code=2)
    assert "no picture of (2, 3, 8, 8) for me" in capsys.readouterr().err


def test_a_dry_run_is_not_about_a_run_that_is_there(capsys: pytest.CaptureFixture):
    call("compress", *flags(epochs="0"))
    before = files()
    capsys.readouterr()
    call("compress", *flags(epochs="0"), "--dry-run", "--resume", code=2)
    assert "there is one in run" in capsys.readouterr().err
    assert files() == before


def test_a_folder_that_one_may_not_write_to_is_found(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    Path("closed").mkdir()
    may = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name != "closed" and may(path, mode)
    )  # also of root
    call("compress", *flags(out="closed/run"), "--dry-run", code=2)
    assert "closed is not a folder that you may write to" in capsys.readouterr().err


def test_without_training_the_file_holds_k_means_of_the_weights(capsys: pytest.CaptureFixture):
    call("compress", *flags(epochs=None), "--no-training")
    printed = capsys.readouterr().out
    assert "k-means, not trained" in printed
    assert "0 steps" not in printed
    result = json.loads(Path("run/result.json").read_text())
    assert result["steps"] == 0
    assert tomllib.loads(Path("run/config.toml").read_text())["epochs"] == 0
    # the same as --epochs 0
    call("compress", *flags(epochs="0", out="again"))
    assert Path("run/model.dkm").read_bytes() == Path("again/model.dkm").read_bytes()
    loaded = dkm.load("run/model.dkm")
    assert len(loaded["0.weight"].unique()) == 4  # 2 bits


def test_without_training_wins_over_a_config_file_but_contradicts_a_flag(capsys: pytest.CaptureFixture):
    Path("c.toml").write_text("epochs = 7\n")
    call("compress", *flags(epochs=None), "--config", "c.toml", "--no-training")
    assert json.loads(Path("run/result.json").read_text())["steps"] == 0
    call("compress", *flags(epochs="3", out="other"), "--no-training", code=2)
    assert "--no-training and --epochs 3 contradict each other" in capsys.readouterr().err


def test_a_sweep_without_training():
    call("sweep", *flags(epochs=None, plan=None, out="sweep"), "--plan", "0:2", "--plan", "0:3", "--no-training")
    for name in ("0-2", "0-3"):
        assert json.loads(Path("sweep", name, "result.json").read_text())["steps"] == 0
