"""How long something will still take."""

import time
from collections.abc import Callable, Mapping


class Pace:
    """Told of every logged step and every evaluation, it knows the time that is left.

    Args:
        done: steps that were done before, by a run that is resumed.
        steps: of the whole training.
        between: steps from one evaluation to the next.
        now: the clock, in seconds.
    """

    def __init__(self, done: int, steps: int, between: int, now: Callable[[], float] = time.perf_counter):
        self.done, self.steps, self.between, self.now = done, steps, max(1, between), now
        self.since = now()  # when step `done` was over; time that went into evaluations does not count
        self.is_warm = False  # the first step takes far longer than the others
        self.evaluation_began = 0.0
        self.evaluation = 0.0  # seconds of the last one
        self.per_step = 0.0  # seconds

    def stepped(self, step: int) -> None:
        """So many steps are done."""
        now = self.now()
        if step > self.done:
            self.per_step = (now - self.since) / (step - self.done)
        if not self.is_warm:
            self.is_warm, self.done, self.since = True, step, now

    def evaluation_begins(self) -> None:
        """The time until `evaluated` is that of an evaluation."""
        self.evaluation_began = self.now()

    def evaluated(self, is_trained: bool) -> None:
        """The evaluation is over.  Before the training, it measures only one of the two kinds of weights."""
        took = self.now() - self.evaluation_began
        self.since += took
        self.evaluation = took if is_trained else 2 * took

    def left(self, step: int) -> float:
        """Seconds until the end, evaluations included, after so many steps."""
        evaluations = -(-self.steps // self.between) - step // self.between + 0.5  # the file is measured once more
        return self.per_step * (self.steps - step) + self.evaluation * evaluations


class WorkPace:
    """Told of every piece of work, it knows the time that is left, where work of several kinds takes different times.

    Args:
        guess: how many times longer a piece of one kind takes than one of another, until one of its own kind is done.
        now: the clock, in seconds.
    """

    def __init__(self, guess: Mapping[str, tuple[str, float]], now: Callable[[], float] = time.perf_counter):
        self.guess, self.now = guess, now
        self.began = self.since = now()
        self.seconds: dict[str, tuple[float, int]] = {}  # of each kind: in all, and for how many pieces

    def worked(self, kind: str) -> None:
        """The time since the last call went into a piece of this kind; none where the kind is empty."""
        now = self.now()
        if kind:
            seconds, count = self.seconds.get(kind, (0.0, 0))
            self.seconds[kind] = seconds + now - self.since, count + 1
        self.since = now

    def left(self, done: Mapping[str, int], total: Mapping[str, int]) -> float:
        """Seconds until all is done."""
        return sum(self._each(kind) * (count - done.get(kind, 0)) for kind, count in total.items())

    def share(self, left: float) -> float:
        """The share of the time that is over, from 0 to 1, where so many seconds are left."""
        elapsed = self.since - self.began
        return elapsed / (elapsed + left) if elapsed + left > 0 else 1.0

    def _each(self, kind: str) -> float:
        seconds, count = self.seconds.get(kind, (0.0, 0))
        if count:
            return seconds / count
        like, times = self.guess.get(kind, (kind, 0.0))
        return times * self._each(like) if like != kind else 0.0


def speed_text(per_second: float) -> str:
    """Examples per second: 1234, 12 or 0.25."""
    return f"{per_second:.0f}" if per_second >= 9.95 else f"{per_second:.2g}"
