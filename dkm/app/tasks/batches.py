"""Batches of examples, read in this process or in workers: both give the same."""

import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ..errors import Problem
from ..own_code import problem_in_own_code
from ..settings import Settings
from .task import Task

Key = tuple[int, int]  # a random seed, and the number of an example


def batches(task: Task, dataset: Dataset, keys: Iterable[list[Key]], settings: Settings) -> Iterator[Any]:
    """A batch for each list of keys.  What an example draws at random depends on the seed in its key alone."""
    loader = DataLoader(
        _SeededExamples(dataset),
        batch_sampler=keys,
        num_workers=settings.workers,
        collate_fn=_Collate(task.collate),
        worker_init_fn=_leave_signals_to_the_parent,
        pin_memory=torch.cuda.is_available() and settings.device != "cpu",
    )
    for batch in loader:
        if isinstance(batch, Problem):
            raise batch
        yield batch


class _SeededExamples(Dataset):
    """Examples by key: what an example draws depends neither on the process that reads it nor on what was read before.

    A Problem is returned instead of raised, because an exception in a worker would arrive as a traceback.
    """

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __getitem__(self, key: Key) -> Any:
        seed, index = key
        torch_state, python_state = torch.get_rng_state(), random.getstate()
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        try:
            return self.dataset[index]
        except Problem as problem:
            return problem
        except Exception as error:
            problem_of_theirs = problem_in_own_code(error)
            if problem_of_theirs is None:
                raise
            return problem_of_theirs
        finally:
            torch.set_rng_state(torch_state)
            random.setstate(python_state)


class _Collate:
    """The batch of some examples, or the first Problem among them."""

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self.collate = collate

    def __call__(self, items: list[Any]) -> Any:
        problem = next((item for item in items if isinstance(item, Problem)), None)
        return self.collate(items) if problem is None else problem


def _leave_signals_to_the_parent(worker: int) -> None:
    """Keep a worker alive when Ctrl-C or a scheduler signals all processes of a run: the one that trains finishes its
    step and then ends its workers."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
