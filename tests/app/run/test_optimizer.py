"""The learning rate over the training."""

import pytest

from dkm.app.run.optimizer import learning_rate
from dkm.app.settings import Settings


@pytest.mark.parametrize(
    ("schedule", "at_half", "at_end"), [("cosine", 0.5, 0.0), ("linear", 0.5, 0.0), ("constant", 1.0, 1.0)]
)
def test_learning_rate(schedule: str, at_half: float, at_end: float):
    chosen = Settings(schedule=schedule)
    assert learning_rate(chosen, 1.0, 0, 100) == 1.0
    assert learning_rate(chosen, 1.0, 50, 100) == pytest.approx(at_half)
    assert learning_rate(chosen, 1.0, 100, 100) == pytest.approx(at_end)
    rising = [learning_rate(Settings(schedule=schedule, warmup=0.1), 1.0, step, 100) for step in range(11)]
    assert rising == sorted(rising)
    assert rising[0] == pytest.approx(1 / 11)
