"""A plan for a size, through the command: what is printed, what the file takes, and how it stops and goes on."""

import json
import os
import signal
import sys
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("typer")
from command_place import call, flags, make_place
from small_run import forget_the_last_run

from dkm.app import cli
from dkm.app.run import choosing
from dkm.foundation import jsonl
from dkm.plans import candidates

NETWORK = """
from torch import nn

def network(classes=2):
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 64), nn.Linear(64, classes))
"""
PATIENCE = 120  # seconds, for what takes one or two


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with pictures and a network that starts from random weights, the same ones every time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    make_place(tmp_path)
    (tmp_path / "layers.py").write_text(NETWORK)
    return tmp_path


def words(**options: str | None) -> list[str]:
    return flags(**dict(model="layers.py:network", weights=None, plan=None, target_size="5kB") | options)


def measurements(run: str = "run") -> list[dict]:
    return jsonl.read(Path(run, "measurements.jsonl"))


# --- the size ------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", ["packed", "entropy"])
@pytest.mark.parametrize("size", ["5kB", "6.1kB"])
def test_the_file_is_not_larger_than_the_target(place: Path, capsys, size: str, coding: str):
    if coding == "entropy":
        pytest.importorskip("constriction")
    call("compress", *words(target_size=size, coding=coding))
    written, limit = Path("run/model.dkm").stat().st_size, round(float(size.removesuffix("kB")) * 1000)
    assert written <= limit
    result = json.loads(Path("run/result.json").read_text())
    assert result["bytes_file"] == written
    if coding == "packed":
        assert written > 0.9 * limit
        assert f"the file takes {written:,} bytes" in capsys.readouterr().out


def test_the_papers_count_by_name(place: Path):
    call("compress", *words(target_size="3kB paper"))
    result = json.loads(Path("run/result.json").read_text())
    assert 2_700 < result["bytes_paper"] <= 3_000 < result["bytes_file"]


def test_the_command_of_the_result_gives_the_same_file(place: Path):
    call("compress", *words())
    call("compress", "--config", "run/config.toml", "--out", "again")
    assert Path("run/model.dkm").read_bytes() == Path("again/model.dkm").read_bytes()


ALLOCATED = {
    "hawq": ({}, "by how strongly the loss curves in each layer, as HAWQ-v2 does", "would cost"),
    "haq": (
        dict(episodes="9"),
        "by trying hundreds of plans, from which an agent learns, as HAQ does",
        "best of 9 tried",
    ),
}


@pytest.mark.parametrize("allocator", ALLOCATED)
def test_another_allocator(place: Path, capsys, allocator: str):
    options, how, why = ALLOCATED[allocator]
    call("compress", *words(allocator=allocator, **options))
    assert Path("run/model.dkm").stat().st_size <= 5_000
    assert f"choosing bits and dim for 5kB {how} ..." in capsys.readouterr().out.splitlines()
    rows = json.loads(Path("run/plan.json").read_text())["rows"]
    assert any(why in row["reason"] for row in rows)
    call("plan", "layers.py:network", *words(out=None, epochs=None, model=None, allocator=allocator, **options))
    assert f"--plan '{json.loads(Path('run/plan.json').read_text())['text']}'" in capsys.readouterr().out


# --- what is printed -----------------------------------------------------------------------------


def test_progress_with_the_time_left(place: Path, capsys):
    call("compress", *words())
    lines = capsys.readouterr().out.splitlines()
    assert "choosing bits and dim for 5kB by what each costs the loss ..." in lines
    assert any(line.startswith("choosing: ") and line.endswith(" left") and "% done" in line for line in lines)


def test_plan_shows_what_would_be_chosen_and_writes_nothing(place: Path, capsys):
    given = words(out=None, epochs=None, model=None)
    call("compress", *words())
    chosen = json.loads(Path("run/plan.json").read_text())["text"]
    before = sorted(place.rglob("*"))
    capsys.readouterr()
    call("plan", "layers.py:network", *given)
    printed = capsys.readouterr()
    assert f"--plan '{chosen}'" in printed.out
    assert "the file takes" in printed.out
    assert not printed.err
    assert sorted(path for path in place.rglob("*") if "__pycache__" not in path.parts) == before


