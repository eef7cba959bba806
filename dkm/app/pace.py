"""How long a training will still take."""

import time
from collections.abc import Callable


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


def speed_text(per_second: float) -> str:
    """Examples per second: 1234, 12 or 0.25."""
    return f"{per_second:.0f}" if per_second >= 9.95 else f"{per_second:.2g}"
