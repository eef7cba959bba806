"""Batch norm's running statistics for the network that ships: those of training belong to the soft weights."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def recalibrate_(
    model: nn.Module, batches: Iterable[Any], *, forward: Callable[[nn.Module, Any], Any] | None = None
) -> nn.Module:
    """Re-estimate the running mean and variance of the snapped network on `batches`, in one pass.

    A batch is what the model takes: a tensor; a tuple or list whose first item is the input (labels are
    ignored); or a dict of keyword arguments.  For anything else give `forward(model, batch)`.  Everything
    but the batch norms runs in evaluation mode; modes and momenta are as before afterwards, and so are the
    statistics if a batch fails.  A model without batch norm is left alone.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        return model
    device = next(norms[0].buffers()).device
    modes = {module: module.training for module in model.modules()}
    before = [(norm, norm.momentum, {k: v.clone() for k, v in norm.named_buffers(recurse=False)}) for norm in norms]
    seen = 0
    try:
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain average over all batches
            norm.train()
        for batch in batches:
            if forward is None:
                feed(model, batch, device)
            else:
                forward(model, batch)
            seen += 1
        if not seen:
            raise ValueError("recalibrate_ needs at least one batch, got none: an exhausted iterator?")
    except BaseException:
        for norm, _, buffers in before:
            for name, value in buffers.items():
                getattr(norm, name).copy_(value)
        raise
    finally:
        for norm, momentum, _ in before:
            norm.momentum = momentum
        for module, mode in modes.items():
            module.training = mode
    return model


def feed(model: nn.Module, batch: Any, device: torch.device) -> Any:
    """Run the model on a batch in one of the usual forms: a tensor, (input, labels), or a dict."""
    if isinstance(batch, (tuple, list)):
        batch = batch[0]
    if isinstance(batch, Tensor):
        return model(batch.to(device))
    if hasattr(batch, "items"):
        return model(**{key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()})
    raise TypeError(f"do not know how to feed a {type(batch).__name__} to the model: give forward=")
