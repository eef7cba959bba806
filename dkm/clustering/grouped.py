"""Differentiable k-means of the groups of a weight: each has centroids and a temperature of its own."""

from dataclasses import astuple
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .cluster import no_autocast, run
from .groups import Grouping
from .kernels.backend import Gradients, GroupedBackend, GroupTrace
from .options import ClusterOptions
from .vectors import compute_dtype


class GroupedClustering(NamedTuple):
    """What `cluster_groups` returns."""

    W_tilde: Tensor  # like W
    C: Tensor  # (groups, k, d), without gradient: the centroids to start from next time
    iterations: Tensor  # (groups,) int64: how many iterations each group used


def cluster_groups(
    W: Tensor, C: Tensor, tau: float | Tensor, grouping: Grouping, options: ClusterOptions
) -> GroupedClustering:
    """`cluster` of each group as if it was a tensor of its own: W of any shape, C `(groups, k, d)`, tau `(groups,)`.

    A tau that is a number, or a tensor of one element, is that of all groups.  Differentiable in W, C and tau.
    """
    dtype = compute_dtype(W.dtype)
    # filled on the device: a copy from the host could not be captured in a CUDA graph
    tau = tau.to(W.device, dtype) if isinstance(tau, Tensor) else torch.full((), tau, dtype=dtype, device=W.device)
    tau = tau.expand(grouping.count).contiguous()
    if not _at_once(W, C.shape[1], grouping, options):
        return _one_by_one(W, C, tau, grouping, options)
    if torch.compiler.is_compiling():
        W_tilde, iterations, trail = _operator(W.reshape(-1), C, tau, list(astuple(grouping)), **_flat(options))
    else:
        W_tilde, iterations, trail = _ClusterGroups.apply(W.reshape(-1), C, tau, grouping, options)
    return GroupedClustering(W_tilde.view(W.shape), trail.detach()[:, -1].contiguous(), iterations)


def group_backend(W: Tensor, k: int, grouping: Grouping, options: ClusterOptions) -> GroupedBackend | None:
    """The backend that does all groups in one go, if there is one for these groups."""
    if options.impl == "reference":
        return None
    backend = kernels.grouped(kernels.choose(options.impl, W, grouping.dim))
    return backend if backend is not None and backend.fits_groups(W, k, grouping) else None


@torch.compiler.assume_constant_result
def _at_once(W: Tensor, k: int, grouping: Grouping, options: ClusterOptions) -> bool:
    return group_backend(W, k, grouping, options) is not None


def _one_by_one(W: Tensor, C: Tensor, tau: Tensor, grouping: Grouping, options: ClusterOptions) -> GroupedClustering:
    """Few large groups: the kernels for whole tensors, one group after the other."""
    V, counted = grouping.split(W), None if grouping.all_count else grouping.counted(W.device)
    found = []
    for i in range(grouping.count):
        chosen = slice(None) if counted is None else counted[i].nonzero()[:, 0]
        W_tilde, C_next, iterations = run(V[i][chosen].contiguous(), C[i], tau[i], options)
        if counted is not None:
            W_tilde = torch.zeros_like(V[i]).index_copy(0, chosen, W_tilde)  # type: ignore[arg-type]
        found.append((W_tilde, C_next, iterations.to(W.device)))
    W_tilde, C_next, iterations = (torch.stack(parts) for parts in zip(*found, strict=True))
    return GroupedClustering(grouping.join(W_tilde).view(W.shape), C_next, iterations)


# --- autograd ------------------------------------------------------------------------------------

Output = tuple[Tensor, Tensor, Tensor]  # W_tilde and the two tensors of a GroupTrace


def _forward(W: Tensor, C: Tensor, tau: Tensor, grouping: Grouping, options: ClusterOptions) -> Output:
    backend = group_backend(W, C.shape[1], grouping, options)
    assert backend is not None  # `cluster_groups` has asked
    with no_autocast(W):
        W_tilde, trace = backend.forward_groups(W, C.to(compute_dtype(W.dtype)), tau, grouping, options)
    return W_tilde, *trace


def _backward(
    G: Tensor,
    W: Tensor,
    tau: Tensor,
    trace: GroupTrace,
    grouping: Grouping,
    options: ClusterOptions,
    *,
    centroids: bool,
    temperature: bool,
) -> Gradients:
    backend = group_backend(W, trace.trail.shape[2], grouping, options)
    assert backend is not None
    through_all = options.gradient == "unrolled"  # otherwise the first centroids are constants
    wanted = dict(centroids=centroids and through_all, temperature=temperature)
    with no_autocast(W):
        found = backend.backward_groups(G.contiguous(), W, tau, trace, grouping, options, **wanted)
    return found if through_all or not centroids else found._replace(dC=torch.zeros_like(trace.trail[:, 0]))


