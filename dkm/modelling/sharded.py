"""FSDP2: every rank clusters its own rows of a weight, and only sums over the vectors travel.

`fully_shard` turns a parameter into a DTensor, of which each rank holds some rows, and gathers it before its
module runs.  What must be gathered is W~, not W.  FSDP2 has a place for that: `fsdp_pre_all_gather` of the local
tensor says what is gathered in its stead.

    fully_shard   replaces the parameter in the weight's list of parametrizations (`clustered.Chain`), which notices
                  that and calls `DKMClustered.shard`; from then on the local tensor is a `_Rows`
    forward       `_Rows.fsdp_pre_all_gather` makes this rank's rows of W~, or of the snapped weight.  FSDP2
                  gathers them in the dtype of its policy, and `Sharded.read` hands them on to the module
    backward      FSDP2 scatters the gradient of W~ to `.grad` of the DTensor, and calls the hook `Sharded.convert`,
                  which takes it through the clustering of the rows

Both passes of the clustering add up sums of shape `(k, d + 1)` or `(k, d)` over the ranks, once per iteration.  All
ranks get the same bits from that, so that they take the same number of iterations and keep equal centroids.

Where there are groups, each of them belongs to one rank, which clusters it alone.  Only then are the new centroids of
all ranks put together.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable would import the compiler with dkm

from ..clustering import cluster as loop
from ..clustering import group_passes
from ..clustering.groups import Grouping
from ..clustering.kernels.backend import Gradients, Trace
from ..clustering.options import DKMOptions
from ..clustering.spec import Spec
from ..clustering.vectors import compute_dtype
from .clock import in_backward
from .clustered import Moment
from .dtensors import is_sharded
from .shard_layout import Layout

# The functions that FSDP2 calls on the local tensor to pad it, pin it or move it to the device.  Their result takes the
# place of the local tensor, so it must be a `_Rows`, too.
_KEPT = {"new_zeros", "narrow", "__getitem__", "to", "cpu", "pin_memory"}


class _Rows(Tensor):
    """A rank's rows of a clustered weight: a plain tensor but for what FSDP2 gathers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if getattr(func, "__name__", "") in _KEPT else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # checkpoints hold plain tensors

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """FSDP2 asks what to gather in the place of these rows."""
        sharded = module[0].sharded
        values = sharded.gather(self.as_subclass(Tensor))
        return (sharded.layout.padded(values.to(mp_policy.param_dtype or self.dtype)),), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """FSDP2 asks what to make of the gathered values: nothing."""
        if out is None:
            return all_gather_outputs[0], ()
        return None  # `out` shares the memory of the outputs: it is there already


class Shardable(Protocol):
    """What `Sharded` needs of the clustered weight that it works for."""

    loop: DKMOptions
    spec: Spec
    grouping: Grouping
    C: Tensor
    training: bool

    def moment(self, weight: Tensor, add_up: Callable[[Tensor], Tensor] | None = None, first: int = 0) -> Moment: ...
    def temperature(self, step: Tensor) -> Tensor | float: ...
    def advance(self, C: Tensor, now: Moment, iterations: Tensor) -> None: ...
    def marked(self, weight: Tensor, rows: slice) -> Tensor: ...
    def nearest(self, W: Tensor, grouping: Grouping, dtype: torch.dtype, groups: slice) -> Tensor: ...
    def stands_for(self, values: Tensor, dtype: torch.dtype, rows: slice) -> Tensor: ...
    def scaled(self, weight: Tensor, rows: slice) -> Tensor: ...
    def unscaled(self, values: Tensor, rows: slice) -> Tensor: ...


class LastClustering(NamedTuple):
    """What the gradient needs of the last clustering."""

    trace: Trace | group_passes.Traces | None  # None on a rank without a group
    tau: Tensor  # (), or (groups of this rank,)


