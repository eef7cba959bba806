"""A run: what is in its folder, and that it survives whatever happens to it."""

import errno
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import safetensors.torch
import torch
from conftest import log_lines, wait_for_log

import dkm
from dkm.app import cli, models, run
from dkm.app.settings import Problem, Settings, make
from dkm.formats import dkm_file
from dkm.foundation import jsonl

accelerate = pytest.importorskip("accelerate")

NETWORK = """
from torch import nn

def network(classes=3):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1),
        nn.Conv2d(8, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes),
    )
"""
PLAN = "0:3/1, 4:4/2, 7:2"


@pytest.fixture(autouse=True)
def _forget_the_last_run():
    """Accelerate has one state a process, and the tests have many runs."""
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """60 pictures of three classes, a network, and its weights."""
    place, rng = tmp_path_factory.mktemp("run"), np.random.default_rng(0)
    for i in range(60):
        pixels = rng.integers(0, 100, (12, 12, 3), np.uint8)
        pixels[..., i % 3] += 60
        path = place / "images" / "abc"[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(pixels).save(path)
    (place / "network.py").write_text(NETWORK)
    torch.manual_seed(0)
    model = models.function(f"{place / 'network.py'}:network")()
    safetensors.torch.save_file(model.state_dict(), place / "weights.safetensors")
    return place


def settings(place: Path, out: Path, **options) -> Settings:
    given = dict(
        model=f"{place / 'network.py'}:network",
        weights=str(place / "weights.safetensors"),
        data=str(place / "images"),
        plan=PLAN,
        out=str(out),
        epochs=2,
        batch_size=9,
        image_size=12,
        resize=14,
        lr=1e-2,
        device="cpu",
    )
    return make(given | options)


def finish(chosen: Settings) -> dict:
    accelerate.state.AcceleratorState._reset_state(True)
    return run.compress(chosen, resume=run.is_run(Path(chosen.out)))


def log(folder: Path, kind: str) -> list[dict]:
    return [record for record in jsonl.read(folder / "log.jsonl") if record["kind"] == kind]


def test_the_folder(place: Path, tmp_path: Path):
    chosen = settings(place, tmp_path / "run")
    result = finish(chosen)
    folder = tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    files = {"config.toml", "plan.json", "log.jsonl", "model.dkm", "result.json", "report.html"}
    assert names == files | {"checkpoints"}
    assert run.stored(folder) == chosen
    assert json.loads((folder / "result.json").read_text()) == result
    assert result["finished"] is True
    assert result["steps"] == 12
    assert result["bytes_file"] == (folder / "model.dkm").stat().st_size
    assert result["bytes_dense"] == 4 * sum(p.numel() for p in models.outline(chosen.model, 3).parameters())

    plan = json.loads((folder / "plan.json").read_text())
    wanted = dkm.plan(models.outline(chosen.model, 3), PLAN)
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


def test_the_statistics_of_the_file_are_those_of_the_snapped_network(place: Path, tmp_path: Path):
    chosen = settings(place, tmp_path / "run")
    finish(chosen)
    state = dkm.load(tmp_path / "run" / "model.dkm")
    model = models.build(chosen.model, None, 3)[0]
    dkm.load(tmp_path / "run" / "model.dkm", into=model)
    stage, _ = run.open_stage(chosen, run.silent)
    dkm.recalibrate_(model, (x for x, _ in stage.sample(chosen.recalibrate)))
    torch.testing.assert_close(model[1].running_mean, state["1.running_mean"], rtol=1e-3, atol=1e-4)


def test_an_evaluation_changes_nothing(place: Path, tmp_path: Path):
    finish(settings(place, tmp_path / "often", eval_every=1, epochs=3))
    finish(settings(place, tmp_path / "once", eval_every=3, epochs=3))
    files = [(tmp_path / name / "model.dkm").read_bytes() for name in ("often", "once")]
    assert files[0] == files[1]


def test_the_soft_accuracy_is_that_of_train_time_weights():
    model = torch.nn.Sequential(torch.nn.Linear(20, 20))
    dkm.compress_(model, "0:2", tau=0.1)
    soft = model[0].weight.detach()
    model.eval()
    assert not torch.equal(model[0].weight, soft)
    with torch.nn.utils.parametrize.cached():
        run._read_soft(model)
        model.eval()
        assert torch.equal(model[0].weight, soft)
    assert len(model[0].weight.unique()) <= 4


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
        dict(plan=None, target_size="1kB"),
        dict(epochs=0),
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_every_option_ends_in_a_file(place: Path, tmp_path: Path, options: dict):
    result = finish(settings(place, tmp_path / "run", **{"epochs": 1} | options))
    assert result["finished"]
    assert dkm.load(tmp_path / "run" / "model.dkm")["0.weight"].shape == (8, 3, 3, 3)


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

    monkeypatch.setattr(run, "capture", Recorded)
    result = run.compress(settings(place, tmp_path / "run", device="auto", epochs=4, **options))
    assert made[0].captured
    assert result["finished"]


def test_a_teacher_needs_no_labels(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Other labels, the same network."""
    finish(settings(place, tmp_path / "right", teacher="self"))
    split = run.split
    monkeypatch.setattr(run, "split", lambda batch: (*split(batch)[:2], torch.zeros_like(split(batch)[2])))
    finish(settings(place, tmp_path / "wrong", teacher="self"))
    assert (tmp_path / "right" / "model.dkm").read_bytes() == (tmp_path / "wrong" / "model.dkm").read_bytes()


def test_frozen_batch_norm_trains_with_the_statistics_of_the_start(place: Path, tmp_path: Path, monkeypatch):
    finish(settings(place, tmp_path / "as it came", batch_norm="frozen", recalibrate=0))
    assert dkm.load(tmp_path / "as it came" / "model.dkm")["1.running_mean"].eq(0).all()
    during, step = [], run.Training._step
    monkeypatch.setattr(
        run.Training,
        "_step",
        lambda self, batch: (during.append(self.model[1].running_mean.clone()), step(self, batch)),
    )
    finish(settings(place, tmp_path / "re-estimated", batch_norm="frozen"))
    assert all(torch.equal(during[0], mean) for mean in during)
    assert not during[0].eq(0).all()


def test_the_target_size_is_kept(place: Path, tmp_path: Path):
    result = finish(settings(place, tmp_path / "run", plan=None, target_size="700B", epochs=1))
    assert result["bytes_paper"] <= 700
    text = json.loads((tmp_path / "run" / "plan.json").read_text())["text"]
    assert dkm.plan(models.outline(f"{place / 'network.py'}:network", 3), text).bytes == result["bytes_paper"]


# --- stopped and resumed -------------------------------------------------------------------------


def life(chosen: Settings) -> multiprocessing.Process:
    """The command, in a process of its own; forked, because importing torch takes longer than the run."""
    arguments = ["compress", "--resume"]
    for name in Settings.__dataclass_fields__:
        value = getattr(chosen, name)
        for item in value if isinstance(value, tuple) else () if value is None else (value,):
            arguments += [f"--{name.replace('_', '-')}", str(item)]

    def target() -> None:
        os.setpgid(0, 0)
        with open(os.devnull, "w") as nothing, open(Path(chosen.out).with_suffix(".err"), "a") as errors:
            sys.stdout, sys.stderr = nothing, errors
            cli.main(arguments)

    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    return process


def test_killed_ten_times(place: Path, tmp_path: Path):
    options = dict(epochs=8, checkpoint_every=0, teacher="self", augment="imagenet")
    finish(settings(place, tmp_path / "whole", **options))
    chosen, folder, rng = settings(place, tmp_path / "killed", **options), tmp_path / "killed", random.Random(0)
    total = log_lines(tmp_path / "whole")
    for kill in range(10):
        process = life(chosen)
        if kill == 0:
            time.sleep(0.05)  # before there is a folder
        else:
            wait_for_log(process.is_alive, folder, round(total * kill / 11) + rng.randint(0, 3))
            time.sleep(rng.uniform(0, 0.03))  # anywhere in a step, an evaluation, the writing of a checkpoint
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it ended before it was killed"
    process = life(chosen)
    process.join()
    assert process.exitcode == 0
    assert (folder / "model.dkm").read_bytes() == (tmp_path / "whole" / "model.dkm").read_bytes()
    for kind in ("step", "eval", "histogram"):
        mine, whole = log(folder, kind), log(tmp_path / "whole", kind)
        for record in (*mine, *whole):
            record.pop("per_second", None)
        assert mine == whole


@pytest.mark.parametrize(("ask", "workers"), [(signal.SIGINT, 0), (signal.SIGINT, 2), (signal.SIGTERM, 2)])
def test_asked_to_stop_it_leaves_a_checkpoint(place: Path, tmp_path: Path, ask: signal.Signals, workers: int):
    """Asked as a terminal or a scheduler does it: all processes of the run."""
    chosen, folder = settings(place, tmp_path / "run", epochs=100, workers=workers), tmp_path / "run"
    process = life(chosen)
    wait_for_log(process.is_alive, folder, 30)
    os.killpg(process.pid, ask)
    process.join()
    assert process.exitcode == 130
    said = (tmp_path / "run.err").read_text()
    assert said == f"dkm: stopped; go on with: dkm compress --resume --out {folder}\n"
    done = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["done"]
    steps = [record["step"] for record in log(folder, "step")]
    assert done >= steps[-1]


def test_resuming_a_finished_run_says_so_and_changes_nothing(place: Path, tmp_path: Path, capsys):
    finish(settings(place, tmp_path / "run", epochs=1))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with pytest.raises(SystemExit) as end:
        cli.main(["compress", "--resume", "--out", str(tmp_path / "run")])
    assert end.value.code == 0
    assert "is finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_a_run_is_not_resumed_as_another_one(place: Path, tmp_path: Path):
    finish(settings(place, tmp_path / "run", epochs=1))
    with pytest.raises(Problem, match=r"was started with --lr 0.01 and not 0.1: leave it out"):
        run.prepare({"out": str(tmp_path / "run"), "lr": 0.1}, {}, resume=True)


# --- a full disk ---------------------------------------------------------------------------------


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
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(Problem, match=r"cannot make the folder .*: No space left on device"):
        finish(settings(place, tmp_path / "run"))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_at_the_log(place: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(jsonl, "append", full)
    with pytest.raises(Problem, match=r"cannot write .*log\.jsonl: No space left on device"):
        finish(settings(place, tmp_path / "run", epochs=1))


def test_a_full_disk_at_the_end(place: Path, tmp_path: Path, monkeypatch):
    sync, write = os.fsync, dkm_file._write

    def only_there(*args):
        monkeypatch.setattr(os, "fsync", full)
        try:
            return write(*args)
        finally:
            monkeypatch.setattr(os, "fsync", sync)

    monkeypatch.setattr(dkm_file, "_write", only_there)
    with pytest.raises(Problem, match=r"cannot write .*model\.dkm: No space left on device"):
        finish(settings(place, tmp_path / "run", epochs=1))
    assert not list((tmp_path / "run").glob("*model.dkm*"))
    monkeypatch.undo()
    assert finish(settings(place, tmp_path / "run", epochs=1))["finished"]


def test_a_loss_that_is_not_a_number_is_said(place: Path, tmp_path: Path):
    with pytest.raises(Problem, match=r"the training diverged.*: lower --lr"):
        finish(settings(place, tmp_path / "run", optimizer="sgd", lr=1e30, schedule="constant"))


# --- pieces --------------------------------------------------------------------------------------


def test_the_order_has_everything_once_an_epoch_and_can_begin_anywhere():
    whole = list(run.Order(20, 3, 2, 0, seed=0, first=0, steps=6))
    other = list(run.Order(20, 3, 2, 1, seed=0, first=0, steps=6))
    first = [index for keys in (*whole[:3], *other[:3]) for _, index in keys]
    assert len(set(first)) == 18
    assert list(run.Order(20, 3, 2, 0, seed=0, first=4, steps=6)) == whole[4:]
    assert [index for _, index in whole[0]] != [index for _, index in whole[3]]
    assert len({seed for keys in (*whole, *other) for seed, _ in keys}) == 36


@pytest.mark.parametrize(
    ("schedule", "at_half", "at_end"), [("cosine", 0.5, 0.0), ("linear", 0.5, 0.0), ("constant", 1.0, 1.0)]
)
def test_learning_rate(schedule: str, at_half: float, at_end: float):
    chosen = Settings(schedule=schedule)
    assert run.learning_rate(chosen, 1.0, 0, 100) == 1.0
    assert run.learning_rate(chosen, 1.0, 50, 100) == pytest.approx(at_half)
    assert run.learning_rate(chosen, 1.0, 100, 100) == pytest.approx(at_end)
    rising = [run.learning_rate(Settings(schedule=schedule, warmup=0.1), 1.0, step, 100) for step in range(11)]
    assert rising == sorted(rising)
    assert rising[0] == pytest.approx(1 / 11)
