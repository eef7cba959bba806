"""Lightning: `Trainer(callbacks=[DKMCallback("cv:4/4, fc:8")])`."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from ..plans.rows import Plan
from . import Compression


class DKMCallback(Callback):
    """Compresses the LightningModule, logs how the clustering goes, and writes the .dkm file at the end of `fit`.

    The model is compressed in `setup`, before a checkpoint is restored into it: `fit(..., ckpt_path=...)`
    continues as if nothing had happened.  Its layers must exist by then: make them in `__init__`.

    Args: see `dkm.integrations.Compression`; `output` is relative to `trainer.default_root_dir`.
        module: the part to compress and to write, for example "model" for `self.model`; "" for all of it.
    """

    def __init__(
        self,
        plan: str | Plan | None,
        output: str | Path | None = "model.dkm",
        *,
        module: str = "",
        dtype: torch.dtype = torch.float16,
        recalibrate: int = 0,
        **options: Any,
    ):
        self.compression = Compression(plan, output, dtype, recalibrate, options)
        self.module = module

    def _part(self, pl_module: LightningModule) -> nn.Module:
        return pl_module.get_submodule(self.module)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a plain model can be validated before
            self.compression.compress(self._part(pl_module))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.compression.begin(self._part(pl_module), trainer.estimated_stepping_batches, trainer.train_dataloader)
        self.logged = trainer.global_step

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.compression.before_step(self._part(pl_module))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        # one record per optimizer step, not one per batch
        if step != self.logged and every and step % every == 0:
            pl_module.log_dict(self.compression.figures(step))
            self.logged = step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.compression.finish(
            self._part(pl_module), trainer.train_dataloader, trainer.default_root_dir, write=trainer.is_global_zero
        )
