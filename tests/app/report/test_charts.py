"""Curves are where their numbers are."""

import re

import pytest

from dkm.app.report.charts import MAX_POINTS, Figure, Line, chart, thinned


def drawn(figure: Figure | None, look: str) -> list[tuple[float, float]]:
    """The points of a curve."""
    path = re.search(rf'class="line {look}" d="M([^"]*)"', figure.svg)[1]
    return [tuple(map(float, point.split())) for point in path.split("L")]


@pytest.mark.parametrize("log", [False, True])
def test_a_curve_is_where_its_numbers_are(log: bool):
    points = [(0.0, 1.0), (5.0, 100.0), (10.0, 10.0)]
    (x0, y0), (x1, y1), (x2, y2) = drawn(chart("t", [Line("l", "a", points)], "epoch", log=log), "a")
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert (y2 - y0) / (y1 - y0) == pytest.approx(0.5 if log else 1 / 11, abs=0.01)
    assert y1 < y2 < y0  # up is more


def test_a_chart_of_nothing_is_nothing():
    assert chart("t", [Line("l", "a", [])], "epoch") is None
    assert chart("t", [Line("l", "a", [(0.0, 0.0)])], "epoch", log=True) is None


def test_a_curve_of_many_points_keeps_its_ends_and_its_mean():
    points = [(float(i), float(i % 2)) for i in range(100_001)]
    thin = thinned(points)
    assert len(thin) == MAX_POINTS
    assert (thin[0], thin[-1]) == (points[0], points[-1])
    assert all(y == pytest.approx(0.5, abs=0.01) for _, y in thin[1:-1])
