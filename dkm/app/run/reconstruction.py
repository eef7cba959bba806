"""Training block by block, before the whole model is trained."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...training.reconstruct import Reconstructed, Reconstructing
from ..errors import Problem, as_problems
from ..run_folder import BlockRecord, Blocks
from ..tasks.batches import batches
from .evaluation import forward_of
from .order import Order
from .stage import Stage

ON_A_CPU = 4e9  # bytes that the inputs and outputs of a block may take


class Reconstruction:
    """The blocks of a clustered model, to be trained one after the other on `examples` of the training, augmented.

    `summary` is what result.json says of it.
    """

    def __init__(
        self, stage: Stage, model: nn.Module, teacher: nn.Module | None, order: Order, *, examples: int | None = None
    ):
        assert teacher is not None  # the settings see to that
        settings, self.stage = stage.settings, stage
        if stage.accelerator.num_processes > 1:
            raise Problem("--reconstruct works in one process: leave it out, or do not use a launcher")
        wanted = settings.reconstruct_examples if examples is None else examples
        keys = order.keys(0, max(1, wanted // stage.batch_size))
        given = [stage.move(batch) for batch in batches(stage.task, stage.task.train, keys, settings)]
        with as_problems(), self._precision():
            self.work = Reconstructing(
                model,
                teacher,
                given,
                epochs=settings.reconstruct,
                lr=settings.reconstruct_lr,
                forward=forward_of(stage),
                memory=self._memory(),
            )

        work, examples = self.work, len(given) * stage.batch_size
        self.summary = Blocks(count=len(work.blocks), steps=work.steps, examples=examples, left=work.left)

    def train(self, number: int) -> BlockRecord:
        """Train the block of this number.  A request to stop ends it at once, and it is trained anew later."""
        with as_problems(), self.stage.stop_requested.at_once(), self._precision():
            return self._record(self.work.train(number))

    def free(self) -> None:
        """Free the memory of the examples: all blocks are trained."""
        self.work.batches, self.work.kept = [], []

    def _record(self, block: Reconstructed) -> BlockRecord:
        return BlockRecord(
            kind="block",
            step=0,
            name=block.name,
            modules=list(block.modules),
            tensors=list(block.tensors),
            steps=self.work.steps,
            before=block.before,
            after=block.after,
        )

    @contextlib.contextmanager
    def _precision(self) -> Iterator[Any]:
        """That of the training; but float16 would need a scaler for the gradients of each block."""
        is_scaled = self.stage.settings.autocast == "fp16"
        with contextlib.nullcontext() if is_scaled else self.stage.accelerator.autocast():
            yield

    def _memory(self) -> float:
        device = self.stage.accelerator.device
        return torch.cuda.mem_get_info(device)[0] / 2 if device.type == "cuda" else ON_A_CPU
