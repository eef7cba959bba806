"""DKM itself: attention to the centroids, differentiated through every iteration."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ...clustering import group_passes
from ...clustering.cluster import Clustering, advance, can_advance, rehearse, rehearse_advance, run
from ...clustering.grouped import cluster_groups
from ...clustering.kernels.backend import State
from ...clustering.options import DKMOptions, StartOptions
from ...clustering.temperature import law
from ..clock import in_backward
from ..sharded import Sharded
from ..tempered import Tempered
from .registry import register


@register("dkm")
class DKMClustered(Tempered):
    """Attention to the centroids, with gradient through every iteration: the paper's method.

    See `dkm.cluster` for the loop.

    On a GPU a whole step of it (the checksum, the temperature, the clustering, the new state) is one launch: a network
    has many weights, and as operations of PyTorch they would take longer than the network itself.
    """

    Options: ClassVar[type[StartOptions]] = DKMOptions
    clusters_groups: ClassVar[bool] = True
    made_at_once: ClassVar[bool] = True
    paper: ClassVar[str] = "Cho 2022"
    options: DKMOptions
    loop: DKMOptions

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options: Any):
        super().__init__(weight, bits, dim, **options)
        self.sharded: Sharded | None = None  # where fully_shard has split the weight

    def cluster(self, weight: Tensor, start: Tensor, step: Tensor) -> Clustering:
        """The clustering of the scaled weight from the centroids `start`, at the moment `step`.  Changes nothing."""
        if self.spec.group is None:
            return run(weight, start, self.temperature(step), self.loop)
        W_tilde, C, iterations = cluster_groups(weight, start, self.temperature(step), self.grouping, self.loop)
        return Clustering(W_tilde, C, iterations.amax())

    def soft(self, weight: Tensor) -> Tensor:
        """W~, with gradient; in one launch where there is a kernel for it."""
        state = self._state(weight)
        if state is None:
            return super().soft(weight)
        W_tilde, iterations = advance(weight, state, self.loop)
        self.__dict__["iterations"] = iterations  # nn.Module's own way of setting it would take longer
        return W_tilde

    def _state(self, weight: Tensor) -> State | None:
        """From where one launch goes on; None where there is no kernel for it."""
        followed = law(self.options.tau if self.schedule is None else self.schedule, self.steps)
        alone = self.shift or self.spec.scaled or self.spec.group is not None  # what the kernel does not know
        if followed is None or alone or not can_advance(weight, self.C, self.options.impl):
            return None
        clock = self.clock.on(self.step.device)
        return State(self.C, self.start, self.seen, self.step, clock, self.unit, followed, in_backward())

    @torch.no_grad()
    def rehearse(self, weight: Tensor) -> None:
        """Both passes of `soft`, for a backend that only writes down how it is launched."""
        if (state := self._state(weight)) is not None:
            rehearse_advance(weight, state, self.loop)
            return
        W = self.scaled(weight).reshape(-1)
        tau = torch.as_tensor(self.temperature(self.step), dtype=self.C.dtype, device=W.device)
        learned = self.options.tau == "learn"
        if self.spec.group is None:
            rehearse(W, self.C, tau, self.loop, centroids=False, temperature=learned)
        else:
            tau = tau.expand(self.grouping.count).contiguous()
            made = group_passes.forward(W, self.C, tau, self.grouping, self.loop)
            group_passes.backward(made.W_tilde, W, tau, made.traces, self.grouping, self.loop, temperature=learned)

    def forward(self, weight: Tensor) -> Tensor:
        """What the module computes with: W~ in training, the snapped weight otherwise."""
        return super().forward(weight) if self.sharded is None else self.sharded.read(weight)

    def shard(self, original: Any) -> None:
        """FSDP2 has split the weight: from now on each rank clusters its own rows."""
        self.sharded = self.sharded or Sharded(self)
        self.sharded.adopt(original)
