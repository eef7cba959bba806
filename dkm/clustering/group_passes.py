"""The two passes over the groups of a weight without autograd, for a caller that keeps the trace itself."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import cluster as one
from .grouped import group_backend
from .groups import Grouping
from .kernels.backend import Gradients, GroupTrace, Trace
from .options import ClusterOptions

Traces = GroupTrace | list[Trace]  # of all groups at once, or of one after the other


class Forward(NamedTuple):
    """What `forward` returns."""

    W_tilde: Tensor  # (N,)
    C: Tensor  # (groups, k, d): the centroids to start from next time
    iterations: Tensor  # (groups,) int64: how many iterations each group used
    traces: Traces


def forward(W: Tensor, C: Tensor, tau: Tensor, grouping: Grouping, options: ClusterOptions) -> Forward:
    """W `(N,)`, C `(groups, k, d)` and tau `(groups,)`, both in the compute dtype; at least one group."""
    backend = group_backend(W, C.shape[1], grouping, options)
    if backend is not None:
        with one.no_autocast(W):
            W_tilde, trace = backend.forward_groups(W, C, tau, grouping, options)
        return Forward(W_tilde, trace.trail[:, -1].contiguous(), trace.iterations, trace)
    V, chosen = grouping.split(W), _chosen(grouping, W)
    V_tilde, traces = torch.zeros_like(V), []
    for i, own in enumerate(chosen):
        found, trace_of_one = one.forward(V[i][own].reshape(-1), C[i], tau[i], options)
        V_tilde[i, own] = found.view(-1, grouping.dim)
        traces.append(trace_of_one)
    C_next = torch.stack([trace.trail[-1, :, :-1] for trace in traces])
    iterations = torch.stack([trace.iterations.to(W.device) for trace in traces])
    return Forward(grouping.join(V_tilde), C_next, iterations, traces)


def backward(
    G: Tensor,
    W: Tensor,
    tau: Tensor,
    traces: Traces,
    grouping: Grouping,
    options: ClusterOptions,
    *,
    temperature: bool = False,
) -> Gradients:
    """From the gradient of W_tilde `(N,)` to that of W and, where asked for, that of tau `(groups,)`."""
    wanted = dict(centroids=False, temperature=temperature)
    if not isinstance(traces, list):
        backend = group_backend(W, traces.trail.shape[2], grouping, options)
        assert backend is not None  # it has made the trace
        with one.no_autocast(W):
            return backend.backward_groups(G.contiguous(), W, tau, traces, grouping, options, **wanted)
    V, upstream = grouping.split(W), grouping.split(G)
    dV, dtau = torch.zeros_like(V), torch.zeros_like(tau)
    for i, (own, trace) in enumerate(zip(_chosen(grouping, W), traces, strict=True)):
        G_own, W_own = upstream[i][own].reshape(-1), V[i][own].reshape(-1)
        found = one.backward(G_own, W_own, tau[i], trace, options, reduce=None, **wanted)
        dV[i, own] = found.dW.view(-1, grouping.dim)
        if found.dtau is not None:
            dtau[i] = found.dtau
    return Gradients(grouping.join(dV), None, dtau if temperature else None)


def _chosen(grouping: Grouping, W: Tensor) -> list[Tensor | slice]:
    """Which vectors of each group count."""
    if grouping.all_count:
        return [slice(None)] * grouping.count
    return [counted.nonzero()[:, 0] for counted in grouping.counted(W.device)]
