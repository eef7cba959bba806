"""Put a clustering on a parameter of a model, and take it off again."""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..foundation.errors import MethodError
from .clustered import Chain, Clustered
from .parameters import Owned
from .recurrent import share_reads, unshare_reads


def attach(owned: Owned, clustered: Clustered) -> None:
    """Every module that holds the parameter computes with its clustering from now on."""
    for number, (module, attribute) in enumerate(owned.owners):
        clustered.train(module.training)
        # unsafe: the checks that it skips would run the clustering, and ours keeps shape and dtype
        own = clustered if number == 0 else clustered.twin()
        parametrize.register_parametrization(module, attribute, own, unsafe=True)
        module.parametrizations[attribute].__class__ = Chain  # type: ignore[index]
        share_reads(module)
        if clustered.layers:
            module.register_forward_hook(_compute, prepend=True, with_kwargs=True)  # hooks of others see what it gives


def detach(owned: Owned, value: Tensor) -> None:
    """Take the clustering, where there is one, off the parameter, which gets this value."""
    for module, attribute in owned.owners if owned.clustered is not None else ():
        # A deep copy shares its class with the original, and the attribute lives on that class:
        # without a class of its own, this would take the attribute away from the original too.
        cls = type(module)
        module.__class__ = type(cls.__name__, cls.__bases__, dict(cls.__dict__))
        parametrize.remove_parametrizations(module, attribute, leave_parametrized=False)
        unshare_reads(module)
        for key in [key for key, hook in module._forward_hooks.items() if hook is _compute]:
            del module._forward_hooks[key], module._forward_hooks_with_kwargs[key]
    owned.tensor.copy_(value)


def check_layers(kind: type[Clustered], owned: Owned) -> None:
    """MethodError where a method that computes layers itself does not know the one that holds the parameter."""
    if not kind.layers:
        return
    known = ", ".join(layer.__name__ for layer in kind.layers)
    if len(owned.owners) > 1:
        raise MethodError(
            f'method="{kind.method}" changes what a layer computes, and {" and ".join(owned.names)} are one tensor of '
            'several layers: name it with "keep"'
        )
    module = owned.owners[0][0]
    own = type(module).__bases__[0] if parametrize.is_parametrized(module) else type(module)
    if own not in kind.layers:  # nor a subclass of one: it may compute something else, or be read without being called
        raise MethodError(
            f'method="{kind.method}" changes what a layer computes, and knows {known}, but {owned.name} belongs to '
            f'the class {own.__name__}: name it with "keep"'
        )


def _compute(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Tensor:
    """A forward hook: what the method makes of the layer's output."""
    chain = module.parametrizations.weight  # type: ignore[union-attr]
    clustered: Any = chain[0]  # type: ignore[index]
    if not (clustered.training and chain.original.requires_grad) or clustered.dense:  # type: ignore[union-attr]
        return y
    return clustered.compute(module, args[0] if args else kwargs["input"], y)
