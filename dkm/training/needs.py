"""What some methods need besides the weight, as the lines of a training script.

Models of other methods are left alone, so that a script may have these lines for all of them.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..modelling.clustered import Clustered
from ..modelling.parameters import clustered_parameters, clusterings, unwrapped
from .batchnorm import feed
from .distill import probe


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
    Where there are several processes, show all of them the same batches.  A method that sees gradients, such as
    escq, needs the model's answers, which are logits: `forward` returns them.
    """
    targets = [(owned, clustered) for owned, clustered in clustered_parameters(model) if "batches" in clustered.needs]
    if not targets:
        return model
    device = next(model.parameters()).device
    modes = {module: module.training for module in model.modules()}
    trained = [(owned, owned.tensor.requires_grad) for owned, _ in targets]
    generator = torch.Generator().manual_seed(0)
    hooks = []
    seen = 0
    try:
        model.eval()
        for owned, clustered in targets:
            clustered.dense = True
            if not clustered.sees_gradients:
                for module, _ in owned.owners:
                    hooks.append(module.register_forward_pre_hook(_watcher(clustered, owned.name)))
        by_gradients = [(owned.tensor, clustered) for owned, clustered in targets if clustered.sees_gradients]
        for tensor, _ in by_gradients:
            tensor.requires_grad_(True)
        network = unwrapped(model)  # where there are gradients, a wrapper would wait for a backward pass
        for batch in batches:
            with torch.set_grad_enabled(bool(by_gradients)), _differentiable(network, bool(by_gradients)):
                output = feed(network, batch, device) if forward is None else forward(network, batch)
                if by_gradients:
                    _show_gradients(by_gradients, output, generator)
            seen += 1
    finally:
        for hook in hooks:
            hook.remove()
        for _owned, clustered in targets:
            clustered.dense = False
        for owned, was_trained in trained:
            owned.tensor.requires_grad_(was_trained)
        for module, mode in modes.items():
            module.training = mode
    if not seen:
        raise ValueError("calibrate_ needs at least one batch, got none: an exhausted iterator?")
    for kind in dict.fromkeys(type(clustered) for _, clustered in targets):
        kind.calibrate_together([(c, owned.tensor, owned.name) for owned, c in targets if type(c) is kind])
    for _, clustered in targets:
        clustered.give("batches")
    return model


DRAWS = 4  # of random numbers for each batch


def _show_gradients(shown: list[tuple[nn.Parameter, Clustered]], output: Any, generator: torch.Generator) -> None:
    """The derivatives of random numbers that the model's answers make, to the weights that want them."""
    tensors = [tensor for tensor, _ in shown]
    for left in reversed(range(DRAWS)):
        number = probe(output, generator)
        found = torch.autograd.grad(number, tensors, retain_graph=left > 0, allow_unused=True)
        for (_, clustered), gradient in zip(shown, found, strict=True):
            if gradient is not None:
                clustered.observe_gradient(gradient)


def _differentiable(model: nn.Module, needed: bool) -> AbstractContextManager[Any]:
    """cuDNN's recurrent layers have no gradient in evaluation mode; PyTorch's own have."""
    recurrent = needed and any(isinstance(module, nn.RNNBase) for module in model.modules())
    return torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()


def _watcher(clustered: Clustered, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def watch(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        clustered.observe(module, name, inputs)

    return watch
