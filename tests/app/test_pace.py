"""The time that is left."""

import pytest

from dkm.app.pace import Pace, WorkPace, speed_text


def test_the_time_left_counts_neither_the_first_step_nor_evaluations_as_ordinary_steps():
    """A first step of 10 s, then 1 s each; evaluations of 4 s after every 10 of 40 steps."""
    clock = [0.0]
    pace = Pace(0, 40, 10, lambda: clock[0])
    pace.evaluation_begins()
    clock[0] += 2  # only the snapped weights, before the training
    pace.evaluated(is_trained=False)
    clock[0] += 10
    pace.stepped(1)
    clock[0] += 4
    pace.stepped(5)
    assert pace.left(5) == pytest.approx(35 * 1 + 4.5 * 4)  # four evaluations, and the file's
    clock[0] += 5
    pace.evaluation_begins()
    clock[0] += 4
    pace.evaluated(is_trained=True)
    pace.stepped(10)
    assert pace.left(10) == pytest.approx(30 * 1 + 3.5 * 4)
    clock[0] += 30
    pace.stepped(40)
    assert pace.left(40) == pytest.approx(0.5 * 4)


def test_a_resumed_run_begins_where_it_stopped():
    clock = [0.0]
    pace = Pace(20, 40, 40, lambda: clock[0])
    for step in (22, 24, 30):
        clock[0] += 3 * (step - 20 if step == 22 else 2 if step == 24 else 6)
        pace.stepped(step)
    assert pace.left(30) == pytest.approx(30)


@pytest.mark.parametrize(("speed", "text"), [(1234.4, "1234"), (12.3, "12"), (9.96, "10"), (0.254, "0.25"), (3, "3")])
def test_slow_speeds_are_not_zero(speed: float, text: str):
    assert speed_text(speed) == text


def test_the_time_left_of_work_of_several_kinds():
    """Losses of 2 s; gradients that are guessed to take 3 times as long, and take 8 s; one that was done before."""
    clock = [0.0]
    pace = WorkPace({"gradients": ("losses", 3.0)}, lambda: clock[0])
    done, total = {"losses": 1}, {"losses": 3, "gradients": 4}
    clock[0] += 2
    pace.worked("losses")
    assert pace.left(done, total) == pytest.approx(2 * 2 + 4 * 6)
    done = {"losses": 1, "gradients": 1}
    clock[0] += 8
    pace.worked("gradients")
    assert pace.left(done, total) == pytest.approx(2 * 2 + 3 * 8)
    assert pace.share(pace.left(done, total)) == pytest.approx(10 / 38)
    done = {"losses": 2, "gradients": 1}
    pace.worked("")
    assert pace.left(done, total) == pytest.approx(2 + 3 * 8)
    assert pace.left(total, total) == 0
    assert pace.share(0) == 1
