"""Accuracy against size."""

import re

from hypothesis import given
from hypothesis import strategies as st

from dkm.app.report.scatter import Dot, scatter, unbeaten


def dot(size: float, value: float, label: str = "run", error: float | None = None) -> Dot:
    return Dot(label, "a", size, value, error, "")


def test_the_line_joins_what_no_other_run_beats():
    dots = [dot(10, 80), dot(20, 90), dot(30, 85), dot(20, 70), dot(40, 90)]
    assert [(d.size, d.value) for d in unbeaten(dots, False)] == [(10, 80), (20, 90)]
    assert [(d.size, d.value) for d in unbeaten(dots, True)] == [(10, 80), (20, 70)]


amounts = st.floats(1, 1e12)
dots = st.lists(
    st.builds(dot, amounts, st.floats(-100, 1e6), st.text("ab-1", max_size=30), st.none() | st.floats(0, 50)),
    max_size=9,
)


@given(dots, st.none() | st.floats(0, 100))
def test_everything_is_inside_the_picture(dots: list[Dot], level: float | None):
    figure = scatter("accuracy", dots, level=level, lower_is_better=False, note="")
    assert (figure is None) == (not dots)
    for part in figure.svg.split('<div class="if-')[1:] if figure else ():
        width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', part).groups())
        circles = re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', part)
        assert len(circles) == len(dots)
        assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in circles)
        assert "nan" not in part
