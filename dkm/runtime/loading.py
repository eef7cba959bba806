"""A file -> a model that computes with its codes."""

import os
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..formats import dkm_file
from ..formats.described import Codes, Described
from ..foundation.errors import FileError
from ..foundation.text import shown
from ..modelling.parameters import Owned, parameters, unwrapped
from .layers import hold, why_not
from .packed import PackedWeight


def load(
    path: str | os.PathLike[str], into: nn.Module | None = None, *, packed: bool = False
) -> nn.Module | dict[str, Tensor]:
    """Read a .dkm file: the dense state dict or, with `into`, that model with the weights in it.

    The model must have exactly the file's tensors, in its shapes, and no dkm on it; it stays untouched otherwise.
    Nothing is decoded before that is known.  FileError says what is wrong with a file or does not fit.

    With `packed=True`, clustered tensors stay codes and centroids in memory, and are decoded when a layer computes; the
    model is then for evaluation only.  A model on the meta device takes memory only for what the file holds.
    """
    if not packed:
        return dkm_file.load(path, into)
    if into is None:
        raise ValueError("dkm.load(path, packed=True) needs the model that is to compute with the codes: into=model")
    contents, model = dkm_file.read_for(path, into), unwrapped(into)
    walk = parameters(model)
    try:
        rest = pack_(model, contents.tensors(), contents.file)
    except (MemoryError, RuntimeError) as error:  # PyTorch raises a RuntimeError where memory runs out
        raise FileError(f"the tensors of {contents.file} do not fit into the memory ({error})") from error
    dkm_file.fill(model, rest, walk)
    into.eval()
    return into


@torch.no_grad()
def pack_(model: nn.Module, tensors: Iterable[Described], source: str = "the file") -> dict[str, Tensor]:
    """Have the model compute with the codes of these tensors, in place.

    Returns what the caller has to put into the model, such as with `load_state_dict`: the tensors that are not
    clustered, and those that no layer can keep packed, decoded.  A warning names the latter.  The parameters may be on
    the meta device; codes go where they are, or stay where they were given.  All tensors are read before the model
    changes, so after an error it is as before.
    """
    walk = parameters(model)
    owned_by = {name: owned for owned in walk for name in owned.names}
    values: dict[str, PackedWeight | Tensor] = {}
    for each in tensors:
        values |= _values(each, owned_by)
    rest: dict[str, Tensor] = {}
    places: list[tuple[Owned, PackedWeight]] = []
    for owned in walk:
        given = {name: values[name] for name in owned.names if name in values}
        first = next(iter(given.values()), None)
        for alias, value in given.items():
            if value is not first and not torch.equal(_dense(value), _dense(first)):
                raise FileError(
                    f"{source} does not fit this model: the model ties {alias} to {owned.name} and the file has "
                    "different values for them"
                )
        if isinstance(first, PackedWeight):
            places.append((owned, first))
        elif first is not None:
            rest |= dict.fromkeys(given, first)
    rest |= {name: _dense(value) for name, value in values.items() if name not in owned_by}
    for owned, weight in places:
        for module, attribute in owned.owners:
            hold(module, attribute, weight)
    return rest


def _values(each: Described, owned_by: dict[str, Owned]) -> dict[str, PackedWeight | Tensor]:
    """What the names of a tensor get.  Names that share the tensor share its codes."""
    values: dict[str, PackedWeight | Tensor] = {}
    made: dict[tuple[bool, torch.dtype, torch.device], PackedWeight | Tensor] = {}
    for name in (each.name, *each.aliases):
        owned = owned_by.get(name)
        like = None if owned is None or owned.tensor.is_meta else owned.tensor
        dtype, device = (each.dtype, each.device) if like is None else (like.dtype, like.device)
        reason = _why_not(owned) if isinstance(each.content, Codes) else None
        if reason is not None:
            message = f"{shown(name)} is clustered, and takes the memory of a dense weight: {reason}"
            warnings.warn(message, stacklevel=4)
        stays = isinstance(each.content, Codes) and reason is None
        if (stays, dtype, device) not in made:
            made[stays, dtype, device] = _packed(each, dtype).to(device) if stays else each.values().to(dtype)
        values[name] = made[stays, dtype, device]
    return values


def _packed(each: Described, dtype: torch.dtype) -> PackedWeight:
    assert isinstance(each.content, Codes)
    return PackedWeight(each.content, each.shape, each.dtype, dtype)


def _why_not(owned: Owned | None) -> str | None:
    if owned is None:
        return "it is no parameter of the model"
    return next(filter(None, (why_not(module) for module, _ in owned.owners)), None)


def _dense(value: PackedWeight | Tensor | None) -> Tensor:
    assert value is not None
    return value.dense() if isinstance(value, PackedWeight) else value
