"""The paper's search for one global tau, as a function of a callable."""

import math
import os
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

from ..foundation import jsonl

GOLDEN = (math.sqrt(5) - 1) / 2


class Trial(NamedTuple):
    """One evaluation.  An evaluation that failed (NaN or infinite) has the score -inf."""

    tau: float
    score: float


class Search(NamedTuple):
    """What `search_tau` returns."""

    tau: float  # the best one
    score: float
    trials: tuple[Trial, ...]  # in the order of evaluation


def search_tau(
    evaluate: Callable[[float], float],
    *,
    low: float = 1e-6,
    high: float = 1e-2,
    evaluations: int = 8,
    log: str | os.PathLike | None = None,
) -> Search:
    """The tau between `low` and `high` with the highest score, by golden-section search on a logarithmic scale.

    `evaluate(tau)` compresses a fresh model with this tau, trains it as long as is affordable, and returns
    its score in evaluation mode, higher is better: the accuracy, or minus the loss.  If the score rises up to
    some tau and falls after it, the best trial is within a factor of `(high / low) ** 0.618**(evaluations - 1)`
    of that tau: 1.4 with the defaults.  The sequence is deterministic, and more evaluations continue it.

    A score of NaN or infinity (training diverged) counts as worst.  An exception of `evaluate` is not a score:
    it propagates.

    Args:
        log: a JSON-lines file with a line for every finished evaluation.  Called again with the same file, the
            search goes on where it was; finished evaluations are not repeated.  Use a file for one `evaluate`.
    """
    _check(evaluate, low, high, evaluations)
    finished = _finished(log)
    trials: list[Trial] = []

    def score(at: float) -> float:
        tau = float(f"{math.exp(at):.6g}")  # the same on every machine, and readable
        if tau not in finished:
            finished[tau] = _number(evaluate(tau), tau)
            if log is not None:
                jsonl.append(log, {"tau": tau, "score": None if finished[tau] == -math.inf else finished[tau]})
        trials.append(Trial(tau, finished[tau]))
        return finished[tau]

    # The maximum is between `left` and `right`.  `inner` lies between them and was evaluated.  Its distance from the
    # farther end is GOLDEN times the width, and the next point has that distance from the other end.
    left, right = math.log(low), math.log(high)
    inner = right - GOLDEN * (right - left)
    best = score(inner)
    for _ in range(evaluations - 1):
        width = GOLDEN * (right - left)
        other = left + width if inner - left < right - inner else right - width
        value = score(other)
        (a, at_a), (b, at_b) = sorted([(inner, best), (other, value)])
        # Of equal scores the colder tau stays: a score that rises and then falls has its maximum between the two.
        left, right, inner, best = (left, b, a, at_a) if at_a >= at_b else (a, right, b, at_b)
    tau, top = max(trials, key=lambda trial: trial.score)
    if top == -math.inf:
        raise ValueError(
            f"all {evaluations} evaluations between {low:g} and {high:g} failed (NaN or infinite scores): "
            "check the training itself, or search elsewhere"
        )
    return Search(tau, top, tuple(trials))


def _check(evaluate: Callable[[float], float], low: float, high: float, evaluations: int) -> None:
    for name, value in (("low", low), ("high", high)):
        if not isinstance(value, Real) or not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    if not low < high:
        raise ValueError(f"low must be less than high, got low={low!r} and high={high!r}")
    if not isinstance(evaluations, int) or evaluations is True or evaluations < 1:
        raise ValueError(f"evaluations must be an integer of at least 1, got {evaluations!r}")
    if not callable(evaluate):
        raise TypeError(f"evaluate must be a function tau -> score, got {evaluate!r}")


def _finished(log: str | os.PathLike | None) -> dict[float, float]:
    """The evaluations in the file, as a dict from tau to score."""
    finished = {}
    for record in () if log is None else jsonl.read(log):
        if "tau" not in record or "score" not in record:
            raise ValueError(f"{log} is not a log of search_tau: it has the line {record!r}; name another file")
        finished[record["tau"]] = -math.inf if record["score"] is None else record["score"]
    return finished


def _number(score: Any, tau: float) -> float:
    try:
        value = float(score)
    except (TypeError, ValueError):
        raise TypeError(f"evaluate({tau:g}) must return a number, higher is better, got {score!r}") from None
    return value if math.isfinite(value) else -math.inf
