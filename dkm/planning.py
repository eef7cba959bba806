"""`dkm.plan`: what `compress_` would do to a model, before it does."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .formats.file_size import FileCount
from .modelling.parameters import parameters
from .plans.plan import plan_of
from .plans.rows import Plan
from .plans.target_size import allocate


def plan(
    model: nn.Module,
    text: str | None = None,
    *,
    size: int | str | None = None,
    loss: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> Plan:
    """What `compress_(model, text)` would do: a row for every tensor, with bits, bytes and the reason.

    With a `size`, the tensors that the text does not select get the bits and dim that cost the `loss` least within that
    size.  "1.0MB", or a number of bytes, is the size of the file that `save` writes; "1.0MB paper" is that of the
    parameters as the paper counts.

    Args:
        loss: `model -> number`, lower is better; `dkm.divergence(model, batches)` makes one that needs few evaluations.
        candidates: to choose from: pairs of bits and dim, texts as in a plan such as "2 scaled".
        allocator: how to choose.  "dkm" (the default) by what each tensor costs; "hawq" by the traces of Hessians, for
            which the loss is a tensor with its gradient; "haq" by a search that measures whole plans.
        rounds: of dkm: how often the choice is improved by measuring it as a whole (2).
        vectors: of hawq: how many random vectors the traces are estimated with (32).
        episodes: of haq: how many plans it tries (600).
        seed: of the k-means, as in `compress_`, and of what hawq and haq draw at random.
        progress: is called after each piece of work, with what is done and how much of it there is, by kind.
        measured: a dict, or what is like one, of what was measured before; the same model, loss and seed are yours to
            see to.  What is in it is not measured again, and what is measured is added.
    """
    if size is not None:
        return allocate(model, size, loss, count=FileCount(model), text=text, **options)
    if loss is not None or options:
        given = ", ".join([*(["loss"] if loss is not None else []), *options])
        raise TypeError(f"{given} would choose a plan for a size: give size= too, or a text alone")
    return plan_of(parameters(model), text)
