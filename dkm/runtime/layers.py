"""Layers whose weights stay packed.

A layer keeps its class, or rather gets a subclass of it, so `isinstance(layer, nn.Linear)` stays true.  In it, `weight`
is a property: whoever reads it gets the dense weight, decoded at that moment and held by nobody.  This is all that most
layers need.  Three of them can do with less than the whole weight, and have a forward pass of their own.
"""

import types
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..foundation.errors import DKMError
from ..modelling.packed_tensor import PREFIX
from ..modelling.recurrent import share_reads, unshare_reads
from . import tables
from .packed import PackedWeight

KERNEL_DEVICES = {"cuda"}  # where there is a product that needs no decoding
# They run their children one after another, and what holds the codes would be a child more.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def why_not(module: nn.Module) -> str | None:
    """Why the weights of this module cannot stay packed; None where they can."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is of a compiled TorchScript module"
    if isinstance(module, CONTAINERS):
        return f"it belongs to a {type(module).__name__} itself"
    return None


def hold(module: nn.Module, attribute: str, weight: PackedWeight) -> None:
    """The module computes with these codes from now on, instead of its parameter `attribute`."""
    base: type[nn.Module] = type(module)
    names: tuple[str, ...] = (attribute,)
    if isinstance(module, Packed):
        base, names = module._dkm_base, (*module._dkm_names, attribute)
    del module._parameters[attribute]
    module.add_module(PREFIX + attribute, weight)
    module.__class__ = _packed_class(base, names)  # type: ignore[arg-type]  # classes are hashable
    share_reads(module)


def release(module: nn.Module, attribute: str, weight: nn.Parameter) -> None:
    """The module computes with this parameter again, instead of codes: the inverse of `hold`."""
    assert isinstance(module, Packed)
    base, names = module._dkm_base, tuple(name for name in module._dkm_names if name != attribute)
    delattr(module, PREFIX + attribute)
    module.__class__ = _packed_class(base, names) if names else base  # type: ignore[assignment,arg-type]  # as in `hold`
    module.register_parameter(attribute, weight)
    if not names:
        unshare_reads(module)


class Packed(nn.Module):
    """What the layers of a packed model have in common."""

    _dkm_base: type[nn.Module]  # the class that the layer had
    _dkm_names: tuple[str, ...]  # its weights that are packed

    def train(self, mode: bool = True) -> "Packed":
        """Evaluation only."""
        if mode:
            raise DKMError(
                "a packed model is for evaluation, because codes cannot be trained: load the file without packed=True "
                "to train it"
            )
        return super().train(mode)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """The class is made when it is needed, so a copy or a pickle of a layer says of what."""
        return _empty, (self._dkm_base, self._dkm_names), self.__getstate__()  # type: ignore[attr-defined]  # object's


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self.packed_weight
        if input.device.type in KERNEL_DEVICES and not torch.compiler.is_compiling():
            kernel = _kernel()
            if kernel is not None and kernel.computes(input, weight):
                result = kernel.product(input, weight)
                return result if self.bias is None else result + self.bias
        if codes := tables.codes_at_once(input, weight):
            result = tables.product(input, weight, codes)
            return result if self.bias is None else result + self.bias
        blocks = weight.blocks()
        parts = [
            F.linear(input, weight.rows(start, stop), None if self.bias is None else self.bias[start:stop])
            for start, stop in blocks
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class _Embedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self.packed_weight
        if self.max_norm is not None:  # which changes rows of a dense weight
            return super().forward(input)
        return weight.take(input.reshape(-1)).view(*input.shape, self.embedding_dim)


class _EmbeddingBag(nn.EmbeddingBag):
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        weight: Any = self.packed_weight
        if self.max_norm is not None or self.padding_idx is not None:
            return super().forward(input, offsets, per_sample_weights)
        return F.embedding_bag(
            torch.arange(input.numel(), dtype=input.dtype, device=input.device).view_as(input),
            weight.take(input.reshape(-1)),
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )


FORWARDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _Linear,
    nn.Embedding: _Embedding,
    nn.EmbeddingBag: _EmbeddingBag,
}


@cache  # equal layers have one class, which a compiler recognises
def _packed_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The class of a layer that was a `base`, of which these weights are packed."""
    members: dict[str, Any] = {name: _weight(name) for name in names}
    members |= {"_dkm_base": base, "_dkm_names": names, "__module__": base.__module__}
    bases: tuple[type, ...] = (Packed, base)
    for kind, forward in FORWARDS.items():
        if issubclass(base, kind) and names == ("weight",):
            # beneath `base`: a forward pass of its own calls ours instead of `kind`'s
            bases = (Packed, forward) if base is kind else (Packed, base, forward)
    return types.new_class(f"Packed{base.__name__}", bases, {}, lambda space: space.update(members))


@cache
def _kernel() -> Any:
    """The module with the product on a GPU; None where Triton is missing, or too old."""
    try:
        from ..clustering.kernels.triton.support import runs_here
        from .triton import product
    except ImportError:
        return None
    return product if runs_here() else None


def _weight(name: str) -> property:
    def read(module: nn.Module) -> Tensor:
        return getattr(module, PREFIX + name).dense()

    def write(module: nn.Module, value: Any) -> None:
        raise DKMError(f"{name} of a {type(module).__name__} is packed and cannot be set: load a state_dict of codes")

    return property(read, write)


def _empty(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    cls = _packed_class(base, names)  # type: ignore[arg-type]
    return cls.__new__(cls)
