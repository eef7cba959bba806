"""A run that trains block by block first."""

import json
import random
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("accelerate")
from conftest import log_lines
from small_run import finish, log, make_place, settings, start_process

import dkm
from dkm.app import report
from dkm.app.errors import Problem
from dkm.app.run import Listener, rehearse
from dkm.app.run.reconstruction import Reconstruction
from dkm.app.settings import Settings, make

OPTIONS = dict(teacher="self", reconstruct=3, reconstruct_examples=36, augment="none")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def folder(place: Path) -> Path:
    torch.set_num_threads(1)
    finish(settings(place, place / "run", **OPTIONS))
    return place / "run"


def test_what_it_says_of_the_blocks(folder: Path):
    blocks = log(folder, "block")
    assert [record["modules"] for record in blocks] == [["0", "1", "2", "3"], ["4"], ["7"]]
    assert [record["tensors"] for record in blocks] == [["0.weight"], ["4.weight"], ["7.weight"]]
    assert all(record["after"] <= record["before"] and record["step"] == 0 for record in blocks)
    assert any(record["after"] < record["before"] for record in blocks)
    result = json.loads((folder / "result.json").read_text())
    assert result["blocks"] == dict(count=3, steps=12, examples=36, left=[])
    assert result["steps"] == 12
    assert "--reconstruct 3" in result["command"]


def test_the_first_evaluation_is_of_trained_weights(folder: Path):
    first = log(folder, "eval")[0]
    assert first["step"] == 0
    assert first["soft"] is not None
    read = report.read(folder)
    assert read.untrained is None  # k-means alone was not measured
    assert read.blocks == 3
    assert "trained one by one before" in (folder / "report.html").read_text()


def test_the_training_that_follows_is_cold(folder: Path):
    records = log(folder, "layers")
    units = {name: numbers["tau"] for name, numbers in records[0]["tensors"].items()}
    for record in records:
        assert {name: numbers["tau"] for name, numbers in record["tensors"].items()} == pytest.approx(units)


def test_blocks_alone(place: Path, tmp_path: Path):
    result = finish(settings(place, tmp_path / "run", **OPTIONS, epochs=0))
    assert result["steps"] == 0
    assert "not trained" not in (tmp_path / "run" / "report.html").read_text()
    untrained = finish(settings(place, tmp_path / "untrained", epochs=0))
    assert "blocks" not in untrained
    assert (tmp_path / "run" / "model.dkm").read_bytes() != (tmp_path / "untrained" / "model.dkm").read_bytes()


def test_killed_and_resumed(place: Path, tmp_path: Path, folder: Path):
    chosen, mine, rng = settings(place, tmp_path / "killed", **OPTIONS), tmp_path / "killed", random.Random(0)
    for lines in (0, 1, 2, 3, log_lines(folder) // 2):
        process = start_process(chosen, die_at=(lines, rng.randint(1, 3000)))
        process.join()
        assert process.exitcode == -signal.SIGKILL
    process = start_process(chosen)
    process.join()
    assert process.exitcode == 0
    assert (mine / "model.dkm").read_bytes() == (folder / "model.dkm").read_bytes()
    assert log(mine, "block") == log(folder, "block")


def test_more_examples_than_there_are_are_several_versions_of_each(place: Path, tmp_path: Path):
    chosen = settings(place, tmp_path / "run", **OPTIONS | dict(reconstruct_examples=200, reconstruct=1), epochs=0)
    assert finish(chosen)["blocks"]["examples"] == 198  # 22 batches of 9, of 54 examples


def test_a_rehearsal_finds_the_blocks(place: Path, tmp_path: Path):
    said = []

    class Heard(Listener):
        def reconstruction_begins(self, done: int, blocks) -> None:
            said.append((done, blocks["count"]))

    rehearse(settings(place, tmp_path / "run", **OPTIONS), Heard())
    assert said == [(0, 3)]
    assert not (tmp_path / "run").exists()


def test_a_learning_rate_that_is_far_too_high(place: Path, tmp_path: Path):
    chosen: Settings = settings(place, tmp_path / "run", **OPTIONS, reconstruct_lr=1e30)
    with pytest.raises(dkm.DKMError, match="the training of the block 0 diverged: give a lower learning rate"):
        finish(chosen)


def test_one_process_only():
    stage = SimpleNamespace(settings=make(), accelerator=SimpleNamespace(num_processes=2))
    with pytest.raises(Problem, match="--reconstruct works in one process"):
        Reconstruction(stage, torch.nn.Linear(2, 2), dkm.teacher(torch.nn.Linear(2, 2)), None)
