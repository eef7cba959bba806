"""Recurrent layers read each weight several times per forward pass and keep the results in a list.

Within a forward pass the reads share one clustering.  Outside of it the list is empty, because a module that holds on
to a graph cannot be deep-copied.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize


def share_reads(module: nn.Module) -> None:
    """Have a recurrent layer cluster each weight once per forward pass.  Other modules are left alone."""
    if isinstance(module, nn.RNNBase) and _enter not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave, always_call=True)
        type(module)._apply = _apply_and_forget  # type: ignore[method-assign]  # the class is parametrize's, made for this module
        _forget(module)


def unshare_reads(module: nn.Module) -> None:
    """Undo `share_reads`."""
    if isinstance(module, nn.RNNBase):
        for hooks, ours in ((module._forward_pre_hooks, _enter), (module._forward_hooks, _leave)):
            for key in [key for key, hook in hooks.items() if hook is ours]:
                del hooks[key]
        module._init_flat_weights()


def _enter(module: nn.RNNBase, args: Any) -> None:
    module._dkm_reads = parametrize.cached()
    module._dkm_reads.__enter__()
    module._init_flat_weights()


def _leave(module: nn.RNNBase, args: Any, output: Any) -> None:
    module.__dict__.pop("_dkm_reads").__exit__(None, None, None)
    _forget(module)


def _forget(module: nn.RNNBase) -> None:
    module._flat_weights = [None] * len(module._flat_weights_names)


def _apply_and_forget(module: nn.RNNBase, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.RNNBase:
    nn.RNNBase._apply(module, fn, recurse)
    _forget(module)
    return module
