"""The first training step on a GPU does not wait for one kernel after the other to be compiled."""

import warnings
from collections.abc import Iterable

from torch import Tensor

from ..clustering import kernels
from .clustered import Clustered
from .methods.dkm import DKMClustered


def rehearse(weights: Iterable[tuple[Clustered, Tensor]]) -> None:
    """Let the kernels that a training step of these weights launches be compiled together, when the first is launched.

    Nothing is compiled yet: who only evaluates never waits.  Other methods than DKM have no kernels of their own.
    """
    trained = [(each, weight) for each, weight in weights if isinstance(each, DKMClustered) and weight.requires_grad]
    chosen = [(each, weight) for each, weight in trained if each.options.impl != "reference"]
    known = [(kernels.compiled(kernels.choose(each.options.impl, w, each.dim)), each, w) for each, w in chosen]
    compiled = [(backend, each, weight) for backend, each, weight in known if backend is not None]
    if not compiled:
        return

    def step() -> None:
        for _, each, weight in compiled:
            each.rehearse(weight.detach())

    try:
        compiled[0][0].rehearse(step)
    except Exception as error:  # too little memory, for example: a training needs no rehearsal
        warnings.warn(
            f"a training step could not be prepared, so its kernels are compiled one by one: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
