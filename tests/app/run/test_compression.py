"""A whole run: what is in its folder, and that every setting comes to an end."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

pytest.importorskip("accelerate")
from small_run import PLAN, finish, log, make_place, settings

import dkm
from dkm.app import models
from dkm.app.errors import Problem
from dkm.app.own_code import load_function
from dkm.app.run import training_step
from dkm.app.run.training_step import TrainingStep
from dkm.app.run_folder import RunFolder
from dkm.app.tasks import Task


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("run"))


def test_the_folder(place: Path, tmp_path: Path):
    chosen = settings(place, tmp_path / "run")
    result = finish(chosen)
    folder = tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    files = {"config.toml", "plan.json", "log.jsonl", "model.dkm", "result.json", "report.html"}
    assert names == files | {"checkpoints"}
    assert RunFolder(folder).read_settings() == chosen
    assert json.loads((folder / "result.json").read_text()) == result
    assert result["finished"] is True
    assert result["steps"] == 12
    assert result["bytes_file"] == (folder / "model.dkm").stat().st_size
    assert result["bytes_dense"] == 4 * sum(
        p.numel() for p in models.model_without_values(chosen.model, 3).parameters()
    )

    plan = json.loads((folder / "plan.json").read_text())
    wanted = dkm.plan(models.model_without_values(chosen.model, 3), PLAN)
    assert plan["text"] == PLAN
    assert plan["bytes"] == wanted.bytes == result["bytes_paper"]
    assert [(row["name"], row["bits"], row["dim"]) for row in plan["rows"]] == [
        (row.name, row.bits, row.dim) for row in wanted.rows
    ]

    steps, evals = log(folder, "step"), log(folder, "eval")
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert all(np.isfinite([record[key] for record in steps for key in ("loss", "lr", "per_second")]))
    assert [(record["step"], record["epoch"]) for record in evals] == [(0, 0.0), (6, 1.0), (12, 2.0)]
    assert [record["soft"] is None for record in evals] == [True, False, False]
    layers = log(folder, "layers")
    assert [record["step"] for record in layers] == list(range(13))
    assert set(layers[0]["tensors"]) == {"0.weight", "4.weight", "7.weight"}
    for record in log(folder, "histogram"):
        assert len(record["edges"]) == len(record["counts"]) + 1
        assert len(record["centroids"]) == {"0.weight": 8, "4.weight": 16, "7.weight": 4}[record["name"]]
        assert sum(record["counts"]) == {"0.weight": 216, "4.weight": 576, "7.weight": 48}[record["name"]]


def test_it_learns_and_the_file_has_what_was_measured(place: Path, tmp_path: Path):
    result = finish(settings(place, tmp_path / "run", epochs=12))
    last = log(tmp_path / "run", "eval")[-1]
    assert result["accuracy_before"] < 60
    assert result["accuracy_after"] > 80
    assert result["accuracy_after"] == pytest.approx(last["snapped"], abs=100 / 6 + 0.1)  # biases are rounded


def test_workers_change_nothing(place: Path, tmp_path: Path):
    finish(settings(place, tmp_path / "none"))
    finish(settings(place, tmp_path / "two", workers=2))
    assert (tmp_path / "none" / "model.dkm").read_bytes() == (tmp_path / "two" / "model.dkm").read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        dict(teacher="self"),
        dict(teacher="self", label_share=0.3, mixup=0.5, temperature=2.0),
        dict(optimizer="sgd", schedule="constant", label_smoothing=0.1, clip=1.0),
        dict(method="hard"),
        dict(tau="learn", optimizer="adam", schedule="linear", warmup=0.2),
        dict(batch_norm="frozen", recalibrate=0),
        dict(autocast="bf16"),
        dict(augment="medium", gradient="implicit"),
        dict(plan=None, target_size="1kB paper"),
        dict(epochs=0),
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_every_option_ends_in_a_file(place: Path, tmp_path: Path, options: dict):
    result = finish(settings(place, tmp_path / "run", **{"epochs": 1} | options))
    assert result["finished"]
    assert dkm.load(tmp_path / "run" / "model.dkm")["0.weight"].shape == (8, 3, 3, 3)


def test_codes_by_their_entropy(place: Path, tmp_path: Path):
    model = load_function(f"{place / 'network.py'}:network")()
    with torch.no_grad():
        model[4].weight.normal_().pow_(5)  # a few centroids get most of the codes
    safetensors.torch.save_file(model.state_dict(), tmp_path / "normal.safetensors")
    options = dict(weights=str(tmp_path / "normal.safetensors"), plan="4:3", epochs=0)
    results = {way: finish(settings(place, tmp_path / way, coding=way, **options)) for way in ("packed", "entropy")}
    assert results["entropy"]["bytes_file"] < results["packed"]["bytes_file"]
    states = [dkm.load(tmp_path / way / "model.dkm") for way in results]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "options",
    [{}, dict(optimizer="sgd"), dict(teacher="self", mixup=0.2, autocast="bf16", clip=1.0, workers=2)],
    ids=["adamw", "sgd", "all"],
)
def test_on_a_gpu_the_steps_are_a_graph(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict):
    made = []

    class Recorded(dkm.capture):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(training_step, "capture", Recorded)
    result = finish(settings(place, tmp_path / "run", device="auto", epochs=4, **options))
    assert made[0].captured
    assert result["finished"]


def test_a_teacher_needs_no_labels(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Other labels, the same network."""
    finish(settings(place, tmp_path / "right", teacher="self"))
    split = Task.split
    monkeypatch.setattr(
        Task,
        "split",
        lambda self, batch: split(self, batch)._replace(labels=torch.zeros_like(split(self, batch).labels)),
    )
    finish(settings(place, tmp_path / "wrong", teacher="self"))
    assert (tmp_path / "right" / "model.dkm").read_bytes() == (tmp_path / "wrong" / "model.dkm").read_bytes()


def test_frozen_batch_norm_trains_with_the_statistics_of_the_start(place: Path, tmp_path: Path, monkeypatch):
    finish(settings(place, tmp_path / "as it came", batch_norm="frozen", recalibrate=0))
    assert dkm.load(tmp_path / "as it came" / "model.dkm")["1.running_mean"].eq(0).all()
    during, take = [], TrainingStep.take

    def observed(self: TrainingStep, *args):
        during.append(self.model[1].running_mean.clone())
        return take(self, *args)

    monkeypatch.setattr(TrainingStep, "take", observed)
    finish(settings(place, tmp_path / "re-estimated", batch_norm="frozen"))
    assert all(torch.equal(during[0], mean) for mean in during)
    assert not during[0].eq(0).all()


def test_the_target_size_is_kept(place: Path, tmp_path: Path):
    result = finish(settings(place, tmp_path / "run", plan=None, target_size="700B paper", epochs=1))
    assert result["bytes_paper"] <= 700
    text = json.loads((tmp_path / "run" / "plan.json").read_text())["text"]
    assert (
        dkm.plan(models.model_without_values(f"{place / 'network.py'}:network", 3), text).bytes == result["bytes_paper"]
    )


def test_a_loss_that_is_not_a_number_is_said(place: Path, tmp_path: Path):
    with pytest.raises(Problem, match=r"the training diverged.*: lower --lr"):
        finish(settings(place, tmp_path / "run", optimizer="sgd", lr=1e30, schedule="constant"))
