"""Which examples each training step sees."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..tasks.batches import Key


def seed_from(*parts: int | str) -> int:
    """A random seed, less than 2^63, that is a function of these numbers and words."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Order:
    """The order of the examples for one process: a new permutation in every epoch.

    All processes together see every example at most once per epoch.  There are only full batches; the examples that
    are left over at the end of one epoch are likely to have their turn in another.
    """

    examples: int
    batch_size: int  # of each process
    processes: int
    rank: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """How many steps have full batches in every process."""
        return self.examples // (self.batch_size * self.processes)

    def keys(self, first: int, last: int) -> Iterator[list[Key]]:
        """The batches of the steps from `first` to before `last`.  A step's batch does not depend on `first`."""
        epoch, order = -1, []
        for step in range(first, last):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                generator = torch.Generator().manual_seed(seed_from(self.seed, "order", epoch))
                order = torch.randperm(self.examples, generator=generator).tolist()
            at = (step % self.steps_per_epoch * self.processes + self.rank) * self.batch_size
            yield [(seed_from(self.seed, "example", epoch, i), i) for i in order[at : at + self.batch_size]]