class _ClusterGroups(torch.autograd.Function):
    @staticmethod
    def forward(W: Tensor, C: Tensor, tau: Tensor, grouping: Grouping, options: ClusterOptions) -> Output:
        return _forward(W, C, tau, grouping, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Output) -> None:
        W, C, tau, ctx.grouping, ctx.options = inputs
        ctx.C_dtype = C.dtype
        ctx.save_for_backward(W, tau, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, G: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        W, tau, *trace = ctx.saved_tensors
        _, C_wanted, tau_wanted, *_ = ctx.needs_input_grad
        dW, dC, dtau = _backward(
            G, W, tau, GroupTrace(*trace), ctx.grouping, ctx.options, centroids=C_wanted, temperature=tau_wanted
        )
        return dW, None if dC is None else dC.to(ctx.C_dtype), dtau, None, None


# --- torch.compile: as in `cluster.py`, operators that the compiler does not look into --------------------------


def _flat(options: ClusterOptions) -> dict[str, Any]:
    names = ("eps", "max_iter", "metric", "gradient", "impl")
    return {name: getattr(options, name) for name in names}


@torch.library.custom_op("dkm::cluster_groups", mutates_args=())
def _operator(
    W: Tensor, C: Tensor, tau: Tensor, grouping: list[int],
    eps: float, max_iter: int, metric: str, gradient: str, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = ClusterOptions(eps=eps, max_iter=max_iter, metric=metric, gradient=gradient, impl=impl)
    return _forward(W, C, tau, Grouping(*grouping), options)


@_operator.register_fake
def _(
    W: Tensor, C: Tensor, tau: Tensor, grouping: list[int],
    eps: float, max_iter: int, metric: str, gradient: str, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    groups, k, d = C.shape
    trail = C.new_empty(groups, max_iter + 1, k, d, dtype=compute_dtype(W.dtype))
    return torch.empty_like(W), W.new_empty(groups, dtype=torch.int64), trail


@torch.library.custom_op("dkm::cluster_groups_backward", mutates_args=())
def _backward_operator(
    G: Tensor, W: Tensor, tau: Tensor, iterations: Tensor, trail: Tensor, grouping: list[int],
    eps: float, max_iter: int, metric: str, gradient: str, impl: str, centroids: bool, temperature: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = ClusterOptions(eps=eps, max_iter=max_iter, metric=metric, gradient=gradient, impl=impl)
    dW, dC, dtau = _backward(
        G, W, tau, GroupTrace(iterations, trail), Grouping(*grouping), options,
        centroids=centroids, temperature=temperature,
    )  # fmt: skip
    nothing = trail.new_empty(0)  # an operator returns tensors
    return dW, nothing if dC is None else dC, nothing.clone() if dtau is None else dtau


@_backward_operator.register_fake
def _(
    G: Tensor, W: Tensor, tau: Tensor, iterations: Tensor, trail: Tensor, grouping: list[int],
    eps: float, max_iter: int, metric: str, gradient: str, impl: str, centroids: bool, temperature: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    groups, _, k, d = trail.shape
    dC = trail.new_empty((groups, k, d) if centroids else 0)
    return torch.empty_like(W), dC, trail.new_empty(groups if temperature else 0)


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: Output) -> None:
    W, C, tau, ctx.grouping, eps, max_iter, metric, gradient, impl = inputs
    ctx.options = ClusterOptions(eps=eps, max_iter=max_iter, metric=metric, gradient=gradient, impl=impl)
    ctx.C_dtype = C.dtype
    ctx.save_for_backward(W, tau, *output[1:])


def _operator_gradients(ctx: Any, G: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    W, tau, iterations, trail = ctx.saved_tensors
    _, C_wanted, tau_wanted, *_ = ctx.needs_input_grad
    wanted = dict(centroids=C_wanted, temperature=tau_wanted)
    trace = dict(iterations=iterations, trail=trail, grouping=ctx.grouping)
    dW, dC, dtau = _backward_operator(G.contiguous(), W, tau, **trace, **_flat(ctx.options), **wanted)
    return dW, dC.to(ctx.C_dtype) if C_wanted else None, dtau if tau_wanted else None, *(None,) * 6


_operator.register_autograd(_operator_gradients, setup_context=_save_operator)
