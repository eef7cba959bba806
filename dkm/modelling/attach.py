"""Put a clustering on a parameter of a model, and take it off again."""

from torch import Tensor
from torch.nn.utils import parametrize

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


def detach(owned: Owned, value: Tensor) -> None:
    """Take the clustering, where there is one, off the parameter, which gets this value."""
    for module, attribute in owned.owners if owned.clustered is not None else ():
        # A deep copy shares its class with the original, and the attribute lives on that class:
        # without a class of its own, this would take the attribute away from the original too.
        cls = type(module)
        module.__class__ = type(cls.__name__, cls.__bases__, dict(cls.__dict__))
        parametrize.remove_parametrizations(module, attribute, leave_parametrized=False)
        unshare_reads(module)
    owned.tensor.copy_(value)