class Sharded:
    """A clustered weight that is sharded: what this rank keeps for it, besides the clustering's own state.

    parameter   the DTensor
    gathered    what FSDP2 gathered last: None for W~, otherwise which centroids the weight was snapped to
    graph       whether the last graph was built on W~
    last        what the gradient needs of the last clustering
    aside       the gradient of W so far, while `.grad` holds a gradient of W~; see `convert`
    """

    def __init__(self, clustered: Shardable):
        self.clustered = clustered
        self.parameter: Any = None
        self.layout: Layout
        self.last: LastClustering
        self.gathered: tuple[int, int] | None = None
        self.multiple: Any = None  # the DTensor of a learned temperature
        self.aside: Any = None
        self.graph = self.set_aside = self.penalty = False

    def adopt(self, parameter: Any) -> None:
        """Take on the DTensor that the weight is now."""
        if not isinstance(parameter._local_tensor, _Rows):
            parameter._local_tensor = parameter._local_tensor.as_subclass(_Rows)
        if parameter is not self.parameter:
            self.parameter, clustered = parameter, self.clustered
            self.layout = Layout(parameter, clustered.grouping, clustered.spec.group is not None)

    def gather(self, rows: Tensor) -> Tensor:
        """From this rank's rows of the weight to the rows that FSDP2 shall gather."""
        wanted = self.clustered.training and self.parameter.requires_grad
        soft = self.graph if in_backward() else wanted
        values = self.values(rows, soft)
        self.gathered = None if soft else self.centroids()
        return values

    def centroids(self) -> tuple[int, int]:
        """Which centroids these are: another pair of numbers whenever they have changed."""
        return id(self.clustered.C), self.clustered.C._version

    @torch.no_grad()
    def values(self, rows: Tensor, soft: bool) -> Tensor:
        """From this rank's rows of the weight to its rows of W~, or of the snapped weight."""
        return self.cluster(rows) if soft else self.snapped(rows)

    def snapped(self, rows: Tensor) -> Tensor:
        """This rank's rows of the snapped weight."""
        clustered, layout = self.clustered, self.layout
        W = layout.to_owners(clustered.marked(rows, layout.rows).reshape(-1))
        values = W.to(clustered.C.dtype)  # which is what the other ranks send, even to one without vectors
        if len(W):
            values = clustered.nearest(W, layout.grouping, rows.dtype, layout.groups)
        return clustered.stands_for(layout.to_rows(values).view(rows.shape), rows.dtype, layout.rows)

    def cluster(self, rows: Tensor) -> Tensor:
        """Cluster the whole weight together with the other ranks; returns this rank's rows of W~."""
        clustered, layout = self.clustered, self.layout
        if is_sharded(multiple := getattr(clustered, "log_multiple", None)):
            self.multiple = multiple
        now = clustered.moment(rows, layout.sum, layout.first)
        W = layout.to_owners(clustered.scaled(rows, layout.rows).reshape(-1))
        tau, dtype = clustered.temperature(now.step), compute_dtype(W.dtype)
        tau = tau.to(dtype) if isinstance(tau, Tensor) else now.start.new_full((), tau, dtype=dtype)
        if clustered.spec.group is None:
            W_tilde, trace = loop.forward(W, now.start, tau, clustered.loop, layout.sum)
            self.last = LastClustering(trace, tau)
            clustered.advance(trace.trail[-1, :, :-1].contiguous(), now, trace.iterations)
        else:
            W_tilde = self._cluster_groups(W, tau.expand(clustered.grouping.count), now)
        return clustered.unscaled(layout.to_rows(W_tilde).view(rows.shape), layout.rows).to(rows.dtype)

    def _cluster_groups(self, W: Tensor, tau: Tensor, now: Moment) -> Tensor:
        """Cluster the groups of this rank, and put the centroids of all ranks together."""
        clustered, own = self.clustered, self.layout.groups
        tau = tau[own].contiguous()
        # of each group: its centroids and its iterations; zero on all ranks but the one that has it
        news = now.start.new_zeros(len(now.start), now.start[0].numel() + 1, dtype=tau.dtype)
        trace = None
        if len(tau):
            start = now.start[own].to(tau.dtype)
            W, C, iterations, trace = group_passes.forward(W, start, tau, self.layout.grouping, clustered.loop)
            news[own] = torch.cat([C.flatten(1), iterations[:, None].to(C.dtype)], 1)
        news = self.layout.sum(news)
        self.last = LastClustering(trace, tau)
        clustered.advance(news[:, :-1].reshape(now.start.shape), now, news[:, -1].amax().long())
        return W

    @_disable_dynamo  # a graph that torch.compile traced would leave out the hooks
    def read(self, weight: Tensor) -> Tensor:
        """What `Clustered.forward` returns: what FSDP2 has gathered, with its way back to the shards."""
        soft = self.clustered.training and weight.requires_grad
        if is_sharded(weight):  # outside of a forward pass nothing is gathered: the answer is sharded, without gradient
            rows = weight._local_tensor.as_subclass(Tensor)  # type: ignore[attr-defined]
            return self._like_parameter(self.values(rows, soft))
        if in_backward():  # activation checkpointing
            soft = self.graph
        elif soft or torch.is_grad_enabled():  # soft: reentrant checkpointing runs without gradient at first
            self.graph = soft
        values = weight.detach()
        if self.gathered != (None if soft else self.centroids()):
            # The mode has changed while FSDP2 held on to what it had gathered, as it does for the root module.
            # Not in place: the graph of an earlier forward pass may need it.
            rows = self.values(self.parameter._local_tensor.as_subclass(Tensor), soft)
            values = self._like_parameter(rows.to(weight.dtype)).full_tensor()
        if not soft:
            return values
        self._hook()
        return _Through.apply(weight, values, self)

    def _like_parameter(self, rows: Tensor) -> Any:
        parameter = self.parameter
        return type(parameter.data).from_local(
            rows, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )

    def _hook(self) -> None:
        # Not in `adopt`, because a frozen weight takes no hooks.  model.to(...) may drop them: look before registering.
        if self.convert not in (self.parameter._post_accumulate_grad_hooks or {}).values():
            self.parameter.register_post_accumulate_grad_hook(self.convert)
        if self._announce not in (self.parameter._backward_hooks or {}).values():
            self.parameter.register_hook(self._announce)

    # FSDP2 puts a gradient of W~ into `.grad`, which may hold a gradient of W from before: the two must not be added
    # up.  So when the backward pass reaches the weight, what `.grad` holds is set aside; it is added again to the new
    # gradient when that has gone through the clustering.  The gradient of a penalty on the parameter itself arrives in
    # `.grad` too, by autograd and not by FSDP2.  It is a gradient of W already; `_announce` tells the two apart.

    def _announce(self, grad: Tensor) -> None:
        self.penalty = True

    def set_gradient_aside(self) -> None:
        """The backward pass has reached the weight: keep the gradient of W apart from the one that comes."""
        self.penalty = False  # torch.autograd.grad announces too, and then accumulates nothing
        if not self.set_aside:
            self.set_aside, self.aside, self.parameter.grad = True, self.parameter.grad, None

    @torch.no_grad()
    def convert(self, parameter: Any) -> None:
        """Turn the gradient of W~ in `.grad` into the gradient of W, and add what was set aside."""
        if self.penalty:
            self.penalty = False
            if self.set_aside:
                self.aside = parameter.grad if self.aside is None else self.aside + parameter.grad
                parameter.grad = None
            return
        rows = parameter.grad._local_tensor
        gradient = self.through_clustering(rows)
        if self.aside is None:
            rows.copy_(gradient)
        else:
            self.aside._local_tensor.add_(gradient)
            parameter.grad = self.aside
        self.set_aside, self.aside = False, None

    def through_clustering(self, rows: Tensor) -> Tensor:
        """From this rank's rows of the gradient of W~ to its rows of the gradient of W."""
        clustered, layout, (trace, tau) = self.clustered, self.layout, self.last
        # the gradients of the scaled weight, as autograd would make them of `scaled` and `unscaled`
        own = self.parameter._local_tensor.as_subclass(Tensor)
        W = layout.to_owners(clustered.scaled(own.to(tau.device), layout.rows).reshape(-1))
        G = layout.to_owners(clustered.unscaled(rows.to(tau.device), layout.rows).reshape(-1))
        learned = self.multiple is not None and self.multiple.requires_grad
        if isinstance(trace, Trace):
            wanted = dict(centroids=False, temperature=learned)
            found = loop.backward(G, W, tau, trace, clustered.loop, reduce=layout.sum, **wanted)
        elif trace is not None:
            grouping = layout.grouping
            found = group_passes.backward(G, W, tau, trace, grouping, clustered.loop, temperature=learned)
        else:
            found = Gradients(W, None, torch.zeros_like(tau))  # of no weights
        if learned:
            assert found.dtau is not None
            self._add_to_multiple(layout.sum((found.dtau * tau).sum()))
        return clustered.scaled(layout.to_rows(found.dW).view(rows.shape), layout.rows)

    def _add_to_multiple(self, gradient: Tensor) -> None:
        """Add to the gradient of a learned temperature.  FSDP2 has sharded it as well: one rank has its one element."""
        if self.multiple.grad is None:
            self.multiple.grad = torch.zeros_like(self.multiple)
        self.multiple.grad._local_tensor.add_(gradient)


class _Through(torch.autograd.Function):
    """W~ as it was gathered.  Its gradient goes on to FSDP2's parameter, and `Sharded` is told that it comes."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor, sharded: Sharded) -> Tensor:
        ctx.sharded = sharded
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor, None, None]:
        ctx.sharded.set_gradient_aside()
        return G, None, None
