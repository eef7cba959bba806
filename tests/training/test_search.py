"""Golden-section search: it finds the maximum with the given number of evaluations, and resumes from its log."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkm import search_tau
from dkm.training.search import GOLDEN, Search

bounds = st.tuples(st.floats(-8, -4), st.floats(0.5, 6)).map(lambda pair: (10 ** pair[0], 10 ** sum(pair)))


def unimodal(low: float, high: float, at: float, left: float, right: float):
    """A function of tau with one maximum, at the fraction `at` of the way from low to high on the logarithmic scale; it
    rises with the slope `left` and falls with the slope `right`."""
    peak = math.log(low) + at * math.log(high / low)

    def evaluate(tau: float) -> float:
        distance = math.log(tau) - peak
        return -right * distance if distance > 0 else left * distance

    return math.exp(peak), evaluate


@given(bounds, st.floats(0, 1), st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 15))
def test_finds_the_maximum_as_exactly_as_the_evaluations_allow(ends, at, left, right, evaluations):
    low, high = ends
    peak, evaluate = unimodal(low, high, at, left, right)
    found = search_tau(evaluate, low=low, high=high, evaluations=evaluations)
    allowed = math.log(high / low) * GOLDEN ** max(1, evaluations - 1)
    assert abs(math.log(found.tau / peak)) <= allowed + 1e-5
    assert found.score == evaluate(found.tau) == max(trial.score for trial in found.trials)
    assert len(found.trials) == evaluations
    assert all(low <= trial.tau <= high for trial in found.trials)


@given(bounds, st.floats(0, 1), st.integers(1, 10), st.integers(0, 10))
def test_more_evaluations_continue_the_sequence(ends, at, few, more):
    low, high = ends
    _, evaluate = unimodal(low, high, at, 1.0, 2.0)
    short, long = (search_tau(evaluate, low=low, high=high, evaluations=n).trials for n in (few, few + more))
    assert long[:few] == short


@given(at=st.floats(0, 1), failures=st.sets(st.integers(0, 7)), stop=st.integers(0, 7))
def test_resumed_equals_uninterrupted(tmp_path_factory, at, failures, stop):
    """Stopped in the middle of an evaluation, at any point, with any of them failing."""
    _, score = unimodal(1e-6, 1e-2, at, 1.0, 1.0)
    log = tmp_path_factory.mktemp("search") / "tau.jsonl"

    def search(stop: int | None, **options) -> tuple[Search | str, list[float]]:
        asked: list[float] = []

        def evaluate(tau: float) -> float:
            if len(asked) == stop:
                raise KeyboardInterrupt
            asked.append(tau)
            # which fail depends on tau, not on when it is asked for
            return math.nan if hash(tau) % 8 in failures else score(tau)

        try:
            return search_tau(evaluate, **options), asked
        except (KeyboardInterrupt, ValueError) as stopped:
            return str(stopped), asked

    wanted, all_of_them = search(None)
    _, first = search(stop, log=log)
    got, rest = search(None, log=log)
    assert got == wanted
    assert first + rest == all_of_them


def test_of_equals_the_colder_side_is_searched():
    taus = [trial.tau for trial in search_tau(lambda tau: 1.0).trials]
    assert min(taus) == taus[-1] < 1.5e-6


class TestFailures:
    def test_nan_counts_as_worst(self):
        found = search_tau(lambda tau: math.nan if tau > 1e-4 else tau)
        assert 9e-5 < found.tau <= 1e-4
        assert {trial.score for trial in found.trials if trial.tau > 1e-4} == {-math.inf}

    def test_nan_is_logged_and_not_repeated(self, tmp_path: Path):
        def once(tau: float) -> float:
            return math.nan if tau > 1e-4 else 1.0

        search_tau(once, log=tmp_path / "log")
        assert "null" in (tmp_path / "log").read_text()
        search_tau(lambda tau: pytest.fail("asked again"), log=tmp_path / "log")

    def test_all_nan(self):
        with pytest.raises(ValueError, match=r"all 8 evaluations between 1e-06 and 0\.01 failed"):
            search_tau(lambda tau: math.nan)

    def test_an_exception_propagates_and_is_no_score(self, tmp_path: Path):
        def out_of_memory(tau: float) -> float:
            raise MemoryError("too large")

        with pytest.raises(MemoryError, match="too large"):
            search_tau(out_of_memory, log=tmp_path / "log")
        assert len(search_tau(lambda tau: tau, log=tmp_path / "log").trials) == 8

    @pytest.mark.parametrize("score", [None, "high", [1.0, 2.0]])
    def test_a_score_is_a_number(self, score):
        with pytest.raises(TypeError, match=r"evaluate\(3.37182e-05\) must return a number"):
            search_tau(lambda tau: score)

    def test_another_log(self, tmp_path: Path):
        (tmp_path / "log").write_text(json.dumps({"step": 1}) + "\n")
        with pytest.raises(ValueError, match="not a log of search_tau"):
            search_tau(lambda tau: tau, log=tmp_path / "log")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(low=0), "low must be a positive"),
        (dict(high=math.inf), "high must be a positive"),
        (dict(low="a"), "low must be a positive"),
        (dict(low=1e-2, high=1e-3), "low must be less than high"),
        (dict(evaluations=0), "evaluations must be an integer"),
        (dict(evaluations=2.0), "evaluations must be an integer"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        search_tau(lambda tau: tau, **options)


def test_evaluate_is_a_function():
    with pytest.raises(TypeError, match="evaluate must be a function"):
        search_tau(1e-4)
