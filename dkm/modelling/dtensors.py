"""Tensors that FSDP2 has split over processes (DTensors), seen from outside: gathering them, and who writes."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor.  Does not import the class: that takes a second, and few models have any."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """A plain tensor as it is; a DTensor gathered from its ranks, all of which must ask for it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def reshard(model: nn.Module) -> Any | None:
    """Have FSDP2 let go of gathered weights, which are not the parameters.  Returns the mesh of the shards, or None."""
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return next((p.device_mesh for p in model.parameters() if is_sharded(p)), None)  # type: ignore[attr-defined]


def is_first(mesh: Any | None) -> bool:
    """Whether this process is the first of the mesh; without a mesh there is only one."""
    return mesh is None or not any(mesh.get_coordinate())


def on_first(mesh: Any | None, action: Callable[[], Sequence[int]], count: int) -> Sequence[int]:
    """Run `action` on the first rank only, and return its results on all ranks: so many integers of at least 0.

    Where it raises, all ranks do.
    """
    if mesh is None:
        return action()
    result = torch.full((count,), -1, dtype=torch.int64, device=mesh.device_type)
    try:
        if is_first(mesh):
            result.copy_(torch.tensor(action()))
    finally:
        for dim in range(mesh.ndim):
            group = mesh.get_group(dim)
            torch.distributed.broadcast(result, torch.distributed.get_global_rank(group, 0), group)
    if int(result.min()) < 0:
        raise RuntimeError("the first rank failed: its error says why")
    return result.tolist()
