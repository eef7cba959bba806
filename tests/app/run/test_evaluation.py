"""Evaluations: with the right weights and statistics, and without a trace."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
from small_run import finish, make_place, settings

import dkm
from dkm.app import models
from dkm.app.run import Listener, open_stage
from dkm.app.run.evaluation import read_train_time_weights


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("run"))


def test_the_statistics_of_the_file_are_those_of_the_snapped_network(place: Path, tmp_path: Path):
    chosen = settings(place, tmp_path / "run")
    finish(chosen)
    state = dkm.load(tmp_path / "run" / "model.dkm")
    model = models.build(chosen.model, None, 3)[0]
    dkm.load(tmp_path / "run" / "model.dkm", into=model)
    stage, _ = open_stage(chosen, Listener())
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
        read_train_time_weights(model)
        model.eval()
        assert torch.equal(model[0].weight, soft)
    assert len(model[0].weight.unique()) <= 4
