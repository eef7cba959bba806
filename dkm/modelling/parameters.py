"""The one walk over a model: every distinct parameter, its names, and the modules that hold it."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

from .clustered import Clustered


@dataclass
class Owned:
    """A distinct parameter of a model: all its names, and the (module, attribute) pairs that hold it."""

    tensor: nn.Parameter
    names: list[str]
    owners: list[tuple[nn.Module, str]]

    @property
    def name(self) -> str:
        """The first of its names, which files and plans use."""
        return self.names[0]

    @property
    def aliases(self) -> tuple[str, ...]:
        """Its other names: the ties."""
        return tuple(self.names[1:])

    @property
    def clustered(self) -> Clustered | None:
        """Our parametrization of it, where there is one."""
        held = [_clustering_of(module, attribute) for module, attribute in self.owners]
        if len({None if each is None else id(vars(each)) for each in held}) > 1:  # twins share what they hold
            raise ValueError(
                f"{' and '.join(self.names)} are one tensor, clustered in one place only: "
                "cluster it with dkm.compress_, which keeps ties"
            )
        return held[0]

    @property
    def on_top(self) -> str | None:
        """The class of a parametrization that somebody has put on top of ours, where there is one."""
        for module, attribute in self.owners if self.clustered is not None else ():
            chain: Any = module.parametrizations[attribute]  # type: ignore[index]
            if len(chain) > 1:
                return type(chain[1]).__name__
        return None


def parameters(model: nn.Module) -> list[Owned]:
    """Every distinct parameter, tied ones once.  Names are those of the plain model, compressed or not."""
    found: dict[int, Owned] = {}
    for prefix, module in unwrapped(model).named_modules(remove_duplicate=False):
        if isinstance(module, Clustered) or _is_ours(module):
            continue
        for attribute, tensor in _own_parameters(module):
            entry = found.setdefault(id(tensor), Owned(tensor, [], []))
            entry.names.append(f"{prefix}.{attribute}" if prefix else attribute)
            if not any(owner is module and held == attribute for owner, held in entry.owners):
                entry.owners.append((module, attribute))
    return list(found.values())


def clustered_parameters(model: nn.Module) -> list[tuple[Owned, Clustered]]:
    """The clustered ones among a model's parameters, each with its clustering."""
    pairs = ((owned, owned.clustered) for owned in parameters(model))
    return [(owned, clustered) for owned, clustered in pairs if clustered is not None]


def clusterings(model: nn.Module) -> list[Clustered]:
    """The parametrizations that dkm has put on a model; one of each pair of twins."""
    found: dict[int, Clustered] = {}
    for module in model.modules():
        if isinstance(module, Clustered):
            found.setdefault(id(vars(module)), module)
    return list(found.values())


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what torch.compile, DistributedDataParallel or AveragedModel made of it."""
    while True:
        if "_orig_mod" in model._modules:  # torch.compile's
            inner = model._modules["_orig_mod"]
        elif isinstance(model, nn.parallel.DistributedDataParallel | AveragedModel):
            inner = model.module
        else:
            return model
        assert inner is not None
        model = inner


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that a module itself holds; a clustered one under its plain name."""
    own = [(attribute, tensor) for attribute, tensor in module._parameters.items() if tensor is not None]
    if parametrize.is_parametrized(module):
        chains = module.parametrizations.items()  # type: ignore[union-attr, operator]
        own += [(name, chain.original) for name, chain in chains if _is_ours(chain)]
    return own


def _clustering_of(module: nn.Module, attribute: str) -> Clustered | None:
    if not parametrize.is_parametrized(module, attribute):
        return None
    chain: Any = module.parametrizations[attribute]  # type: ignore[index]
    return chain[0] if _is_ours(chain) else None


def _is_ours(module: nn.Module) -> bool:
    """Whether it is the list of parametrizations that holds one of ours."""
    return isinstance(module, parametrize.ParametrizationList) and isinstance(module[0], Clustered)
