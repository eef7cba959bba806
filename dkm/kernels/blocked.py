"""The loop in O(N) memory on any device: attention lives for one block of vectors, in both passes.

Within a block everything is `(features, vectors)`: `w` is `(d, b)`, `E` is the softmax numerator
`(k, b)` and `z` its sum `(b,)`.  A = E / z is never formed: the division is folded into the thin
factors that A is multiplied with.

The backward pass walks the iterations from the last to the first.  Each of them is one of two
maps of A, and for both the gradient of A has low rank, `dA = R L`:

    W_tilde = A C           dA = C g                            and  dC += A g^T
    C' = (A^T W) / mass     dA = H w - H . C',  H = dC'/mass    and  dW += H^T A

Through the softmax, `dl = A * (dA - s)` with `s = sum_j A dA`; through the distance, with
`e = dl * slope`, `dW += C^T e - (1^T e) w` and `dC += e w^T - (e 1) C`.

For d = 1 the centroids are sorted, and with many of them the weights too: a block then holds
neighbours, and only the centroids within its reach are computed.

This file reads tau, the convergence test and the reach on the host, which stalls a GPU.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .reference import no_mass

BLOCK = 1 << 19  # attention entries in flight: two such buffers of float32 fill an L2 cache
WIDE = 32  # from this k on, a block lies in memory as (b, k): faster reductions over k
SORTED = 32  # from this k on, sorting the weights (d = 1) costs less than it saves


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic and the centroids: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class _Vectors:
    """Flat `(N,)` tensors as blocks of `(d, b)`: upcast, zero-padded at the tail, sorted where that pays."""

    def __init__(self, W: Tensor, k: int, d: int, dtype: torch.dtype):
        self.d, self.dtype, self.n = d, dtype, -(-W.numel() // d)
        self.order = _local_order(W) if d == 1 and k >= SORTED else None
        if self.order is None:
            self.b = max(1, BLOCK // k)
        else:
            # Few centroids a block: less to compute, and differences within it keep their precision.
            self.b = max(128, min(4 * BLOCK // k, 16 * self.n // k))

    def __iter__(self) -> Iterator[slice]:
        for first in range(0, self.n, self.b):
            yield slice(first, min(first + self.b, self.n))

    def read(self, flat: Tensor, block: slice) -> Tensor:
        """A copy, free to be written to."""
        if self.order is not None:
            return flat[self.order[block].long()].to(self.dtype)[None]
        values = flat[block.start * self.d : block.stop * self.d]
        missing = (block.stop - block.start) * self.d - values.numel()
        if missing:
            values = torch.cat([values, values.new_zeros(missing)])
        return values.view(-1, self.d).t().to(self.dtype, memory_format=torch.contiguous_format, copy=True)

    def add(self, flat: Tensor, block: slice, values: Tensor) -> None:
        if self.order is not None:
            flat[self.order[block].long()] += values[0].to(flat.dtype)
            return
        target = flat[block.start * self.d : block.stop * self.d]
        if target.numel() == values.numel():
            target.view(-1, self.d).add_(values.t())
        else:
            target.add_(values.t().reshape(-1)[: target.numel()])


def _local_order(W: Tensor) -> Tensor:
    """`(N,)` int32: sorts W within pieces.  One order of all weights would be no better, and take int64."""
    order = torch.empty(W.shape, dtype=torch.int32, device=W.device)
    for first in range(0, W.numel(), 1 << 22):
        piece = W[first : first + (1 << 22)]
        if W.device.type == "cpu" and W.dtype in (torch.float32, torch.float64):
            index = torch.from_numpy(piece.detach().numpy().argsort())  # vectorised, unlike torch's
        else:
            index = piece.argsort()
        order[first : first + (1 << 22)] = index.add_(first)
    return order


class _Attention:
    """The attention of one block of vectors after another to the centroids `C` `(k, d)`."""

    def __init__(self, C: Tensor, tau: float, metric: str):
        self.tau, self.metric = tau, metric
        self.slope = (2 if metric == "sqeuclidean" else 1) / tau
        # Attention below the floor is zero.
        self.floor = no_mass(C.dtype)
        self.cutoff = math.log(self.floor) - 1e-3
        self.rank = None
        if C.shape[1] == 1:
            C, self.rank = C.sort(dim=0)
            self.rank = self.rank[:, 0]
            self.levels = C[:, 0].contiguous()
            self.edges = (self.levels[1:] + self.levels[:-1]) / 2
        self.C = C

    def sorted(self, X: Tensor) -> Tensor:
        """Rows of X, one a centroid, from the caller's order to that of `self.C`."""
        return X if self.rank is None else X[self.rank]

    def unsorted(self, X: Tensor) -> Tensor:
        """The inverse of `sorted`."""
        return X if self.rank is None else torch.empty_like(X).index_copy_(0, self.rank, X)

    def __call__(self, w: Tensor) -> "_Block":
        """`(d, b)` vectors, which are shifted in place."""
        near, D = slice(0, len(self.C)), None
        if len(w) == 1 and len(self.C) >= SORTED:
            near = self.reach(w[0])
        # All that follows depends on differences only.  Around the block's own mean they do not cancel.
        center = w.mean(1, keepdim=True)
        w.sub_(center)
        C = self.C[near] - center.t()
        E = _scratch(C, w)
        if self.metric == "euclidean":
            # by differences: the matrix-product form loses small distances, and 1/D needs them
            D = torch.cdist(C, w.t(), compute_mode="donot_use_mm_for_euclid_dist")
            torch.div(D, -self.tau, out=E)
        elif len(w) == 1:
            torch.sub(w, C, out=E)
            torch.addcmul(E.new_zeros(()), E, E, value=-1 / self.tau, out=E)
        else:
            # |w|^2 cancels in the softmax: -|w - c|^2 / tau  ->  (2 w.c - |c|^2) / tau
            torch.addmm(-C.square().sum(1, keepdim=True) / self.tau, C, w, alpha=2 / self.tau, out=E)
        # Clamped first: where exp underflows it takes 50 times as long, and so do products with the result.
        E.sub_(E.amax(0)).clamp_(min=self.cutoff).exp_()
        return _Block(near, center, w, C, torch.threshold_(E, self.floor, 0.0), D)

    def reach(self, w: Tensor) -> slice:
        """The centroids whose logits exceed the cutoff for some of the weights `w` `(b,)`."""
        low, high = w.aminmax()
        far = float((w - self.levels[torch.bucketize(w, self.edges)]).abs().amax())
        if self.metric == "sqeuclidean":
            radius = math.sqrt(far * far - self.cutoff * self.tau)
        else:
            radius = far - self.cutoff * self.tau
        bounds = torch.stack([low - radius, high + radius])
        first, last = torch.searchsorted(self.levels, bounds).tolist()
        return slice(max(first - 1, 0), min(last + 1, len(self.C)))


