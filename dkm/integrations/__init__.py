"""dkm in other people's training loops: a thin callback a library, which it imports; and what they share.

Both callbacks do the same four things: compress the model before a checkpoint is restored into it, tell
tau="auto" how long the training is, log a few figures, and write the .dkm file at the end.
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


class Compression:
    """One model's way through a trainer, whichever it is.

    Args:
        plan: as for `compress_`; None: you compress the model yourself, before the trainer has it.
        output: the .dkm file, relative to the trainer's own folder; None: write none.
        dtype: of the parameters that are not clustered, in the file.
        recalibrate: how many batches of the training data to re-estimate batch norm's statistics on at the end.
        options: as for `compress_`.  Without `steps` the length of the training is the trainer's.
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
        """Whether it was us; a trainer may have wrapped the model since."""
        return bool(self.clusterings) and clusterings(model) == self.clusterings

    def compress(self, model: nn.Module) -> None:
        """Compress the model, once; how long it will train may be said later, in `begin`."""
        if self.plan is not None and not self.has_compressed(model):
            compress_(model, self.plan, **{"steps": 1, **self.options})
            self.clusterings = clusterings(model)

    def begin(self, model: nn.Module, steps: int | float) -> None:
        """Training starts, for this many optimizer steps."""
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

    def figures(self, step: int) -> dict[str, float]:
        """All tensors in a few numbers, for the trainer's log: see `monitor`."""
        total = self.monitor.record(step)["total"]
        return {f"dkm/{key}": float(total[key]) for key in ("gap", "changed", "dead") if total[key] is not None}

    def finish(self, model: nn.Module, batches: Iterable[Any] | None, folder: str | Path, *, write: bool) -> None:
        """Training is over; `write` in the first process."""
        if self.recalibrate:
            recalibrate_(model, islice(batches, self.recalibrate))
        # a model in shards is written by all processes together, any other one by the first of them
        if self.output is not None and (write or any(map(is_sharded, model.parameters()))):
            Path(folder).mkdir(parents=True, exist_ok=True)
            save(model, Path(folder, self.output), dtype=self.dtype)
