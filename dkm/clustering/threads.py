"""Pieces of one long computation in several threads, for what PyTorch does not spread itself.

`at_once.py` is for whole weights, `spread` for the pieces of one, which takes some microseconds instead of a pool's
start.  What runs there must let other threads run: compiled code, and PyTorch's and numpy's operations do.
"""

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def spread(work: Callable[[int], T], pieces: Iterable[int]) -> list[T]:
    """`[work(piece) for piece in pieces]`, by as many threads as PyTorch uses."""
    pieces, threads = list(pieces), torch.get_num_threads()
    if len(pieces) < 2 or threads == 1:
        return [work(piece) for piece in pieces]
    return list(_pool(os.getpid(), threads).map(work, pieces))


@functools.lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The threads of this process: a fork inherits none."""
    return ThreadPoolExecutor(threads, thread_name_prefix="dkm")
