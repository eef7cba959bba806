"""`dkm.plan`: what `compress_` would do to a model, before it does."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ..modelling.parameters import Owned, parameters
from .rows import Plan
from .selection import apply
from .target_size import allocate


def plan(
    model: nn.Module,
    text: str | None = None,
    *,
    size: int | str | None = None,
    loss: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> Plan:
    """What `compress_(model, text)` would do: a row for every tensor, with bits, bytes and the reason.

    With a `size`, "1.0MB" or a number of bytes, the tensors that the text does not select get the bits and dim that
    cost the `loss` least within that size.  `options` are those of `dkm.plans.target_size.allocate`.
    """
    if size is not None:
        return allocate(model, size, loss, text=text, **options)
    if loss is not None or options:
        given = ", ".join([*(["loss"] if loss is not None else []), *options])
        raise TypeError(f"{given} would choose a plan for a size: give size= too, or a text alone")
    return plan_of(parameters(model), text)


def plan_of(walk: list[Owned], text: str | None) -> Plan:
    """The plan that a text means for these parameters of a model."""
    return Plan(tuple(apply(walk, text)[0]))
