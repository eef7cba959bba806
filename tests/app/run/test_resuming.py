"""A run that is killed or stopped, and resumed."""

import os
import random
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("typer")
from conftest import log_lines, wait_for_log
from small_run import finish, log, make_place, settings, start_process

from dkm.app import cli
from dkm.app.errors import Problem
from dkm.app.run import prepare
from dkm.app.run_folder import RunFolder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("run"))


def test_killed_ten_times(place: Path, tmp_path: Path):
    options = dict(epochs=8, checkpoint_every=0, teacher="self", augment="imagenet")
    finish(settings(place, tmp_path / "whole", **options))
    chosen, folder, rng = settings(place, tmp_path / "killed", **options), tmp_path / "killed", random.Random(0)
    total = log_lines(tmp_path / "whole")
    for kill in range(10):  # the first time before there is a folder
        lines, calls = (0, 2000) if kill == 0 else (round(total * kill / 11) + rng.randint(0, 3), rng.randint(1, 3000))
        process = start_process(chosen, die_at=(lines, calls))
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert folder.exists() == (kill > 0)
    process = start_process(chosen)
    process.join()
    assert process.exitcode == 0
    assert (folder / "model.dkm").read_bytes() == (tmp_path / "whole" / "model.dkm").read_bytes()
    assert not list(folder.rglob(".*"))  # nothing that was written halfway
    for kind in ("step", "eval", "histogram"):
        mine, whole = log(folder, kind), log(tmp_path / "whole", kind)
        for record in (*mine, *whole):
            record.pop("per_second", None)
        assert mine == whole


@pytest.mark.parametrize(("ask", "workers"), [(signal.SIGINT, 0), (signal.SIGINT, 2), (signal.SIGTERM, 2)])
def test_asked_to_stop_it_leaves_a_checkpoint(place: Path, tmp_path: Path, ask: signal.Signals, workers: int):
    """Asked as a terminal or a scheduler does it: all processes of the run."""
    chosen, folder = settings(place, tmp_path / "run", epochs=100, workers=workers), tmp_path / "run"
    process = start_process(chosen)
    wait_for_log(process.is_alive, folder, 30)
    os.killpg(process.pid, ask)
    process.join()
    assert process.exitcode == 130
    printed = (tmp_path / "run.err").read_text()
    assert printed == f"dkm: stopped; go on with: dkm compress --resume --out {folder}\n"
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


@pytest.mark.skipif(os.name == "nt", reason="there is no lock")
@pytest.mark.parametrize("workers", [0, 2])
def test_one_folder_has_one_process(place: Path, tmp_path: Path, workers: int):
    chosen, folder = (
        settings(place, tmp_path / "run", epochs=200, workers=workers, checkpoint_every=0),
        tmp_path / "run",
    )
    process = start_process(chosen)
    try:
        wait_for_log(process.is_alive, folder, 10)
        with pytest.raises(Problem, match=r"another process is running .*run: wait until it has ended"):
            finish(chosen)
        assert process.is_alive()
    finally:
        process.kill()
        process.join()
    steps = [record["step"] for record in log(folder, "step")]
    assert steps == sorted(set(steps))
    with RunFolder(folder).lock():  # the process was killed, and its workers do not keep the lock
        pass
    wanted = "another process is running"
    with RunFolder(folder).lock(), pytest.raises(Problem, match=wanted), RunFolder(folder).lock():
        pass
    assert {path.name for path in folder.iterdir()} == {"config.toml", "plan.json", "log.jsonl", "checkpoints"}


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_checkpoint_of_something_else(place: Path, tmp_path: Path, part: str):
    chosen = settings(place, tmp_path / "run", epochs=1)
    finish(chosen)
    (tmp_path / "run" / "result.json").unlink()
    file = tmp_path / "run" / "checkpoints" / "last.pt"
    whole = torch.load(file, weights_only=True)
    for other in ([1], {"a": torch.zeros(2)}):
        torch.save(whole | {part: other}, file)
        with pytest.raises(Problem, match=r"last\.pt is not a checkpoint of this run, or is damaged: start"):
            finish(chosen)


def test_a_run_is_not_resumed_as_another_one(place: Path, tmp_path: Path):
    finish(settings(place, tmp_path / "run", epochs=1))
    with pytest.raises(Problem, match=r"was started with --lr 0.01 and not 0.1: leave it out"):
        prepare({"out": str(tmp_path / "run"), "lr": 0.1}, {}, resume=True)
