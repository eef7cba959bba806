"""The loop in O(N) memory on any device: attention lives for one block of vectors, in both passes.

Within a block everything is `(features, vectors)`: `x` is `(d + 1, b)`, the vectors over a row of
ones, `E` is the softmax numerator `(k, b)` and `z` its sum `(b,)`.  A = E / z is never formed: the
division is folded into the thin factors that A is multiplied with.

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

from ..options import ClusterOptions
from ..vectors import compute_dtype
from .backend import Gradients, Reduce, State, Trace, progress_size
from .implicit import solve
from .reference import no_mass

BLOCK = 1 << 20  # attention entries in flight: smaller blocks are better for the cache, and worse for everything else
WIDE = 64  # from this k on, a block lies in memory as (b, k): faster reductions over k
SAFE = 80.0  # exp of logits up to this neither overflows nor vanishes, also when k of them are added
SORTED = 32  # from this k on, sorting the weights (d = 1) costs less than it saves


def fits(W: Tensor, d: int) -> bool:
    """Always: this is plain PyTorch."""
    return True


def can_advance(W: Tensor, C: Tensor) -> bool:
    """Never: a state costs several operations here, which `Clustered` writes down readably."""
    return False


def advance(W: Tensor, state: State, options: ClusterOptions) -> tuple[Tensor, Tensor, Trace]:
    raise NotImplementedError("the blocked backend has no advance: ask can_advance first")


class _Vectors:
    """Flat `(N,)` tensors as columns `(d, n)`, read in blocks of `(d, b)`: upcast, and sorted where that pays."""

    def __init__(self, W: Tensor, k: int, d: int, dtype: torch.dtype):
        self.d, self.dtype, self.n = d, dtype, -(-W.numel() // d)
        self.buffers: dict[str, Tensor] = {}  # fresh memory for every block would cost as much as filling it
        self.order = _local_order(W) if d == 1 and k >= SORTED else None
        if self.order is None:
            self.b = max(1, BLOCK // k)
        else:
            # Few centroids a block: less to compute, and differences within it keep their precision.
            self.b = max(128, min(2 * BLOCK // k, 16 * self.n // k))

    def __iter__(self) -> Iterator[slice]:
        for first in range(0, self.n, self.b):
            yield slice(first, min(first + self.b, self.n))

    def scratch(self, name: str, k: int, b: int, like: Tensor) -> Tensor:
        """An uninitialised `(k, b)` buffer in the memory order that is faster for this k; the same one every time."""
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < k * b:
            buffer = self.buffers[name] = like.new_empty(k * b)
        return buffer[: k * b].view(b, k).t() if k >= WIDE and self.d > 1 else buffer[: k * b].view(k, b)

    def columns(self, flat: Tensor) -> Tensor:
        """`(N,) -> (d, n)`, contiguous, zero-padded at the tail: turned around once, not in every iteration."""
        if self.d == 1:
            return flat[None]
        columns = flat.new_zeros(self.d, self.n)
        whole = flat.numel() // self.d
        columns[:, :whole] = flat[: whole * self.d].view(whole, self.d).t()
        if whole < self.n:
            columns[: flat.numel() - whole * self.d, whole] = flat[whole * self.d :]
        return columns

    def flat(self, columns: Tensor, N: int) -> Tensor:
        """The inverse of `columns`."""
        return columns[0] if self.d == 1 else columns.t().reshape(-1)[:N]

    def read(self, columns: Tensor, block: slice) -> Tensor:
        if self.order is not None:
            return columns[:, self.order[block].long()].to(self.dtype)
        return columns[:, block].to(self.dtype)

    def read_once(self, flat: Tensor, block: slice) -> Tensor:
        """As `read`, of what is not worth turning around as a whole: that would take as much memory again."""
        if self.d == 1:
            return self.read(flat[None], block)
        values = flat[block.start * self.d : block.stop * self.d]
        if missing := (block.stop - block.start) * self.d - values.numel():
            values = torch.cat([values, values.new_zeros(missing)])
        return values.view(-1, self.d).t().to(self.dtype)

    def add(self, columns: Tensor, block: slice, values: Tensor) -> None:
        if self.order is not None:
            columns[:, self.order[block].long()] += values.to(columns.dtype)
        else:
            columns[:, block] += values


def _local_order(W: Tensor) -> Tensor:
    """`(N,)` int32: sorts W within pieces.  One order of all weights would be no better, and take int64."""
    order = torch.empty(W.shape, dtype=torch.int32, device=W.device)
    for first in range(0, W.numel(), 1 << 20):
        piece = W[first : first + (1 << 20)]
        if W.device.type == "cpu" and W.dtype in (torch.float32, torch.float64):
            index = torch.from_numpy(piece.detach().numpy().argsort())  # vectorised, unlike torch's
        else:
            index = piece.argsort()
        order[first : first + (1 << 20)] = index.add_(first)
    return order


class _Attention:
    """The attention of one block of vectors after another to the centroids `C` `(k, d)`."""

    def __init__(self, C: Tensor, tau: float, metric: str, vectors: _Vectors):
        self.tau, self.metric, self.vectors = tau, metric, vectors
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
        """`(d, b)` vectors."""
        d = len(w)
        near, D, C, center = slice(0, len(self.C)), None, self.C, None
        x = w.new_ones(d + 1, w.shape[1])
        if d > 1 or len(C) >= SORTED:
            if d == 1:
                near = self.reach(w[0])
            # All that follows depends on differences only.  Around the block's own mean they do not cancel.
            center = w.mean(1, keepdim=True)
            C = C[near] - center.t()
            torch.sub(w, center, out=x[:d])
        else:
            x[:d] = w
        w, E = x[:d], self.vectors.scratch("E", len(C), x.shape[1], x)
        if self.metric == "euclidean":
            # by differences: the matrix-product form loses small distances, and 1/D needs them
            D = torch.cdist(C, w.t(), compute_mode="donot_use_mm_for_euclid_dist")
            torch.div(D, -self.tau, out=E)
        elif d == 1:
            torch.sub(w, C, out=E)
            torch.addcmul(E.new_zeros(()), E, E, value=-1 / self.tau, out=E)
        else:
            # |w|^2 cancels in the softmax: -|w - c|^2 / tau  ->  (2 w.c - |c|^2) / tau
            torch.mm(torch.cat([2 * C, -C.square().sum(1, keepdim=True)], 1).div_(self.tau), x, out=E)
            if self.warm(w, C, E):
                return _Block(near, center, x, C, E.exp_(), D)
        # Clamped first: where exp underflows it takes 50 times as long, and so do products with the result.
        E.sub_(E.amax(0)).clamp_(min=self.cutoff).exp_()
        return _Block(near, center, x, C, torch.threshold_(E, self.floor, 0.0), D)

    def warm(self, w: Tensor, C: Tensor, E: Tensor) -> bool:
        """Whether exp needs no guards: by a bound that costs little or, where that is not enough, by looking."""
        longest, largest = (float(X.square().sum(dim).amax().sqrt()) for X, dim in ((w, 0), (C, 1)))
        if (2 * longest + largest) * largest < SAFE * self.tau:
            return True
        return max(map(abs, torch.stack((E if E.is_contiguous() else E.t()).aminmax()).tolist())) < SAFE

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
    """A block of b vectors and the k' centroids within its reach, both relative to `center`.

    E lies in a buffer that the next block takes over.
    """

    near: slice  # which centroids
    center: Tensor | None  # (d, 1); None for the origin
    x: Tensor  # (d + 1, b): the vectors and a row of ones
    C: Tensor  # (k', d)
    E: Tensor  # (k', b) the softmax numerator
    D: Tensor | None  # (k', b) the plain distance, where that is the metric


def forward(
    W: Tensor, C: Tensor, tau: Tensor, options: ClusterOptions, reduce: Reduce | None = None
) -> tuple[Tensor, Trace]:
    """W_tilde `(N,)` and the trace; see `backend.Backend`."""
    dtype, max_iter = compute_dtype(W.dtype), options.max_iter
    C, temperature = C.to(dtype), float(tau)
    vectors = _Vectors(W, *C.shape, dtype)
    trail = C.new_zeros(max_iter + 1, C.shape[0], C.shape[1] + 1)
    trail[0, :, :-1] = C
    columns = vectors.columns(W)
    W_tilde = torch.zeros_like(columns)
    for iteration in range(1, max_iter + 1):
        last = iteration == max_iter
        attention = _Attention(C, temperature, options.metric, vectors)
        sums = _sums(columns, vectors, attention, W_tilde if last else None)
        if reduce is not None:
            sums = reduce(sums)
        mass = sums[:, -1:]
        C_next = torch.where(mass <= no_mass(dtype), C, sums[:, :-1] / mass)
        trail[iteration] = torch.cat([C_next, mass], dim=1)
        if last:
            break
        if bool((C_next - C).abs().amax() <= options.eps):
            # only now is it known that this iteration was the last one, which makes W_tilde
            _sums(columns, vectors, attention, W_tilde)
            break
        C = C_next
    trail[-1] = trail[iteration]
    del columns
    progress = trail.new_zeros(progress_size(max_iter))  # no notes: zeros, because an output must be defined
    trace = Trace(torch.tensor(iteration, device=W.device), trail, progress)
    return vectors.flat(W_tilde, W.numel()), trace


def _sums(W: Tensor, vectors: _Vectors, attention: _Attention, W_tilde: Tensor | None) -> Tensor:
    """A^T [W, 1], `(k, d + 1)`; also adds A C to `W_tilde` where one is given."""
    d = vectors.d
    total = attention.C.new_zeros(len(attention.C), d + 1)
    for at in vectors:
        block = attention(vectors.read(W, at))
        share = block.E.sum(0).reciprocal_()
        sums = block.E @ (block.x * share).t()
        averages = (block.C.t() @ block.E).mul_(share) if W_tilde is not None else None
        if block.center is not None:
            sums[:, :d] += sums[:, d:] * block.center.t()
            if averages is not None:
                averages += block.center
        total[block.near] += sums
        if W_tilde is not None:
            vectors.add(W_tilde, at, averages)
    return attention.unsorted(total)


def backward(
    G: Tensor,
    W: Tensor,
    tau: Tensor,
    trace: Trace,
    options: ClusterOptions,
    *,
    reduce: Reduce | None = None,
    centroids: bool = True,
) -> Gradients:
    """From the gradient of W_tilde to those of W and, where asked for, of the centroids; see `backend.Backend`."""
    trail, r, gradient = trace.trail, int(trace.iterations), options.gradient
    k, d, dtype, temperature = trail.shape[1], trail.shape[2] - 1, trail.dtype, float(tau)
    vectors = _Vectors(W, k, d, dtype)
    columns = vectors.columns(W)
    # Several iterations add up in dW: in 16 bit the sum would lose what the arithmetic kept.
    dW = torch.zeros_like(columns, dtype=dtype)

    def add_up(dC: Tensor | None) -> Tensor | None:
        return dC if reduce is None or dC is None else reduce(dC)

    def through_update(dC: Tensor, t: int, dW: Tensor | None, wanted: bool = True) -> Tensor | None:
        """Through iteration t: from the gradient of the centroids that it made to the gradient, where wanted, of
        those that it started from."""
        C, C_next, mass = trail[t, :, :d], trail[t + 1, :, :d], trail[t + 1, :, d:]
        H = torch.where(mass <= no_mass(dtype), 0.0, dC / mass)
        attention = _Attention(C, temperature, options.metric, vectors)
        return add_up(_through_update(H, C_next, columns, dW, vectors, attention, wanted))

    last = _Attention(trail[r - 1, :, :d], temperature, options.metric, vectors)
    further = gradient == "implicit" or (gradient == "unrolled" and r > 1)
    dC = add_up(_through_output(G, columns, dW, vectors, last, centroids or further))
    if gradient == "unrolled":
        for t in range(r - 2, -1, -1):
            assert dC is not None
            stayed = torch.where(trail[t + 1, :, d:] <= no_mass(dtype), dC, 0.0)
            dC = through_update(dC, t, dW, centroids or t > 0)
            dC = None if dC is None else stayed + dC
    elif gradient == "implicit":
        dC = solve(dC, lambda u: through_update(u, r - 1, None))
        through_update(dC, r - 1, dW, False)
    return Gradients(vectors.flat(dW.to(W.dtype), W.numel()), dC if centroids else None)


def _through_output(
    G: Tensor, W: Tensor, dW: Tensor, vectors: _Vectors, attention: _Attention, wanted: bool
) -> Tensor | None:
    """W_tilde = A C: adds to dW, returns the gradient of C where it is wanted."""
    d = vectors.d
    dC = torch.zeros_like(attention.C)
    for at in vectors:
        block, g = attention(vectors.read(W, at)), vectors.read_once(G, at)
        R = torch.cat([block.C, torch.ones_like(block.C[:, :1])], dim=1)  # (k', d + 1)
        averages = R.t() @ block.E  # rows: C^T E, z
        share = averages[d:].reciprocal()
        L = g.new_empty(d + 1, g.shape[1])
        torch.mul(g, share, out=L[:d])
        L[d] = -(L[:d] * averages[:d]).sum(0) * share[0]
        pull, dw = _through_distance(block, R, L, attention.slope, vectors, wanted)
        if pull is not None:
            dC[block.near] += pull.addmm_(block.E, L[:d].t())
        vectors.add(dW, at, dw)
    return attention.unsorted(dC) if wanted else None


def _through_update(
    H: Tensor, C_next: Tensor, W: Tensor, dW: Tensor | None, vectors: _Vectors, attention: _Attention, wanted: bool
) -> Tensor | None:
    """C' = (A^T W) / mass, with H = dC' / mass: adds to dW where one is given, returns the gradient of C where it is
    wanted."""
    d = vectors.d
    dC = torch.zeros_like(attention.C)
    H, C_next = attention.sorted(H), attention.sorted(C_next)
    for at in vectors:
        block = attention(vectors.read(W, at))
        h = H[block.near]
        target = C_next[block.near] if block.center is None else C_next[block.near] - block.center.t()
        offset = (h * target).sum(1, keepdim=True)
        one = torch.ones_like(offset)
        averages = torch.cat([h, offset, one], dim=1).t() @ block.E  # rows: H^T E, (H . C') E, z
        share = averages[d + 1 :].reciprocal()
        AH = averages[: d + 1].mul_(share)
        s = (block.x[:d] * AH[:d]).sum(0).sub_(AH[d])
        L = s.new_empty(d + 2, len(s))
        torch.mul(block.x, share, out=L[: d + 1])
        torch.mul(s, L[d], out=L[d + 1])
        pull, dw = _through_distance(block, torch.cat([h, -offset, -one], dim=1), L, attention.slope, vectors, wanted)
        if pull is not None:
            dC[block.near] += pull
        if dW is not None:
            vectors.add(dW, at, dw.add_(AH[:d]))
    return attention.unsorted(dC) if wanted else None


def _through_distance(
    block: _Block, R: Tensor, L: Tensor, slope: float, vectors: _Vectors, wanted: bool
) -> tuple[Tensor | None, Tensor]:
    """dA - s = R L -> the gradients, through the softmax and the distance, of C `(k', d)`, where that is wanted, and of
    w `(d, b)`."""
    d = len(block.x) - 1
    e = torch.mm(R, L, out=vectors.scratch("e", *block.E.shape, L)).mul_(block.E)
    if block.D is not None:
        e.div_(block.D).masked_fill_(block.D == 0, 0)
    dw = block.C.t() @ e
    if block.D is not None:
        dw.addcmul_(e.sum(0), block.x[:d], value=-1)  # for the squared distance, e sums to zero
    if not wanted:
        return None, dw.mul_(slope)
    pulled = e @ block.x.t()
    return (pulled[:, :d] - pulled[:, d:] * block.C).mul_(slope), dw.mul_(slope)