class _Block(NamedTuple):
    """A block of b vectors and the k' centroids within its reach, both relative to `center`."""

    near: slice  # which centroids
    center: Tensor  # (d, 1)
    w: Tensor  # (d, b)
    C: Tensor  # (k', d)
    E: Tensor  # (k', b) the softmax numerator
    D: Tensor | None  # (k', b) the plain distance, where that is the metric


def _scratch(C: Tensor, w: Tensor) -> Tensor:
    """An uninitialised `(k', b)` buffer in the memory order that is faster for this k'."""
    k, b = len(C), w.shape[1]
    return w.new_empty(b, k).t() if k >= WIDE and len(w) > 1 else w.new_empty(k, b)


def forward(W: Tensor, C: Tensor, tau: Tensor, eps: float, max_iter: int, metric: str):
    """`(N,), (k, d) -> W_tilde (N,), iterations, trail`; see the package's docstring."""
    dtype = compute_dtype(W.dtype)
    C, tau = C.to(dtype), float(tau)
    vectors = _Vectors(W, *C.shape, dtype)
    trail = C.new_zeros(max_iter + 1, C.shape[0], C.shape[1] + 1)
    trail[0, :, :-1] = C
    W_tilde = torch.zeros_like(W)
    for iteration in range(1, max_iter + 1):
        last = iteration == max_iter
        attention = _Attention(C, tau, metric)
        sums = _sums(W, vectors, attention, W_tilde if last else None)
        mass = sums[:, -1:]
        C_next = torch.where(mass <= no_mass(dtype), C, sums[:, :-1] / mass)
        trail[iteration] = torch.cat([C_next, mass], dim=1)
        if last:
            break
        if bool((C_next - C).abs().amax() <= eps):
            _sums(W, vectors, attention, W_tilde)  # that this iteration was the last was not known before it
            break
        C = C_next
    return W_tilde, torch.tensor(iteration, device=W.device), trail


def _sums(W: Tensor, vectors: _Vectors, attention: _Attention, W_tilde: Tensor | None) -> Tensor:
    """A^T [W, 1], `(k, d + 1)`; also adds A C to `W_tilde` where one is given."""
    d = vectors.d
    total = attention.C.new_zeros(len(attention.C), d + 1)
    for at in vectors:
        block = attention(vectors.read(W, at))
        share = block.E.sum(0).reciprocal_()
        features = share.new_empty(d + 1, len(share))
        torch.mul(block.w, share, out=features[:d])
        features[d] = share
        sums = block.E @ features.t()
        sums[:, :d] += sums[:, d:] * block.center.t()
        total[block.near] += sums
        if W_tilde is not None:
            vectors.add(W_tilde, at, (block.C.t() @ block.E).mul_(share).add_(block.center))
    return attention.unsorted(total)


