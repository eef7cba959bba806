"""What some methods need besides the weight, as the lines of a training script.

Models of other methods are left alone, so that a script may have these lines for all of them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..modelling.clustered import Clustered
from ..modelling.parameters import clustered_parameters, clusterings
from .batchnorm import feed


def method_loss(model: nn.Module) -> Tensor:
    """What the method adds to the loss, `()`: `loss = loss + dkm.method_loss(model)`; 0 for most methods.

    It is a sum over the trained weights, computed on their device.
    """
    terms = []
    for owned, clustered in clustered_parameters(model):
        if "loss" in clustered.needs and owned.tensor.requires_grad:
            clustered.give("loss")
            terms.append(clustered.loss_term(owned.tensor))
    if terms:
        return torch.stack([term.to(terms[0].device) for term in terms]).sum()
    return torch.zeros((), device=next((parameter.device for parameter in model.parameters()), None))


def needs(model: nn.Module, need: str) -> bool:
    """Whether the method of a compressed model needs this and has not got it yet; a `loss` it needs in every step."""
    return any(need in c.needs and (need == "loss" or need not in c.given) for c in clusterings(model))


@torch.no_grad()
def calibrate_(
    model: nn.Module, batches: Iterable[Any], *, forward: Callable[[nn.Module, Any], Any] | None = None
) -> nn.Module:
    """Show the method a few batches of training data, after `compress_` and before the training.  Returns the model.

    A batch is what `recalibrate_` takes; labels are ignored.  The model runs in evaluation mode with its weights as
    they are, not clustered; its modes are as before afterwards.  A method that needs no batches is not shown any.
    Where there are several processes, show all of them the same batches.
    """
    targets = [(owned, clustered) for owned, clustered in clustered_parameters(model) if "batches" in clustered.needs]
    if not targets:
        return model
    device = next(model.parameters()).device
    modes = {module: module.training for module in model.modules()}
    hooks = []
    seen = 0
    try:
        model.eval()
        for owned, clustered in targets:
            clustered.dense = True
            for module, _ in owned.owners:
                hooks.append(module.register_forward_pre_hook(_watcher(clustered, owned.name)))
        for batch in batches:
            _ = feed(model, batch, device) if forward is None else forward(model, batch)
            seen += 1
    finally:
        for hook in hooks:
            hook.remove()
        for _owned, clustered in targets:
            clustered.dense = False
        for module, mode in modes.items():
            module.training = mode
    if not seen:
        raise ValueError("calibrate_ needs at least one batch, got none: an exhausted iterator?")
    for kind in dict.fromkeys(type(clustered) for _, clustered in targets):
        kind.calibrate_together([(c, owned.tensor, owned.name) for owned, c in targets if type(c) is kind])
    for _, clustered in targets:
        clustered.give("batches")
    return model


def _watcher(clustered: Clustered, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def watch(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        clustered.observe(module, name, inputs)

    return watch
