"""The files of a run folder: written whole, and read as they were written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dkm
from dkm.app.errors import Problem
from dkm.app.measures import Score
from dkm.app.run_folder import Checkpoint, RunFolder, StepRecord, plan_file
from dkm.app.settings import make
from dkm.foundation import jsonl


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "some" / "run")
    plan = dkm.plan(nn.Sequential(nn.Linear(8, 4)), "0:2")
    folder.create(make({"model": "resnet18", "plan": "0:2", "out": "run"}), plan_file(plan, "0:2"))
    return folder


def test_what_it_is_created_with(folder: RunFolder):
    assert folder.is_run()
    assert folder.read_settings() == make({"model": "resnet18", "plan": "0:2", "out": "run"})
    plan = folder.read_plan()
    assert (plan["text"], plan["dense_bytes"]) == ("0:2", 4 * (8 * 4 + 4))
    assert [(row["name"], row["shape"], row["bits"]) for row in plan["rows"]] == [
        ("0.weight", [4, 8], 2),
        ("0.bias", [4], None),
    ]
    assert folder.read_result() is None
    assert folder.read_checkpoint() is None
    assert not list(folder.path.parent.glob(".*"))


def test_the_log_can_be_cut(folder: RunFolder):
    folder.keep_log_lines(0)  # there is none yet
    records = [StepRecord(kind="step", step=step, epoch=step / 2, loss=1.0) for step in range(4)]
    for record in records:
        folder.append(record)
    folder.keep_log_lines(2)
    assert jsonl.read(folder.log) == records[:2]


def test_a_checkpoint_comes_back(folder: RunFolder):
    tensors = {"w": torch.arange(3.0)}
    state = Checkpoint(
        model=tensors, optimizer={"state": {}}, scaler=None, codes={"w": torch.zeros(2, dtype=torch.uint8)}, done=3,
        blocks_done=2, evaluated=-1, lines=5, before=50.0, seconds=1.5, steps=7, world=1,
        score_before=Score(50.0, 0.7, 10, None, {})._asdict(),
    )  # fmt: skip
    folder.write_checkpoint(state)
    found = folder.read_checkpoint()
    assert found is not None
    assert found.keys() == state.keys() == Checkpoint.__annotations__.keys()
    assert torch.equal(found["model"]["w"], tensors["w"])
    folder.checkpoint.write_bytes(b"no checkpoint")
    with pytest.raises(Problem, match=r"cannot read the checkpoint .*last\.pt"):
        folder.read_checkpoint()


@pytest.mark.parametrize(
    "state", [None, [1, 2], {"w": torch.zeros(2)}, torch.zeros(2)], ids=["empty", "list", "foreign", "tensor"]
)
def test_what_is_no_checkpoint(folder: RunFolder, state: Any):
    if state is None:
        folder.checkpoint.write_bytes(b"")
    else:
        torch.save(state, folder.checkpoint)
    with pytest.raises(
        Problem, match=r"checkpoint.*last\.pt|last\.pt is not the checkpoint of a run: start the run anew"
    ):
        folder.read_checkpoint()


@pytest.mark.parametrize("text", ["", "{", '{"text": "0:2", "ro', "[1]", "{}", '{"text": 5}', "[" * 100_000, "\udcff"])
def test_a_plan_that_is_cut_off(folder: RunFolder, text: str):
    folder.plan.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(Problem, match=r"plan\.json .*: start the run anew in another --out"):
        folder.read_plan()


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"accuracy_before": "high"}', '{"accuracy_before": 1e999}'])
def test_a_result_that_is_cut_off(folder: RunFolder, text: str):
    folder.result.write_text(text)
    with pytest.raises(Problem, match=r"result\.json .*: take the file away, and --resume writes it again"):
        folder.read_result()


def test_what_a_killed_run_left_is_removed(folder: RunFolder):
    whole = [folder.config, folder.plan]
    for path in (folder.result, folder.checkpoint):
        path.with_name(f".{path.name}.abc.partial").write_text("half")
    folder.remove_unfinished_files()
    assert sorted(path for path in folder.path.rglob("*") if path.is_file()) == sorted(whole)


def test_a_folder_of_something_else(tmp_path: Path):
    (tmp_path / "result.json").write_text(json.dumps({}))
    with pytest.raises(Problem, match=r"is not the folder of a run: it has no config\.toml"):
        RunFolder(tmp_path).read_settings()
