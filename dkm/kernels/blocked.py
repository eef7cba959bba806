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
neighbours, and only the centroids within its reach (see `_Attention.reach`) are computed.

This file reads tau, the convergence test and the reach on the host, which stalls a GPU.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .reference import no_mass

BLOCK = 1 << 19  # attention entries in flight: two such buffers of float32 fill an L2 cache
WIDE = 32  # from this k on, a block lies in memory as (b, k): faster reductions over k
SORTED = 64  # from this k on, sorting the weights (d = 1) costs less than it saves


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic and the centroids: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class _Vectors:
    """Flat `(N,)` tensors as blocks of `(d, b)`: upcast, zero-padded at the tail, sorted where that pays."""

    def __init__(self, W: Tensor, k: int, d: int, dtype: torch.dtype):
        self.d, self.dtype, self.n = d, dtype, -(-W.numel() // d)
        self.order = _local_order(W) if d == 1 and k >= SORTED else None
        self.b = max(1, min(self.n, (BLOCK if self.order is None else 4 * BLOCK) // k))

    def __iter__(self) -> Iterator[slice]:
        for first in range(0, self.n, self.b):
            yield slice(first, min(first + self.b, self.n))

    def read(self, flat: Tensor, block: slice) -> Tensor:
        if self.order is not None:
            return flat[self.order[block].long()].to(self.dtype)[None]
        values = flat[block.start * self.d : block.stop * self.d]
        missing = (block.stop - block.start) * self.d - values.numel()
        if missing:
            values = torch.cat([values, values.new_zeros(missing)])
        return values.view(-1, self.d).t().to(self.dtype, memory_format=torch.contiguous_format)

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
    """E and z of one block after another, for the centroids `C` `(k, d)`."""

    def __init__(self, C: Tensor, tau: float, metric: str):
        self.tau, self.metric = tau, metric
        # Attention below the floor is zero.
        self.floor = no_mass(C.dtype)
        self.cutoff = math.log(self.floor) - 1e-3
        self.rank = None
        if C.shape[1] == 1:
            C, self.rank = C.sort(dim=0)
            self.rank = self.rank[:, 0]
            self.levels = C[:, 0].contiguous()
            self.edges = (self.levels[1:] + self.levels[:-1]) / 2
        elif metric == "sqeuclidean":
            # |w|^2 cancels in the softmax: -|w - c|^2 / tau  ->  (2 w.c - |c|^2) / tau
            self.slopes = C * (2 / tau)
            self.offsets = -C.square().sum(1, keepdim=True) / tau
        self.C = C

    def sorted(self, X: Tensor) -> Tensor:
        """Rows of X, one a centroid, from the caller's order to that of `self.C`."""
        return X if self.rank is None else X[self.rank]

    def unsorted(self, X: Tensor) -> Tensor:
        """The inverse of `sorted`."""
        return X if self.rank is None else torch.empty_like(X).index_copy_(0, self.rank, X)

    def reach(self, w: Tensor, nearest: Tensor) -> slice:
        """The centroids whose logits exceed the cutoff for some of the weights `w` `(b,)`."""
        low, high = w.aminmax()
        far = float(nearest.abs().amax())
        if self.metric == "sqeuclidean":
            radius = math.sqrt(far * far - self.cutoff * self.tau)
        else:
            radius = far - self.cutoff * self.tau
        bounds = torch.stack([low - radius, high + radius])
        first, last = torch.searchsorted(self.levels, bounds).tolist()
        return slice(max(first - 1, 0), min(last + 1, len(self.C)))

    def __call__(self, w: Tensor) -> tuple[slice, Tensor, Tensor | None]:
        """`(d, b)` -> which centroids, E `(k', b)` and, for the plain distance, D `(k', b)`."""
        D, near = None, slice(0, len(self.C))
        if len(w) == 1:
            # Differences, not products: exact where the softmax is sensitive.
            if len(self.C) >= SORTED:
                nearest = w[0] - self.levels[torch.bucketize(w[0], self.edges)]
                near = self.reach(w[0], nearest)
            E = torch.sub(w, self.C[near], out=self.scratch(near, w))
            if self.metric == "sqeuclidean":
                torch.addcmul(E.new_zeros(()), E, E, value=-1 / self.tau, out=E)
            else:
                D = E.abs()
                torch.div(D, -self.tau, out=E)
        else:
            E = self.scratch(near, w)
            if self.metric == "sqeuclidean":
                torch.addmm(self.offsets, self.slopes, w, out=E)
            else:
                # by differences: the matrix-product form loses small distances, and 1/D needs them
                D = torch.cdist(self.C, w.t(), compute_mode="donot_use_mm_for_euclid_dist")
                torch.div(D, -self.tau, out=E)
        # Clamped first: where exp underflows it takes 50 times as long, and so do products with the result.
        E.sub_(E.amax(0)).clamp_(min=self.cutoff).exp_()
        return near, torch.threshold_(E, self.floor, 0.0), D

    @staticmethod
    def scratch(near: slice, w: Tensor) -> Tensor:
        """An uninitialised `(k', b)` buffer in the memory order that is faster for this k'."""
        k = near.stop - near.start
        return w.new_empty(w.shape[1], k).t() if k >= WIDE and len(w) > 1 else w.new_empty(k, w.shape[1])


def forward(W: Tensor, C: Tensor, tau: Tensor, eps: float, max_iter: int, metric: str):
    """`(N,), (k, d) -> W_tilde (N,), C_next, iterations, trail`; see the package's docstring."""
    dtype = compute_dtype(W.dtype)
    C, tau = C.to(dtype), float(tau)
    vectors = _Vectors(W, *C.shape, dtype)
    trail = C.new_zeros(max_iter, C.shape[0], C.shape[1] + 1)
    W_tilde = torch.zeros_like(W)
    for iteration in range(1, max_iter + 1):
        last = iteration == max_iter
        attention = _Attention(C, tau, metric)
        sums = _sums(W, vectors, attention, W_tilde if last else None)
        mass = sums[:, -1:]
        C_next = torch.where(mass <= no_mass(dtype), C, sums[:, :-1] / mass)
        trail[iteration - 1] = torch.cat([C, mass], dim=1)
        if last:
            break
        if bool((C_next - C).abs().amax() <= eps):
            _sums(W, vectors, attention, W_tilde)  # that this iteration was the last was not known before it
            break
        C = C_next
    return W_tilde, C_next, torch.tensor(iteration, device=W.device), trail


def _sums(W: Tensor, vectors: _Vectors, attention: _Attention, W_tilde: Tensor | None) -> Tensor:
    """A^T [W, 1], `(k, d + 1)`; also adds A C to `W_tilde` where one is given."""
    C, d = attention.C, vectors.d
    total = C.new_zeros(len(C), d + 1)
    for block in vectors:
        w = vectors.read(W, block)
        near, E, _ = attention(w)
        share = E.sum(0).reciprocal_()
        features = w.new_empty(d + 1, w.shape[1])
        torch.mul(w, share, out=features[:d])
        features[d] = share
        total[near].addmm_(E, features.t())
        if W_tilde is not None:
            vectors.add(W_tilde, block, (C[near].t() @ E).mul_(share))
    return attention.unsorted(total)


def backward(G: Tensor, W: Tensor, trail: Tensor, iterations: Tensor, tau: Tensor, metric: str):
    """The gradient of W_tilde, `(N,)` -> the gradients of W, `(N,)`, and of the first centroids, `(k, d)`."""
    k, d, dtype, tau, r = trail.shape[1], trail.shape[2] - 1, trail.dtype, float(tau), int(iterations)
    vectors = _Vectors(W, k, d, dtype)
    # Several iterations add up in dW: in 16 bit the sum would lose what the arithmetic kept.
    dW = torch.zeros_like(W, dtype=dtype)
    dC = _through_output(G, W, dW, vectors, _Attention(trail[r - 1, :, :d], tau, metric))
    for t in range(r - 2, -1, -1):
        C, mass, C_next = trail[t, :, :d], trail[t, :, d:], trail[t + 1, :, :d]
        empty = mass <= no_mass(dtype)
        H = torch.where(empty, 0.0, dC / mass)
        stayed = torch.where(empty, dC, 0.0)
        dC = stayed + _through_update(H, C_next, W, dW, vectors, _Attention(C, tau, metric))
    return dW.to(W.dtype), dC


def _through_output(G: Tensor, W: Tensor, dW: Tensor, vectors: _Vectors, attention: _Attention) -> Tensor:
    """W_tilde = A C: adds to dW, returns the gradient of C."""
    C, d = attention.C, vectors.d
    R = torch.cat([C, torch.ones_like(C[:, :1])], dim=1)  # (k, d + 1)
    direct, pulled = torch.zeros_like(C), torch.zeros_like(R)
    for block in vectors:
        w, g = vectors.read(W, block), vectors.read(G, block)
        near, E, D = attention(w)
        averages = R[near].t() @ E  # rows: C^T E, z
        share = averages[d:].reciprocal()
        L = w.new_empty(d + 1, w.shape[1])
        torch.mul(g, share, out=L[:d])
        L[d] = -(L[:d] * averages[:d]).sum(0) * share[0]
        direct[near].addmm_(E, L[:d].t())
        _through_distance(R, L, w, near, E, D, attention, pulled, vectors, block, dW, None)
    return attention.unsorted(direct + _pull(pulled, attention))


def _through_update(H: Tensor, C_next: Tensor, W: Tensor, dW: Tensor, vectors: _Vectors, attention: _Attention):
    """C' = (A^T W) / mass, with H = dC' / mass: adds to dW, returns the gradient of C."""
    C, d = attention.C, vectors.d
    H, C_next = attention.sorted(H), attention.sorted(C_next)
    R = torch.cat([H, (H * C_next).sum(1, keepdim=True), torch.ones_like(H[:, :1])], dim=1)  # (k, d + 2)
    pulled = C.new_zeros(len(C), d + 1)
    for block in vectors:
        w = vectors.read(W, block)
        near, E, D = attention(w)
        averages = R[near].t() @ E  # rows: H^T E, (H . C') E, z
        share = averages[d + 1 :].reciprocal()
        AH = averages[: d + 1].mul_(share)
        s = (w * AH[:d]).sum(0).sub_(AH[d])
        L = w.new_empty(d + 2, w.shape[1])
        torch.mul(w, share, out=L[:d])
        torch.neg(share[0], out=L[d])
        torch.mul(s, L[d], out=L[d + 1])
        _through_distance(R, L, w, near, E, D, attention, pulled, vectors, block, dW, AH[:d])
    return attention.unsorted(_pull(pulled, attention))


def _through_distance(R, L, w, near, E, D, attention, pulled, vectors, block, dW, dw) -> None:
    """dA - s = R L: through the softmax and the distance, into dW (with `dw`, where given) and `pulled`."""
    d = len(w)
    e = torch.mm(R[near], L, out=attention.scratch(near, w)).mul_(E)
    if D is not None:
        e.div_(D).masked_fill_(D == 0, 0)
    ones = w.new_empty(d + 1, w.shape[1])
    ones[:d], ones[d] = w, 1.0
    pulled[near].addmm_(e, ones.t())
    pull = attention.C[near].t() @ e
    if D is not None:
        pull.addcmul_(e.sum(0), w, value=-1)
    slope = _slope(attention)
    pull = pull.mul_(slope) if dw is None else torch.add(dw, pull, alpha=slope)
    vectors.add(dW, block, pull)


def _pull(pulled: Tensor, attention: _Attention) -> Tensor:
    """`e [w, 1]^T` summed over all vectors -> the gradient that C receives through the distance."""
    return _slope(attention) * (pulled[:, :-1] - pulled[:, -1:] * attention.C)


def _slope(attention: _Attention) -> float:
    return (2 if attention.metric == "sqeuclidean" else 1) / attention.tau
