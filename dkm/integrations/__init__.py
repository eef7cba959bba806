"""dkm in other libraries' training loops: one thin callback per library, in a file of its own.

`transformers.py` and `lightning.py` each import their library.  What they have in common is here: compress the model
before a checkpoint is restored into it, tell tau="auto" how long the training is, log a few figures, and write the
.dkm file at the end.
"""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compress import compress_
from ..formats.dkm_file import save
from ..modelling.clustered import Clustered
from ..modelling.dtensors import is_sharded
from ..modelling.parameters import clusterings
from ..plans.rows import Plan
from ..training.batchnorm import recalibrate_
from ..training.monitor import monitor
from ..training.needs import calibrate_, method_loss, needs

CALIBRATION = 8  # batches, for methods that need any


class Compression:
    """One model's way through a trainer, whichever it is.

    Args:
        plan: as for `compress_`; None if you compress the model yourself, before the trainer gets it.
        output: the .dkm file, relative to the trainer's own folder; None to write none.
        dtype: the dtype, in the file, of the parameters that are not clustered.
        recalibrate: how many batches of training data re-estimate batch norm's statistics at the end.
        options: as for `compress_`.  Without `steps`, the trainer says how long the training is.
    """

    def __init__(
        self,
        plan: str | Plan | None,
        output: str | Path | None,
        dtype: torch.dtype,
        recalibrate: int,
        options: dict[str, Any],
    ):
        self.plan, self.output, self.dtype, self.recalibrate, self.options = plan, output, dtype, recalibrate, options
        self.clusterings: list[Clustered] = []

    def has_compressed(self, model: nn.Module) -> bool:
        """Whether this object compressed the model; a trainer may have wrapped it since."""
        return bool(self.clusterings) and clusterings(model) == self.clusterings

    def compress(self, model: nn.Module) -> None:
        """Compress the model, once; how long it will train may be said later, in `begin`."""
        if self.plan is not None and not self.has_compressed(model):
            compress_(model, self.plan, **{"steps": 1, **self.options})
            self.clusterings = clusterings(model)

    def begin(self, model: nn.Module, steps: int | float, batches: Iterable[Any] | None) -> None:
        """Training starts, for this many optimizer steps, on these batches; of a checkpoint, it goes on."""
        if needs(model, "batches"):
            if batches is None:
                raise ValueError("the method needs training data, and the trainer has none")
            calibrate_(model, islice(batches, CALIBRATION))
        self.adds_to_the_loss = needs(model, "loss")
        self.monitor = monitor(model, every=1)
        for clustered in clusterings(model):
            clustered.train()  # a trainer may leave a model in evaluation mode, where weights are snapped for good
        annealed = [clustered for clustered in clusterings(model) if clustered.anneals]
        if self.plan is None or "steps" in self.options or not annealed:
            return
        if not 1 <= steps < float("inf"):
            raise ValueError(
                f"the trainer does not know how long it will train (it says {steps} steps): "
                "limit it, or tell DKMCallback(..., steps=<optimizer steps>)"
            )
        for clustered in annealed:
            clustered.set_steps(int(steps))

    def before_step(self, model: nn.Module) -> None:
        """The gradient is there, and the optimizer is about to make its step: add what the method adds to the loss.

        Here and not in the loss of a batch, so that it counts once for a step of several batches.
        """
        if self.adds_to_the_loss:
            with torch.enable_grad():
                method_loss(model).backward()

    def figures(self, step: int) -> dict[str, float]:
        """All tensors in a few numbers, for the trainer's log: see `monitor`."""
        record = self.monitor.record(step)
        assert record is not None  # every=1
        total = record["total"]
        return {f"dkm/{key}": float(total[key]) for key in ("gap", "changed", "dead") if total[key] is not None}

    def finish(self, model: nn.Module, batches: Iterable[Any] | None, folder: str | Path, *, write: bool) -> None:
        """Training is over; `write` is True in the first process."""
        if self.recalibrate:
            if batches is None:
                raise ValueError("recalibrate needs training data, and the trainer has none: leave it out")
            recalibrate_(model, islice(batches, self.recalibrate))
        # a model in shards is written by all processes together, any other one by the first of them
        if self.output is not None and (write or any(map(is_sharded, model.parameters()))):
            Path(folder).mkdir(parents=True, exist_ok=True)
            save(model, Path(folder, self.output), dtype=self.dtype)
