"""A training that diverges: the last checkpoint with finite weights stays, and one sentence says what to do."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
from small_run import finish, make_place, settings

from dkm.app.errors import Problem
from dkm.app.run.training_step import TrainingStep


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("run"))


def spoil(monkeypatch: pytest.MonkeyPatch, at: int, value: float) -> None:
    """Make the step of this number, counted from 1, leave this value in every weight, its loss being finite."""
    take = TrainingStep.take

    def spoiled(self: TrainingStep, batch: object, step: int, steps: int):
        taken = take(self, batch, step, steps)
        if step + 1 == at:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(value)
        return taken

    monkeypatch.setattr(TrainingStep, "take", spoiled)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("every", [0, 1000], ids=["a checkpoint at every step", "a checkpoint at every epoch"])
@pytest.mark.parametrize("at", [8, 12], ids=["in an epoch", "in the last step"])
def test_the_last_finite_checkpoint_stays(place: Path, tmp_path: Path, monkeypatch, value: float, every: int, at: int):
    spoil(monkeypatch, at, value)
    chosen = settings(place, tmp_path / "run", checkpoint_every=every)  # two epochs of six steps
    last = at - 1 if every == 0 else 6
    wanted = rf"the training diverged, .* at step \d+, and the last checkpoint is of step {last}: lower --lr and start"
    for _ in range(2):  # the second time resumed
        with pytest.raises(Problem, match=wanted):
            finish(chosen)
        state = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)
        assert state["done"] == last
        assert all(tensor.isfinite().all() for tensor in state["model"].values())
    assert not (tmp_path / "run" / "model.dkm").exists()


@pytest.mark.parametrize("value", [1e30, -3e38])
@pytest.mark.parametrize("at", [8, 12], ids=["in an epoch", "in the last step"])
def test_weights_that_are_finite_and_useless(place: Path, tmp_path: Path, monkeypatch, value: float, at: int):
    spoil(monkeypatch, at, value)
    with pytest.raises(Problem, match="the training diverged"):
        finish(settings(place, tmp_path / "run"))


def test_without_a_checkpoint_nothing_is_left(place: Path, tmp_path: Path, monkeypatch):
    spoil(monkeypatch, 3, float("nan"))
    with pytest.raises(Problem, match=r"the training diverged, .*there is no checkpoint yet: lower --lr"):
        finish(settings(place, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
