"""Groups on any device, in plain PyTorch: some groups at a time, in memory proportional to the weight.

The attention of a few groups is small.  So these groups go through all their iterations together.  The backward pass
computes the attention again from the trail, iteration by iteration, as the head of `blocked.py` explains.  Distances
are differences, as in `reference`, so that nothing cancels.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..groups import Grouping
from ..options import ClusterOptions
from ..vectors import compute_dtype
from .backend import Gradients, GroupTrace
from .implicit import solve
from .reference import no_mass

TILE = 1 << 18  # values of the attention that are computed at once
LARGEST = 1 << 22  # of one group; larger ones are clustered one after the other, by the kernels for tensors


def fits_groups(W: Tensor, k: int, grouping: Grouping) -> bool:
    """Whether a group's attention fits into little memory."""
    return grouping.vectors * k <= LARGEST


def forward_groups(
    W: Tensor, C: Tensor, tau: Tensor, grouping: Grouping, options: ClusterOptions
) -> tuple[Tensor, GroupTrace]:
    """W_tilde `(N,)` and the trace; see `backend.GroupedBackend`.  Row t of the trail: after t iterations."""
    k, dtype = C.shape[1], compute_dtype(W.dtype)
    V, counted = grouping.split(W), _counted(W, grouping)
    trail = C.new_zeros(grouping.count, options.max_iter + 1, k, grouping.dim, dtype=dtype)
    trail[:, 0] = C
    iterations = torch.empty(grouping.count, dtype=torch.int64, device=W.device)
    V_tilde = torch.empty_like(V)
    for at in _pieces(grouping, k):
        groups = _Groups(V[at].to(dtype), tau[at], None if counted is None else counted[at], options.metric)
        V_tilde[at], iterations[at] = _run(groups, trail[at], options)
    return grouping.join(V_tilde), GroupTrace(iterations, trail)


def _run(groups: "_Groups", trail: Tensor, options: ClusterOptions) -> tuple[Tensor, Tensor]:
    """All iterations of some groups: W_tilde `(g, n, d)` and iterations `(g,)`; `trail` is filled in."""
    C = trail[:, 0]
    iterations = torch.zeros(len(C), dtype=torch.int64, device=C.device)
    running = torch.ones(len(C), 1, 1, dtype=torch.bool, device=C.device)
    for t in range(options.max_iter):
        attention = groups.attention(C)
        C_next = attention.update()[0]
        iterations += running[:, 0, 0]
        trail[:, t + 1] = C_next
        trail[:, -1] = torch.where(running, C_next, trail[:, -1])
        running = running & ((C_next - C).abs().amax((1, 2), keepdim=True) > options.eps)
        if t + 1 == options.max_iter or not bool(running.any()):
            break
        C = torch.where(running, C_next, C)  # a group that has converged keeps what its attention belongs to
    return attention.output(), iterations


