"""Trackers: what they are told is what the log says."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
import accelerate
from small_run import finish, log, make_place, settings
from tracker_of_lines import OWN, lines

from dkm.app.errors import Problem
from dkm.app.run import Stopped, tracking
from dkm.app.settings import Settings


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    sys.modules.pop("own", None)  # of another test: it is another file
    return make_place(tmp_path)


def logged(run: Path) -> list[tuple[int, dict[str, float]]]:
    return [(step, values) for kind, *rest in lines(run) if kind == "log" for step, values in [rest]]


def test_a_tracker_is_told_what_the_log_says(place: Path, tmp_path: Path):
    result = finish(settings(place, tmp_path / "run", tracker=f"{place / 'own.py'}:Lines"))
    run = tmp_path / "run"
    assert [kind for kind, *_ in lines(run)][:3] == ["start", "config", "log"]
    assert lines(run)[-1] == ["finish"]
    config = lines(run)[1][1]
    assert (config["epochs"], config["lr"], config["plan"]) == (2, 1e-2, "0:3/1, 4:4/2, 7:2")

    told = logged(run)
    steps = [(step, values) for step, values in told if "train/loss" in values]
    assert [(step, values["train/loss"], values["train/lr"]) for step, values in steps] == [
        (record["step"], record["loss"], record["lr"]) for record in log(run, "step")
    ]
    evaluations = [(step, values) for step, values in told if "eval/accuracy" in values]
    assert [(step, values["eval/accuracy"], values["eval/loss"]) for step, values in evaluations] == [
        (record["step"], record["snapped"], record["loss"]) for record in log(run, "eval")
    ]
    assert "eval/accuracy_train_time" not in evaluations[0][1]  # at the start there is none
    assert evaluations[-1][1]["eval/accuracy_train_time"] == log(run, "eval")[-1]["soft"]
    gaps = [(step, values["clustering/snap_gap"]) for step, values in told if "clustering/snap_gap" in values]
    assert gaps == [(record["step"], record["total"]["gap"]) for record in log(run, "layers")]
    assert (0, {"eval/accuracy_before": result["accuracy_before"]}) in told
    last = {"result/accuracy": result["accuracy_after"], "result/ratio": result["ratio"]}
    assert told[-1] == (12, last | {"result/bytes_file": result["bytes_file"]})


def test_a_tracker_changes_nothing_else(place: Path, tmp_path: Path):
    finish(settings(place, tmp_path / "run", tracker=f"{place / 'own.py'}:Lines"))
    finish(settings(place, tmp_path / "plain"))
    assert (tmp_path / "run/model.dkm").read_bytes() == (tmp_path / "plain/model.dkm").read_bytes()
    assert not (tmp_path / "plain/lines.jsonl").exists()


def run_and_stop(chosen: Settings, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Run until this step is logged, and stop there."""

    def stop(record: dict) -> dict[str, float]:
        if record["step"] == step:
            raise Stopped
        return tracking.tracked(record)

    with monkeypatch.context() as patch:
        patch.setattr("dkm.app.run.training.tracked", stop)
        with pytest.raises(Stopped):
            finish(chosen)


def test_a_resumed_run_goes_on(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chosen = settings(place, tmp_path / "run", tracker=f"{place / 'own.py'}:Lines")
    run_and_stop(chosen, monkeypatch, 8)
    assert lines(tmp_path / "run")[-1] == ["finish"]
    finish(chosen)  # from the checkpoint of step 6
    kinds = [kind for kind, *_ in lines(tmp_path / "run")]
    assert (kinds.count("start"), kinds.count("config"), kinds.count("finish")) == (2, 1, 2)
    steps = [step for step, values in logged(tmp_path / "run") if "train/loss" in values]
    assert steps == [*range(1, 8), *range(7, 13)]


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put a tracker that only remembers into the place of Accelerate's, whose package the tests do without."""
    made = []

    class StandIn(accelerate.tracking.GeneralTracker):
        requires_logging_directory = False
        tracker = None

        def __init__(self, *args, **options):
            super().__init__()
            self.args, self.options, self.config, self.steps = args, options, {}, []
            made.append(self)

        def store_init_configuration(self, values):
            self.config = values

        def log(self, values, step=None, **kwargs):
            self.steps.append(step)

    StandIn.name = name
    kind = {"tensorboard": "TensorBoardTracker", "wandb": "WandBTracker"}[name]
    monkeypatch.setattr(accelerate.tracking, kind, StandIn)
    monkeypatch.setattr(accelerate.utils, f"is_{name}_available", lambda: True)
    return made


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_its_files_lie_in_the_folder_of_the_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    made = stand_in(name, monkeypatch)
    chosen = settings(place, tmp_path / "run", tracker=name)
    run_and_stop(chosen, monkeypatch, 8)
    finish(chosen)
    first, again = made
    assert all(isinstance(value, int | float | str) for value in first.config.values())
    assert (first.steps[-1], again.steps[0], again.steps[-1]) == (7, 6, 12)
    if name == "tensorboard":
        assert first.args == again.args == ("tensorboard", tmp_path / "run")
        assert (first.options, again.options) == ({}, {"purge_step": 7})
    else:
        assert first.options == again.options
        assert first.options["dir"] == str(tmp_path / "run")
        assert (first.options["name"], first.options["resume"]) == ("run", "allow")


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_said_at_once(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(accelerate.utils, f"is_{name}_available", lambda: False)
    with pytest.raises(Problem, match=f"--tracker {name} needs a package .*: pip install {name}$"):
        finish(settings(place, tmp_path / "run", tracker=name))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("tracker", "sentence"),
    [
        ("own.py:wrong", "must return one of Accelerate's trackers.*'no tracker'"),
        ("own.py:Refused", "did not start: you are not logged in$"),
        ("own.py:nothing", "has no function 'nothing'"),
    ],
)
def test_a_tracker_that_is_none(place: Path, tmp_path: Path, tracker: str, sentence: str):
    with pytest.raises(Problem, match=sentence):
        finish(settings(place, tmp_path / "run", tracker=str(place / tracker)))
    assert not (tmp_path / "run").exists()


def test_a_wrong_name_is_refused(place: Path, tmp_path: Path):
    with pytest.raises(Problem, match=r"--tracker must be none, tensorboard, wandb or FILE\.py:FUNCTION, and not 'x'"):
        settings(place, tmp_path / "run", tracker="x")