def backward(G: Tensor, W: Tensor, trail: Tensor, iterations: Tensor, tau: Tensor, metric: str):
    """The gradient of W_tilde, `(N,)` -> the gradients of W, `(N,)`, and of the first centroids, `(k, d)`."""
    k, d, dtype, tau, r = trail.shape[1], trail.shape[2] - 1, trail.dtype, float(tau), int(iterations)
    vectors = _Vectors(W, k, d, dtype)
    # Several iterations add up in dW: in 16 bit the sum would lose what the arithmetic kept.
    dW = torch.zeros_like(W, dtype=dtype)
    dC = _through_output(G, W, dW, vectors, _Attention(trail[r - 1, :, :d], tau, metric))
    for t in range(r - 2, -1, -1):
        C, C_next, mass = trail[t, :, :d], trail[t + 1, :, :d], trail[t + 1, :, d:]
        empty = mass <= no_mass(dtype)
        H = torch.where(empty, 0.0, dC / mass)
        stayed = torch.where(empty, dC, 0.0)
        dC = stayed + _through_update(H, C_next, W, dW, vectors, _Attention(C, tau, metric))
    return dW.to(W.dtype), dC


def _through_output(G: Tensor, W: Tensor, dW: Tensor, vectors: _Vectors, attention: _Attention) -> Tensor:
    """W_tilde = A C: adds to dW, returns the gradient of C."""
    d = vectors.d
    dC = torch.zeros_like(attention.C)
    for at in vectors:
        block, g = attention(vectors.read(W, at)), vectors.read(G, at)
        R = torch.cat([block.C, torch.ones_like(block.C[:, :1])], dim=1)  # (k', d + 1)
        averages = R.t() @ block.E  # rows: C^T E, z
        share = averages[d:].reciprocal()
        L = g.new_empty(d + 1, g.shape[1])
        torch.mul(g, share, out=L[:d])
        L[d] = -(L[:d] * averages[:d]).sum(0) * share[0]
        pull, dw = _through_distance(block, R, L, attention.slope)
        dC[block.near] += pull.addmm_(block.E, L[:d].t())
        vectors.add(dW, at, dw)
    return attention.unsorted(dC)


def _through_update(H: Tensor, C_next: Tensor, W: Tensor, dW: Tensor, vectors: _Vectors, attention: _Attention):
    """C' = (A^T W) / mass, with H = dC' / mass: adds to dW, returns the gradient of C."""
    d = vectors.d
    dC = torch.zeros_like(attention.C)
    H, C_next = attention.sorted(H), attention.sorted(C_next)
    for at in vectors:
        block = attention(vectors.read(W, at))
        h = H[block.near]
        offset = (h * (C_next[block.near] - block.center.t())).sum(1, keepdim=True)
        R = torch.cat([h, offset, torch.ones_like(offset)], dim=1)  # (k', d + 2)
        averages = R.t() @ block.E  # rows: H^T E, (H . C') E, z
        share = averages[d + 1 :].reciprocal()
        AH = averages[: d + 1].mul_(share)
        s = (block.w * AH[:d]).sum(0).sub_(AH[d])
        L = s.new_empty(d + 2, len(s))
        torch.mul(block.w, share, out=L[:d])
        torch.neg(share[0], out=L[d])
        torch.mul(s, L[d], out=L[d + 1])
        pull, dw = _through_distance(block, R, L, attention.slope)
        dC[block.near] += pull
        vectors.add(dW, at, dw.add_(AH[:d]))
    return attention.unsorted(dC)


def _through_distance(block: _Block, R: Tensor, L: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """dA - s = R L -> the gradients, through the softmax and the distance, of C `(k', d)` and of w `(d, b)`."""
    d = len(block.w)
    e = torch.mm(R, L, out=_scratch(block.C, block.w)).mul_(block.E)
    if block.D is not None:
        e.div_(block.D).masked_fill_(block.D == 0, 0)
    ones = block.w.new_empty(d + 1, block.w.shape[1])
    ones[:d], ones[d] = block.w, 1.0
    pulled = e @ ones.t()
    dw = block.C.t() @ e
    if block.D is not None:
        dw.addcmul_(e.sum(0), block.w, value=-1)  # for the squared distance, e sums to zero
    return (pulled[:, :d] - pulled[:, d:] * block.C).mul_(slope), dw.mul_(slope)