WRONG = {
    "neither": (["layers.py:network"], "which plan? give one, such as 'cv:4/4, fc:8/4', or --target-size 1.0MB with"),
    "no data": (["resnet18", "--target-size", "1MB"], "give --data, as for dkm compress, and --weights"),
    "no weights": (["resnet18", "--target-size", "1MB", "--data", "images"], "--weights FILE, or --weights none"),
    "data for a plan": (["layers.py:network", "all:3", "--data", "images"], "--data is for --target-size: give that"),
    "an allocator for a plan": (["layers.py:network", "all:3", "--allocator", "haq"], "--allocator is for --target-"),
    "the size": (["layers.py:network", *flags(model=None, plan=None, weights=None, out=None, epochs=None),
                  "--target-size", "1B"], "is too small: the smallest plan of these candidates takes"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_plan_says_what_it_needs(place: Path, capsys, case: str):
    arguments, sentence = WRONG[case]
    call("plan", *arguments, code=2)
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.count("\n") == 1


# --- stopped and resumed -------------------------------------------------------------------------


def start(*arguments: str, halt_after: int) -> BaseProcess:
    """The command in a process that does something for ever, after so many measurements are written."""

    def target() -> None:
        append = jsonl.append

        def append_and_halt(path: Path, record: dict) -> None:
            append(path, record)
            if path.name == "measurements.jsonl" and len(jsonl.read(path)) >= halt_after:
                time.sleep(PATIENCE)

        jsonl.append = append_and_halt
        forget_the_last_run()
        with open("errors", "w") as sys.stderr:
            cli.main(list(arguments))

    process = get_context("fork").Process(target=target)
    process.start()
    return process


def wait_for(condition, process: BaseProcess) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process.is_alive()
        assert time.monotonic() < end
        time.sleep(0.01)


HALTS = {"dkm": ({}, 2), "hawq": (dict(allocator="hawq"), 1), "haq": (dict(allocator="haq", episodes="9"), 4)}


@pytest.mark.parametrize(
    ("allocator", "number"),
    [("dkm", signal.SIGINT), ("dkm", signal.SIGTERM), ("hawq", signal.SIGINT), ("haq", signal.SIGINT)],
)
def test_it_stops_in_the_midst_of_choosing_and_resumes(place: Path, allocator: str, number: int):
    options, count = HALTS[allocator]
    call("compress", *words(out="whole", **options))
    process = start("compress", *words(**options), halt_after=count)
    path = Path("run/measurements.jsonl")
    wait_for(lambda: path.exists() and len(jsonl.read(path)) >= count, process)
    os.kill(process.pid, number)
    process.join(PATIENCE / 2)  # much less than what it was doing would take
    assert process.exitcode == 130
    assert "dkm: stopped; go on with: dkm compress --resume --out run" in Path("errors").read_text()
    kept = measurements()
    assert len(kept) == count
    assert not Path("run/plan.json").exists()

    call("compress", "--resume", "--out", "run")
    resumed = measurements()
    assert resumed[:count] == kept
    assert len({record["what"] for record in resumed}) == len(resumed)  # no measurement is made twice
    assert resumed == measurements("whole")
    assert Path("run/model.dkm").read_bytes() == Path("whole/model.dkm").read_bytes()


def test_it_is_killed_and_resumed(place: Path):
    process = start("compress", *words(), halt_after=1)
    path = Path("run/measurements.jsonl")
    wait_for(lambda: path.exists() and len(jsonl.read(path)) >= 1, process)
    process.kill()
    process.join()
    with open(path, "a") as stream:
        stream.write('{"of": "cut o')  # as a full disk or a power failure leaves it
    call("compress", "--resume", "--out", "run")
    assert len({record["what"] for record in measurements()}) == len(measurements()) > 1


def test_measurements_of_another_model_are_not_used(place: Path, monkeypatch: pytest.MonkeyPatch):
    """Nor those of other data or settings: each has a checksum of what it depends on."""

    class Asked(Exception):
        """A plan is asked for, which ends the run."""

    def make_plan(*args, measured, **rest):
        keys.append(measured.key)
        raise Asked

    monkeypatch.setattr(choosing, "make_plan", make_plan)
    keys = []
    network = Path("layers.py").read_text()
    for change in ("nothing", "nothing", "seed", "data", "model"):
        options = dict(out=f"run{len(keys)}") | ({"seed": "1"} if change == "seed" else {})
        if change == "data":
            for image in Path("images/a").iterdir():
                image.write_bytes(Path("images/b/01.png").read_bytes())
        if change == "model":
            Path("wider.py").write_text(network.replace("(32, 64)", "(32, 65)").replace("(64,", "(65,"))
            options["model"] = "wider.py:network"
        with pytest.raises(Asked):
            cli.main(["compress", *words(**options)])
        forget_the_last_run()
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


def test_measurements_that_are_something_else(place: Path, capsys):
    process = start("compress", *words(), halt_after=1)
    path = Path("run/measurements.jsonl")
    wait_for(lambda: path.exists() and len(jsonl.read(path)) >= 1, process)
    process.kill()
    process.join()
    path.write_text("no measurements\n")
    call("compress", "--resume", "--out", "run", code=2)
    assert "measurements.jsonl" in capsys.readouterr().err
    path.unlink()
    call("compress", "--resume", "--out", "run")
    assert Path("run/model.dkm").exists()


def test_the_folder_goes_away_where_no_plan_can_be_chosen(place: Path, capsys):
    call("compress", *words(target_size="1B"), code=2)
    assert "is too small" in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_stop_ends_k_means_too(place: Path, monkeypatch: pytest.MonkeyPatch):
    """The signal comes while k-means computes, and nothing asks whether there was one until that ends."""

    def endless(*args, **options):
        Path("begun").touch()
        time.sleep(PATIENCE)

    monkeypatch.setattr(candidates, "kmeans_groups", endless)
    process = start("compress", *words(), halt_after=1000)
    wait_for(Path("begun").exists, process)
    os.kill(process.pid, signal.SIGINT)
    process.join(PATIENCE / 2)
    assert process.exitcode == 130
    assert len(measurements()) == 1
