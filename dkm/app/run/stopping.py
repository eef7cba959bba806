"""Ctrl-C and SIGTERM: how a run is asked to stop, and how several processes stop at the same step."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..processes import has_several_processes, is_from_a_lost_process

ASK_EVERY = 2  # seconds between two votes of several processes; a launcher kills those that take 30 to stop


class Stopped(Exception):
    """The run was asked to stop.  What there is of it is in its folder, to be resumed."""


class StopRequests:
    """Whether the run was asked to stop: a function that tells it."""

    def __init__(self, is_launcher_gone: Callable[[], bool] = lambda: False):
        self.is_launcher_gone = is_launcher_gone
        self.signalled, self.immediate = False, False

    def __call__(self) -> bool:
        return self.signalled or self.is_launcher_gone()

    def signal(self) -> None:
        """There was a request."""
        self.signalled = True
        if self.immediate:
            raise Stopped

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Within this, a request raises Stopped wherever the process is: for work that takes long and may be cut off
        anywhere."""
        self.immediate = True
        try:
            if self():
                raise Stopped
            yield
        finally:
            self.immediate = False


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Make SIGINT and SIGTERM a request, and give the function that tells whether there was one.

    The run then stops at the next opportunity, with a checkpoint; a second signal ends the process at once.  Where a
    launcher has started several processes, it may send both signals and kills processes that take too long, so a second
    one is only a request as well; and when the launcher itself has ended, that counts as a request, because nobody else
    would end these processes.
    """
    handlers_before: dict[int, Any] = {}
    launcher = os.getppid()
    requests = StopRequests(lambda: has_several_processes() and os.getppid() != launcher)

    def request(number: int, frame: Any) -> None:
        if not has_several_processes():
            restore()
        requests.signal()

    def restore() -> None:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)

    # In another thread than the main one signals cannot be handled: whoever has the main thread stops the run.
    with contextlib.suppress(ValueError):
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers_before[number] = signal.signal(number, request)
    try:
        yield requests
    except RuntimeError as error:
        # When one process ends with a problem, the launcher ends the others, and one of them may lose the connection
        # before it has stopped.  What was wrong is said already.
        if requests() and is_from_a_lost_process(error):
            raise SystemExit(2) from None
        raise
    finally:
        restore()


class StopVote:
    """Whether to stop, decided by all processes at the same step: one that went a step further than the others would
    wait for them for ever.  A vote takes time, so there is one in about ASK_EVERY seconds."""

    def __init__(self, accelerator: Any, is_requested: Callable[[], bool]):
        self.accelerator, self.is_requested = accelerator, is_requested
        self.next_step = 0  # of the next vote
        self.interval = 1  # steps from the vote before to that one
        self.voted_at = time.perf_counter()

    def should_stop(self, done: int) -> bool:
        """Whether to stop after `done` steps.  Every process must call this after every step."""
        processes = self.accelerator.num_processes
        if processes == 1:
            return self.is_requested()
        if done < self.next_step:
            return False
        now = time.perf_counter()
        # Microseconds as whole numbers: floats could be added in another order elsewhere and give another sum.
        mine = [int(self.is_requested()), round(1e6 * (now - self.voted_at))]
        requests, elapsed = self.accelerator.reduce(torch.tensor(mine, device=self.accelerator.device)).tolist()
        self.voted_at = now
        wanted = self.interval * ASK_EVERY * 1_000_000 * processes // max(1, elapsed)
        self.interval = min(max(1, wanted), 2 * self.interval)  # a few fast steps do not mean that all are fast
        self.next_step = done + self.interval
        return bool(requests)
