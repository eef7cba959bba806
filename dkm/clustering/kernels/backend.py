"""What a kernel backend is: the contract that `blocked`, `triton` and any further one fulfil.

A backend is a module with the functions of `Backend`.  It computes the loop of the paper for a flat weight `W` `(N,)`,
whose vectors are `d` consecutive values each, the last one filled up with zeros, and for centroids `C` `(k, d)`.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from ..groups import Grouping
from ..options import ClusterOptions
from ..temperature import Law

Reduce = Callable[[Tensor], Tensor]
"""Adds up, over the processes that hold a shard of W each, what their vectors contribute to the centroids.  It is
given, and returns, a `(k, d + 1)` or `(k, d)` tensor, and it may work in place."""


class Trace(NamedTuple):
    """What a forward pass leaves for the backward pass, besides W and tau."""

    iterations: Tensor  # (), int64: how many iterations were used
    # (max_iter + 1, k, d + 1).  Row t holds the centroids after t iterations and, in the last column, the attention
    # mass that made them.  The last row repeats row `iterations`, from where the next step starts.  The rows between
    # these two are undefined.
    trail: Tensor
    progress: Tensor  # (progress_size(max_iter),), like the trail: a backend's own notes for its backward pass


def progress_size(max_iter: int) -> int:
    """How many values a `Trace.progress` has: four, and one per iteration."""
    return 4 + max_iter


class Gradients(NamedTuple):
    """What a backward pass returns."""

    dW: Tensor  # (N,)
    dC: Tensor | None  # (k, d), where it was asked for
    # (), in the compute dtype, where it was asked for.  Where W is a shard, this is the share of its own vectors only.
    dtau: Tensor | None = None


class State(NamedTuple):
    """From where the clustering of a weight goes on: `Clustered`'s buffers, and the law of its temperature."""

    C: Tensor  # (k, d): the newest centroids
    start: Tensor  # (k, d): the centroids that the weight seen last was clustered from
    seen: Tensor  # (), int64: the checksum of that weight
    step: Tensor  # (), int64: the step of the training that the weight has seen last
    clock: Tensor  # (), int64: the step that any weight of the model has seen
    unit: Tensor  # (): the scale of the temperature
    law: Law
    recomputing: bool  # whether the backward pass asks again: the step of an unchanged weight must stay


class GroupTrace(NamedTuple):
    """What a forward pass over groups leaves for the backward pass, besides W and tau."""

    iterations: Tensor  # (groups,), int64: how many iterations each group used
    # (groups, max_iter + 1, k, d).  Row 0 holds the centroids that a group started from, and the last row those that it
    # reached.  The rows between are the backend's own notes.
    trail: Tensor


class Backend(Protocol):
    """The functions of a backend module.  Register it in `clustering/backends.py`."""

    def fits(self, W: Tensor, d: int) -> bool:
        """Whether `impl="auto"` may choose this backend for this weight."""
        ...

    def forward(
        self, W: Tensor, C: Tensor, tau: Tensor, options: ClusterOptions, reduce: Reduce | None = None
    ) -> tuple[Tensor, Trace]:
        """W_tilde `(N,)`, and what `backward` needs."""
        ...

    def backward(
        self,
        G: Tensor,
        W: Tensor,
        tau: Tensor,
        trace: Trace,
        options: ClusterOptions,
        *,
        reduce: Reduce | None = None,
        centroids: bool = True,
        temperature: bool = False,
    ) -> Gradients:
        """From the gradient of W_tilde, G `(N,)`, to the gradient of W.

        `options.gradient` says what is differentiated, and which centroids the gradient dC belongs to:

            "unrolled"    every iteration                      the first centroids, row 0 of the trail
            "last"        W_tilde = A C alone                  the last ones used, row iterations - 1
            "implicit"    the centroids as a fixed point       the same, through the linear system of `implicit.py`

        dC is None unless `centroids` asks for it.  A training never does, and then there is less to compute.  dtau is
        None unless `temperature` asks for it; it follows `options.gradient`, too.
        """
        ...


class StatefulBackend(Backend, Protocol):
    """A backend that can also make a whole step of a clustered weight in one launch, its state and temperature too."""

    def can_advance(self, W: Tensor, C: Tensor) -> bool:
        """Whether `advance` is for this weight and these centroids."""
        ...

    def advance(
        self, W: Tensor, state: State, options: ClusterOptions, *, channels: int = 1, pixels: int = 1
    ) -> tuple[Tensor, Tensor, Trace]:
        """`forward` from a state, in one launch: W_tilde, tau and the trace.  The state is brought up to date in place.

        A weight in channels-last order says so, for its checksum: so many `channels` of so many `pixels`.
        """
        ...


class GroupedBackend(Backend, Protocol):
    """A backend that also clusters the groups of a weight, each with centroids and a temperature of its own."""

    def fits_groups(self, W: Tensor, k: int, grouping: Grouping) -> bool:
        """Whether these groups are for the next two functions: not too many weights each, for example."""
        ...

    def forward_groups(
        self, W: Tensor, C: Tensor, tau: Tensor, grouping: Grouping, options: ClusterOptions
    ) -> tuple[Tensor, GroupTrace]:
        """W `(N,)`, C `(groups, k, d)`, tau `(groups,)` -> W_tilde `(N,)`, and what `backward_groups` needs."""
        ...

    def backward_groups(
        self,
        G: Tensor,
        W: Tensor,
        tau: Tensor,
        trace: GroupTrace,
        grouping: Grouping,
        options: ClusterOptions,
        *,
        centroids: bool = True,
        temperature: bool = False,
    ) -> Gradients:
        """As `backward`, group by group: dW `(N,)`, dC `(groups, k, d)` and dtau `(groups,)`."""
        ...


class CompiledBackend(Backend, Protocol):
    """A backend whose kernels are compiled when they are launched for the first time."""

    def rehearse(self, step: Callable[[], None]) -> None:
        """Call `step`, whose launches are only written down: its results are undefined, and nothing is changed.  When
        the first of them is made in earnest, the kernels of all are compiled together."""
        ...
