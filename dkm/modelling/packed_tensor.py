"""What the rooms above know of a tensor that stays packed; `runtime/packed.py` computes with it."""

from typing import Any, NamedTuple

import torch
from torch import nn

from ..foundation.errors import DKMError

PREFIX = "packed_"  # the module that holds a `weight` as codes is a child `packed_weight` of the layer


class PackedTensor(nn.Module):
    """Stands for a tensor of this shape and dtype, of which there are only codes and centroids."""

    shape: tuple[int, ...]
    source: torch.dtype

    def content(self) -> Any:
        """What a file has of it: `formats.described.Codes`."""
        raise NotImplementedError


class Held(NamedTuple):
    """A packed tensor of a model, and the names that it has in the plain model."""

    names: list[str]
    tensor: PackedTensor


def packed_tensors(model: nn.Module) -> list[Held]:
    """Every distinct packed tensor of a model, tied ones once."""
    found: dict[int, Held] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PackedTensor):
            owner, dot, child = path.rpartition(".")
            found.setdefault(id(module), Held([], module)).names.append(owner + dot + child.removeprefix(PREFIX))
    return list(found.values())


def refuse_packed(model: nn.Module, call: str) -> None:
    """DKMError where the model is packed, and this call needs weights that can be trained or replaced."""
    if held := packed_tensors(model):
        raise DKMError(
            f"{call} needs dense weights, and {held[0].names[0]} of this model is packed: load the file without "
            "packed=True"
        )
