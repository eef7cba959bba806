"""A full disk at any place: one sentence, and what was there before stays whole."""

import errno
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
from small_run import finish, make_place, settings

from dkm.app.errors import Problem
from dkm.foundation import jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("run"))


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_at_a_checkpoint_leaves_the_one_before(place: Path, tmp_path: Path, monkeypatch):
    chosen, save, calls = settings(place, tmp_path / "run", checkpoint_every=0), torch.save, []

    def later(*args, **kwargs):
        calls.append(args)
        return full() if len(calls) == 4 else save(*args, **kwargs)

    monkeypatch.setattr(torch, "save", later)
    with pytest.raises(Problem, match=r"cannot write .*last\.pt: No space left on device"):
        finish(chosen)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["last.pt"]
    assert torch.load(checkpoints / "last.pt", weights_only=True)["done"] == 3
    finish(chosen)
    finish(settings(place, tmp_path / "whole"))
    assert (tmp_path / "run" / "model.dkm").read_bytes() == (tmp_path / "whole" / "model.dkm").read_bytes()


def test_a_full_disk_at_the_start_leaves_nothing(place: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Problem, match=r"cannot make the folder .*: No space left on device"):
        finish(settings(place, tmp_path / "run"))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_at_the_log(place: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(jsonl, "append", full)
    with pytest.raises(Problem, match=r"cannot write .*log\.jsonl: No space left on device"):
        finish(settings(place, tmp_path / "run", epochs=1))


def test_a_full_disk_at_the_end(place: Path, tmp_path: Path, monkeypatch):
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: full() if Path(new).name == "model.dkm" else replace(old, new))
    with pytest.raises(Problem, match=r"model\.dkm: No space .* goes on from the last checkpoint"):
        finish(settings(place, tmp_path / "run", epochs=1))
    assert not list((tmp_path / "run").glob("*model.dkm*"))
    monkeypatch.undo()
    assert finish(settings(place, tmp_path / "run", epochs=1))["finished"]


def test_a_full_disk_before_the_first_checkpoint(place: Path, tmp_path: Path, monkeypatch):
    """There is no checkpoint to promise, and what was logged stays."""
    chosen = settings(place, tmp_path / "run", epochs=1)
    monkeypatch.setattr(torch, "save", full)
    beginning = r"No space left on device; make room, and dkm compress --resume --out .*run goes on from the beginning"
    with pytest.raises(Problem, match=beginning):
        finish(chosen)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "checkpoints",
        "config.toml",
        "log.jsonl",
        "plan.json",
    }
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    monkeypatch.undo()
    assert finish(chosen)["finished"]


def test_a_full_disk_at_the_report(place: Path, tmp_path: Path, monkeypatch):
    """Everything else is there: it need not be trained again."""
    replace = os.replace
    monkeypatch.setattr(
        os, "replace", lambda old, new: full() if Path(new).name == "report.html" else replace(old, new)
    )
    run = tmp_path / "run"
    with pytest.raises(Problem, match=rf"cannot write .*report\.html: No space .* dkm report {run} writes it"):
        finish(settings(place, run, epochs=1))
    assert {path.name for path in run.iterdir()} >= {"model.dkm", "result.json"}