def backward_groups(
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
    """The gradients of W and, where asked for, of the centroids and of tau; see `backend.GroupedBackend`."""
    V, counted, upstream = grouping.split(W), _counted(W, grouping), grouping.split(G)
    k, dtype = trace.trail.shape[2], trace.trail.dtype
    dV, dC = torch.empty_like(V), torch.empty_like(trace.trail[:, 0])
    dtau = torch.empty_like(tau, dtype=dtype)
    for at in _pieces(grouping, k):
        groups = _Groups(V[at].to(dtype), tau[at], None if counted is None else counted[at], options.metric)
        dC[at] = _run_back(groups, upstream[at].to(dtype), trace.trail[at], trace.iterations[at], options.gradient)
        dV[at], dtau[at] = groups.dV.transpose(1, 2), groups.dtau
    return Gradients(grouping.join(dV), dC if centroids else None, dtau if temperature else None)


def _run_back(groups: "_Groups", g: Tensor, trail: Tensor, iterations: Tensor, gradient: str) -> Tensor:
    """Back through the iterations of some groups; returns the gradient of the centroids.  `groups` adds up the rest."""
    used = iterations[:, None, None, None].expand(-1, 1, *trail.shape[2:])
    last = groups.attention(trail.gather(1, used - 1)[:, 0])
    dC = last.through_output(g)
    if gradient == "unrolled":
        for t in range(int(iterations.max()) - 2, -1, -1):
            made = (t + 1 < iterations)[:, None, None]  # the groups that went on from what iteration t made
            through = groups.attention(trail[:, t]).through_update(torch.where(made, dC, 0.0))
            dC = torch.where(made, through, dC)
    elif gradient == "implicit":
        dC = solve(dC, lambda u: last.through_update(u, add=False, fixed=True))
        last.through_update(dC, fixed=True)
    return dC


class _Groups:
    """g groups, as columns `(g, d, n)`, and the gradients that their vectors and temperatures receive."""

    def __init__(self, V: Tensor, tau: Tensor, counted: Tensor | None, metric: str):
        self.V = V.transpose(1, 2).contiguous()
        self.tau, self.metric = tau.to(V.dtype)[:, None, None], metric
        self.counted = None if counted is None else counted[:, None, :]
        self.dV, self.dtau = torch.zeros_like(self.V), torch.zeros_like(tau, dtype=V.dtype)

    def attention(self, C: Tensor) -> "_Attention":
        return _Attention(self, C)


class _Attention:
    """The attention A `(g, k, n)` of groups to the centroids C `(g, k, d)`."""

    def __init__(self, groups: _Groups, C: Tensor):
        self.groups, self.C = groups, C
        self.distance = self._difference(0).square_()
        for j in range(1, C.shape[2]):
            self.distance += self._difference(j).square_()
        if groups.metric == "euclidean":
            self.distance.sqrt_()
        self.logits = self.distance / -groups.tau
        self.logits -= self.logits.amax(1, keepdim=True)
        # exp takes 50 times as long where it underflows, as do products with such results
        floor = no_mass(C.dtype)
        self.A = torch.threshold_(self.logits.clamp_(min=math.log(floor) - 1e-3).exp(), floor, 0.0)
        self.A /= self.A.sum(1, keepdim=True)
        if groups.counted is not None:
            self.A *= groups.counted

    def _difference(self, j: int) -> Tensor:
        """`(g, k, n)`: coordinate j of the vectors, minus that of the centroids."""
        return self.groups.V[:, j, None, :] - self.C[:, :, j, None]

    def output(self) -> Tensor:
        """W_tilde = A C, `(g, n, d)`."""
        return self.A.transpose(1, 2) @ self.C

    def update(self) -> tuple[Tensor, Tensor, Tensor]:
        """The next centroids `(g, k, d)`, their masses `(g, k, 1)`, and which centroids are empty."""
        mass = self.A.sum(2, keepdim=True)
        empty = mass <= no_mass(mass.dtype)
        sums = self.A @ self.groups.V.transpose(1, 2)
        return torch.where(empty, self.C, sums / torch.where(empty, 1.0, mass)), mass, empty

    def through_output(self, g: Tensor) -> Tensor:
        """W_tilde = A C: from its gradient `(g, n, d)` to that of C."""
        return self.A @ g + self._through_softmax(self.C @ g.transpose(1, 2))

    def through_update(self, dC_next: Tensor, add: bool = True, fixed: bool = False) -> Tensor:
        """The update: from the gradient of the next centroids to that of C.

        The gradients of vectors and temperatures are added up if `add` says so.  An empty centroid stays where it is
        or, if the centroids are a `fixed` point, depends on nothing.
        """
        C_next, mass, empty = self.update()
        H = torch.where(empty, 0.0, dC_next / torch.where(empty, 1.0, mass))
        if add:
            self.groups.dV += H.transpose(1, 2) @ self.A
        # H . (v - c'), by differences
        dA = (self.groups.V[:, 0, None, :] - C_next[:, :, 0, None]).mul_(H[:, :, 0, None])
        for j in range(1, H.shape[2]):
            dA.addcmul_(self.groups.V[:, j, None, :] - C_next[:, :, j, None], H[:, :, j, None])
        dC = self._through_softmax(dA, add)
        return dC if fixed else dC + torch.where(empty, dC_next, 0.0)

    def _through_softmax(self, dA: Tensor, add: bool = True) -> Tensor:
        """From the gradient of A, through the softmax and the distance, to that of C."""
        groups = self.groups
        dA -= (self.A * dA).sum(1, keepdim=True)
        dlogits = dA.mul_(self.A)
        if add:
            groups.dtau -= (dlogits * self.logits).sum((1, 2)) / groups.tau[:, 0, 0]
        if groups.metric == "euclidean":
            dlogits = torch.where(self.distance == 0, 0.0, dlogits / self.distance)
        dlogits *= (1 if groups.metric == "euclidean" else 2) / groups.tau
        dC = torch.empty_like(self.C)
        for j in range(dC.shape[2]):
            pull = self._difference(j).mul_(dlogits)
            dC[:, :, j] = pull.sum(2)
            if add:
                groups.dV[:, j] -= pull.sum(1)
        return dC


def _pieces(grouping: Grouping, k: int) -> Iterator[slice]:
    step = max(1, TILE // (grouping.vectors * k))
    for first in range(0, grouping.count, step):
        yield slice(first, min(first + step, grouping.count))


def _counted(W: Tensor, grouping: Grouping) -> Tensor | None:
    return None if grouping.all_count else grouping.counted(W.device)
