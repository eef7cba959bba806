"""Work for many weights of a model, several weights at a time."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
MOST = 16  # threads; each holds the working memory of one weight, up to about 100 MB


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """The results of the calls, in order; they run at the same time, each in one thread.

    PyTorch would use its threads within an operation.  The first clustering of a weight takes thousands of short
    operations, in which threads would mostly wait for each other, and on a busy machine for the processor.  With one
    thread per call, a result does not depend on the number of threads either.
    """
    threads = torch.get_num_threads()
    if len(calls) < 2 or threads == 1:
        return [call() for call in calls]
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(threads, MOST)) as pool:
            waiting = [pool.submit(call) for call in calls]
            try:
                return [each.result() for each in waiting]
            finally:
                pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C, nobody needs the others
    finally:
        torch.set_num_threads(threads)
