"""The numbers beside an axis."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dkm.app.report.axes import linear_axis, log_axis, tick_text


def check_axis(ticks: list[float], first: float, last: float, low: float, high: float) -> None:
    slack = 1e-3 * (last - first)
    assert first <= low + slack
    assert last >= high - slack
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))
    assert (ticks[0], ticks[-1]) == (first, last)


@given(st.floats(-1e12, 1e12), st.floats(0, 1e12))
@example(1e9, 1e-7)
@example(1e-14, 1e-25)
@example(0.0, 5e-324)
def test_the_axis_holds_its_numbers(low: float, width: float):
    check_axis(*linear_axis(low, low + width), low, low + width)


@given(st.floats(1e-30, 1e12), st.floats(1, 1e12))
def test_the_logarithmic_axis_holds_its_numbers(low: float, factor: float):
    ticks, first, last = log_axis(low, low * factor)
    check_axis([*map(math.log, ticks)], math.log(first), math.log(last), math.log(low), math.log(low * factor))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (1e-4, "1e-4"),
        (1e-5, "1e-5"),
        (-0.00015, "-1.5e-4"),
        (125_000, "1.25e5"),
        (100, "100"),
    ],
)
def test_ticks_are_short(value: float, text: str):
    assert tick_text(value) == text
