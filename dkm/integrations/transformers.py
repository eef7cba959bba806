"""transformers: `Trainer(..., callbacks=[DKMCallback("xform:4/4, emb:8/4")])`, and folders with packed codes.

Importing this module lets `from_pretrained` read what `save_pretrained` here writes.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.quantizers import auto

from ..exporters import Report, export
from ..modelling.parameters import clustered_parameters, clusterings
from ..plans.rows import Plan
from . import Compression

if hasattr(auto, "register_quantizer"):  # transformers 4.49 has no methods but its own
    from . import quantizer  # noqa: F401  # registers itself


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], max_shard_size: str = "5GB") -> Report:
    """Write a compressed model of transformers as a folder, with its codes packed.

    `from_pretrained` of transformers reads it where this module is imported.  (The model's own `save_pretrained` writes
    a checkpoint, with weights in full precision, from which training goes on.)
    """
    return export(model, folder, to="transformers", max_shard_size=max_shard_size)


class DKMCallback(TrainerCallback):
    """Compresses the Trainer's model, logs how the clustering goes, and writes the .dkm file at the end.

    Pass it to `Trainer(callbacks=[...])`: the model is compressed right there, because the Trainer reads a
    checkpoint before it tells callbacks that training begins.  `trainer.train(resume_from_checkpoint=True)`
    continues as if nothing had happened.  With `load_best_model_at_end` the file holds the best model.

    Args: see `dkm.integrations.Compression`; `output` is relative to `args.output_dir`.
    """

    def __init__(
        self,
        plan: str | Plan | None,
        output: str | Path | None = "model.dkm",
        *,
        dtype: torch.dtype = torch.float16,
        recalibrate: int = 0,
        **options: Any,
    ):
        self.compression = Compression(plan, output, dtype, recalibrate, options)

    def on_init_end(  # type: ignore[override]
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        self.compression.compress(model)
        _declare_ties(model)

    def on_train_begin(  # type: ignore[override]
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        # Another model than at the beginning (`model_init` makes one for each training), or never called before
        # (`add_callback`): early enough, but for a checkpoint and for parameters that the optimizer has to know.
        if self.compression.plan is not None and not self.compression.has_compressed(model):
            self.compression.compress(model)
            if state.global_step or any(list(clustered.parameters()) for clustered in clusterings(model)):
                raise ValueError(
                    "the Trainer has read the checkpoint and made the optimizer for a model that was not compressed "
                    "yet: pass DKMCallback to Trainer(callbacks=[...]), or compress in model_init and use "
                    "DKMCallback(None)"
                )
        _declare_ties(model)
        self.compression.begin(model, state.max_steps, train_dataloader)

    def on_pre_optimizer_step(  # type: ignore[override]
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        self.compression.before_step(model)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "loss" in logs:  # of training: not the evaluation, not the final summary
            figures = self.compression.figures(state.global_step)
            logs.update(figures)
            state.log_history[-1].update(figures)

    def on_train_end(  # type: ignore[override]
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        folder = args.output_dir or "."
        self.compression.finish(model, train_dataloader, folder, write=state.is_world_process_zero)


def _declare_ties(model: nn.Module) -> None:
    """Tell `save_pretrained` which tensors are second names of another one.

    It refuses to save a tie that it does not know, and it knows ties by the names of the plain model only.
    """
    for owned, _ in clustered_parameters(model):
        for module, attribute in owned.owners[1:]:
            chain: Any = module.parametrizations[attribute]  # type: ignore[index]
            chain._tied_weights_keys = {"original": "", "0": ""}
