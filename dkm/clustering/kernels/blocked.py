"""The loop in plain PyTorch, in memory proportional to the weight, on any device.

The attention of one block of vectors exists at a time, in both passes.  Within a block everything is
`(features, vectors)`:

    x             (d + 1, b)   the vectors, and below them a row of ones
    numerators    (k, b)       the numerators of the softmax
    denominator   (b,)         their sums

The attention A = numerators / denominator is never formed.  The division is done in the thin matrices that A is
multiplied with; `share` is 1 / denominator.

The backward pass walks the iterations from the last to the first.  The last one makes W_tilde from A, the others make
new centroids from A.  In both cases the gradient of A is a product of two thin matrices, `dA = left @ right`:

    W_tilde = A C           dA = C g                            and  dC += A g^T
    C' = (A^T W) / mass     dA = H w - H . C',  H = dC' / mass  and  dW += H^T A

The gradient of the logits is `A * (dA - mean)`, where `mean` is the sum of A dA over the centroids.  With
`dlogits = A * (dA - mean) * slope`, the gradients through the distance are `dW += C^T dlogits - (1^T dlogits) w` and
`dC += dlogits w^T - (dlogits 1) C`.  The gradient of tau is the sum of `A * (dA - mean) * -logit / tau`; the logits are
taken relative to the largest, because nothing changes, but for rounding, if a vector's logits are all shifted.

For d = 1 the centroids are sorted, and with many centroids the weights are sorted, too.  A block then holds neighbours,
and only the centroids within its reach are computed.

This file reads tau, the convergence test and the reach on the host, which stalls a GPU.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..options import ClusterOptions
from ..vectors import compute_dtype
from .backend import Gradients, Reduce, Trace, progress_size
from .blocked_groups import backward_groups as backward_groups  # a part of this backend
from .blocked_groups import fits_groups as fits_groups
from .blocked_groups import forward_groups as forward_groups
from .implicit import solve
from .reference import no_mass

BLOCK = 1 << 20  # entries of the attention of a block: smaller blocks suit the cache, larger ones everything else
WIDE = 64  # from this many centroids on, a block lies in memory as (b, k), where sums over centroids are faster
SAFE = 80.0  # exp of logits up to this size neither overflows nor underflows, even if k of them are added
SORTED = 32  # from this many centroids on, sorting the weights (d = 1) costs less than it saves


def fits(W: Tensor, d: int) -> bool:
    """Always true: this is plain PyTorch."""
    return True


class _Vectors:
    """Flat `(N,)` tensors as columns `(d, n)`, read in blocks of b columns: in `dtype`, and sorted where that pays."""

    def __init__(self, W: Tensor, k: int, d: int, dtype: torch.dtype):
        self.d, self.dtype, self.n = d, dtype, -(-W.numel() // d)
        self.buffers: dict[str, Tensor] = {}  # reused: new memory for every block would cost as much as filling it
        self.order = _local_order(W) if d == 1 and k >= SORTED else None
        if self.order is None:
            self.b = max(1, BLOCK // k)
        else:
            # Short blocks reach few centroids: there is less to compute, and differences keep their precision.
            self.b = max(128, min(2 * BLOCK // k, 16 * self.n // k))

    def __iter__(self) -> Iterator[slice]:
        for first in range(0, self.n, self.b):
            yield slice(first, min(first + self.b, self.n))

    def scratch(self, name: str, shape: tuple[int, int], like: Tensor) -> Tensor:
        """An uninitialised `(k, b)` buffer, in the memory order that is faster for this k.

        The same name always gets the same memory.
        """
        k, b = shape
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < k * b:
            buffer = self.buffers[name] = like.new_empty(k * b)
        return buffer[: k * b].view(b, k).t() if k >= WIDE and self.d > 1 else buffer[: k * b].view(k, b)

    def columns(self, flat: Tensor) -> Tensor:
        """`(N,) -> (d, n)`, contiguous, with zeros after the last value: transposed once and not in every iteration."""
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
        """`(d, b)`: a block of columns."""
        if self.order is not None:
            return columns[:, self.order[block].long()].to(self.dtype)
        return columns[:, block].to(self.dtype)

    def read_once(self, flat: Tensor, block: slice) -> Tensor:
        """`read` of a flat tensor that is needed only once: transposing all of it would take as much memory again."""
        if self.d == 1:
            return self.read(flat[None], block)
        values = flat[block.start * self.d : block.stop * self.d]
        if missing := (block.stop - block.start) * self.d - values.numel():
            values = torch.cat([values, values.new_zeros(missing)])
        return values.view(-1, self.d).t().to(self.dtype)

    def add(self, columns: Tensor, block: slice, values: Tensor) -> None:
        """Add `(d, b)` values to a block of columns."""
        if self.order is not None:
            columns[:, self.order[block].long()] += values.to(columns.dtype)
        else:
            columns[:, block] += values


def _local_order(W: Tensor) -> Tensor:
    """`(N,)` int32: the order that sorts W within pieces of 2^20 weights.  Sorting all of W would be no better."""
    order = torch.empty(W.shape, dtype=torch.int32, device=W.device)
    for first in range(0, W.numel(), 1 << 20):
        piece = W[first : first + (1 << 20)]
        if W.device.type == "cpu" and W.dtype in (torch.float32, torch.float64):
            index = torch.from_numpy(piece.detach().numpy().argsort())  # numpy sorts with vector instructions
        else:
            index = piece.argsort()
        order[first : first + (1 << 20)] = index.add_(first)
    return order


class _Attention:
    """The attention of one block of vectors after another to the centroids `C` `(k, d)`."""

    def __init__(self, C: Tensor, tau: float, metric: str, vectors: _Vectors, keep_logits: bool = False):
        self.tau, self.metric, self.vectors, self.keep_logits = tau, metric, vectors, keep_logits
        self.slope = (2 if metric == "sqeuclidean" else 1) / tau
        # attention below the floor counts as zero
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
        """From the caller's order of the centroids, along the rows of X, to that of `self.C`."""
        return X if self.rank is None else X[self.rank]

    def unsorted(self, X: Tensor) -> Tensor:
        """The inverse of `sorted`."""
        return X if self.rank is None else torch.empty_like(X).index_copy_(0, self.rank, X)

    def __call__(self, w: Tensor) -> "_Block":
        """The attention of a block of vectors `(d, b)`."""
        d = len(w)
        near, distance = slice(0, len(self.C)), None
        x = w.new_ones(d + 1, w.shape[1])
        if d == 1 and len(self.C) >= SORTED:
            near = self.reach(w[0])
        # All that follows depends on differences only, which are more precise relative to the mean of the block.
        center = w.mean(1, keepdim=True)
        if d > 1:  # only where the subtraction is exact: that is between numbers of one sign and similar size
            center.masked_fill_(2 * (w - center).abs().amax(1, keepdim=True) > center.abs(), 0)
        C = self.C[near] - center.t()
        torch.sub(w, center, out=x[:d])
        w, numerators = x[:d], self.vectors.scratch("numerators", (len(C), x.shape[1]), x)
        if self.metric == "euclidean":
            # not by matrix products, which lose small distances: the backward pass divides by them
            distance = torch.cdist(C, w.t(), compute_mode="donot_use_mm_for_euclid_dist")
            torch.div(distance, -self.tau, out=numerators)
        elif d == 1:
            torch.sub(w, C, out=numerators)
            torch.addcmul(numerators.new_zeros(()), numerators, numerators, value=-1 / self.tau, out=numerators)
        else:
            longest, largest = (float(X.square().sum(dim).amax().sqrt()) for X, dim in ((w, 0), (C, 1)))
            if (2 * longest + largest) * largest < SAFE * self.tau:
                # |w|^2 cancels in the softmax.  These logits are so small that their rounding does no harm.
                left = torch.cat([2 * C, -C.square().sum(1, keepdim=True)], 1).div_(self.tau)
                torch.mm(left, x, out=numerators)
                is_safe = True
            else:
                _squared_distances(w, C, max(longest, largest), -1 / self.tau, numerators)
                is_safe = float(numerators.amin()) > -SAFE
            if is_safe and not self.keep_logits:
                return _Block(near, center, x, C, numerators.exp_(), distance)
        # Clamped before exp, which takes 50 times as long where it underflows, as do products with such results.
        numerators.sub_(numerators.amax(0)).clamp_(min=self.cutoff)
        logits = None
        if self.keep_logits:
            logits = self.vectors.scratch("logits", (len(C), x.shape[1]), x).copy_(numerators)
        numerators = torch.threshold_(numerators.exp_(), self.floor, 0.0)
        return _Block(near, center, x, C, numerators, distance, logits)

    def reach(self, w: Tensor) -> slice:
        """The centroids whose logit, relative to the largest, exceeds the cutoff for some of the weights `w` `(b,)`."""
        low, high = w.aminmax()
        far = float((w - self.levels[torch.bucketize(w, self.edges)]).abs().amax())
        if self.metric == "sqeuclidean":
            radius = math.sqrt(far * far - self.cutoff * self.tau)
        else:
            radius = far - self.cutoff * self.tau
        bounds = torch.stack([low - radius, high + radius])
        first, last = torch.searchsorted(self.levels, bounds).tolist()
        return slice(max(first - 1, 0), min(last + 1, len(self.C)))


def _squared_distances(w: Tensor, C: Tensor, longest: float, scale: float, out: Tensor) -> None:
    """|w - c|^2 * scale into `out` `(k, b)`, up to a small constant per vector, for `(d, b)` and `(k, d)`.

    By products, |w|^2 - 2 w.c + |c|^2 would be a small difference of large numbers.  So each number is split into a
    whole multiple of a unit and a rest.  The unit is so large, relative to the `longest` vector, that the squares of
    the whole parts, and their sums in any order, are computed without rounding.  The products with a rest are small.
    """
    bits = round(-math.log2(torch.finfo(w.dtype).eps) - 1) // 2  # the sums reach (2 * 2^bits)^2 units
    unit = 2.0 ** (math.frexp(max(longest, 1e-30))[1] - bits)
    w, C = w / unit, C / unit
    w_whole, C_whole = w.round(), C.round()
    w_rest, C_rest = w - w_whole, C - C_whole
    one, ones = torch.ones_like(C[:, :1]), torch.ones_like(w[:1])
    left = torch.cat([-2 * C_whole, C_whole.square().sum(1, keepdim=True), one], dim=1)
    torch.mm(left, torch.cat([w_whole, ones, w_whole.square().sum(0, keepdim=True)]), out=out)
    # |c|^2 - |C_whole|^2 = C_rest . (c + C_whole)
    left = torch.cat([-2 * C, -2 * C_rest, (C_rest * (C + C_whole)).sum(1, keepdim=True)], dim=1)
    scale *= unit * unit
    out.addmm_(left, torch.cat([w_rest, w_whole, ones]), beta=scale, alpha=scale)


class _Block(NamedTuple):
    """A block of b vectors and the k' centroids within its reach, both relative to `center`."""

    near: slice  # which centroids
    center: Tensor  # (d, 1)
    x: Tensor  # (d + 1, b): the vectors and a row of ones
    C: Tensor  # (k', d)
    numerators: Tensor  # (k', b), of the softmax; in a buffer that the next block overwrites
    distance: Tensor | None  # (k', b): the plain distance, where that is the metric
    logits: Tensor | None = None  # (k', b), relative to the largest, where they are kept; in a buffer, too


def forward(
    W: Tensor, C: Tensor, tau: Tensor, options: ClusterOptions, reduce: Reduce | None = None
) -> tuple[Tensor, Trace]:
    """W_tilde `(N,)` and the trace; see `backend.Backend`."""
    dtype, max_iter = compute_dtype(W.dtype), options.max_iter
    C, temperature = C.to(dtype), float(tau)
    k, d = C.shape
    vectors = _Vectors(W, k, d, dtype)
    trail = C.new_zeros(max_iter + 1, k, d + 1)
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
            # that this iteration is the last one, which makes W_tilde, is known only after its sums
            _sums(columns, vectors, attention, W_tilde)
            break
        C = C_next
    trail[-1] = trail[iteration]
    del columns
    # This backward pass needs no notes.  Zeros, because outputs of an operator must be the same every time.
    progress = trail.new_zeros(progress_size(max_iter))
    trace = Trace(torch.tensor(iteration, device=W.device), trail, progress)
    return vectors.flat(W_tilde, W.numel()), trace


def _sums(W: Tensor, vectors: _Vectors, attention: _Attention, W_tilde: Tensor | None) -> Tensor:
    """A^T [W, 1], `(k, d + 1)`.  If `W_tilde` is given, A C is added to it."""
    d = vectors.d
    total = attention.C.new_zeros(len(attention.C), d + 1)
    for at in vectors:
        block = attention(vectors.read(W, at))
        share = block.numerators.sum(0).reciprocal_()
        sums = block.numerators @ (block.x * share).t()
        sums[:, :d] += sums[:, d:] * block.center.t()
        total[block.near] += sums
        if W_tilde is not None:
            averages = (block.C.t() @ block.numerators).mul_(share)
            averages += block.center
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
    temperature: bool = False,
) -> Gradients:
    """From the gradient of W_tilde to those of W and, where asked for, of the centroids and of tau; see
    `backend.Backend`."""
    trail, used, gradient = trace.trail, int(trace.iterations), options.gradient
    k, d, dtype = trail.shape[1], trail.shape[2] - 1, trail.dtype
    vectors = _Vectors(W, k, d, dtype)
    columns = vectors.columns(W)
    # Several iterations are added up in dW: a sum in 16 bit would lose precision.
    dW = torch.zeros_like(columns, dtype=dtype)
    into = _Totals(dW, trail.new_zeros(()) if temperature else None)

    def add_up(dC: Tensor | None) -> Tensor | None:
        return dC if reduce is None or dC is None else reduce(dC)

    def attention_to(C: Tensor) -> _Attention:
        return _Attention(C, float(tau), options.metric, vectors, keep_logits=temperature)

    def through_update(dC: Tensor, t: int, into: _Totals | None, wanted: bool = True) -> Tensor | None:
        """Through iteration t: from the gradient of the centroids that it made to the gradient, if wanted, of those
        that it started from.  What the weights and tau receive is added to `into`, if that is given."""
        C, C_next, mass = trail[t, :, :d], trail[t + 1, :, :d], trail[t + 1, :, d:]
        H = torch.where(mass <= no_mass(dtype), 0.0, dC / mass)
        return add_up(_through_update(H, C_next, columns, into, vectors, attention_to(C), wanted))

    def through_last_update(dC: Tensor) -> Tensor:
        result = through_update(dC, used - 1, None)
        assert result is not None
        return result

    last = attention_to(trail[used - 1, :, :d])
    further = gradient == "implicit" or (gradient == "unrolled" and used > 1)
    dC = add_up(_through_output(G, columns, into, vectors, last, centroids or further))
    if gradient == "unrolled":
        for t in range(used - 2, -1, -1):
            assert dC is not None
            stayed = torch.where(trail[t + 1, :, d:] <= no_mass(dtype), dC, 0.0)
            dC = through_update(dC, t, into, centroids or t > 0)
            dC = None if dC is None else stayed + dC
    elif gradient == "implicit":
        assert dC is not None
        dC = solve(dC, through_last_update)
        through_update(dC, used - 1, into, False)
    return Gradients(vectors.flat(dW.to(W.dtype), W.numel()), dC if centroids else None, into.dtau)


class _Totals(NamedTuple):
    """The gradients that every iteration adds to."""

    dW: Tensor  # (d, n)
    dtau: Tensor | None  # ()


def _through_output(
    G: Tensor, W: Tensor, into: _Totals, vectors: _Vectors, attention: _Attention, wanted: bool
) -> Tensor | None:
    """W_tilde = A C: adds to the totals, and returns the gradient of C if it is wanted."""
    d = vectors.d
    dC = torch.zeros_like(attention.C)
    for at in vectors:
        block, g = attention(vectors.read(W, at)), vectors.read_once(G, at)
        left = torch.cat([block.C, torch.ones_like(block.C[:, :1])], dim=1)  # (k', d + 1)
        averages = left.t() @ block.numerators  # rows: C^T numerators, denominator
        share = averages[d:].reciprocal()
        right = g.new_empty(d + 1, g.shape[1])
        torch.mul(g, share, out=right[:d])
        right[d] = -(right[:d] * averages[:d]).sum(0) * share[0]
        dC_block, dw = _through_distance(block, left, right, into.dtau, attention, wanted)
        if dC_block is not None:
            dC[block.near] += dC_block.addmm_(block.numerators, right[:d].t())
        vectors.add(into.dW, at, dw)
    return attention.unsorted(dC) if wanted else None


def _through_update(
    H: Tensor, C_next: Tensor, W: Tensor, into: _Totals | None, vectors: _Vectors, attention: _Attention, wanted: bool
) -> Tensor | None:
    """C' = (A^T W) / mass, with H = dC' / mass: adds to the totals if they are given, and returns the gradient of C if
    it is wanted."""
    d = vectors.d
    dC = torch.zeros_like(attention.C)
    H, C_next = attention.sorted(H), attention.sorted(C_next)
    for at in vectors:
        block = attention(vectors.read(W, at))
        h = H[block.near]
        target = C_next[block.near] - block.center.t()
        offset = (h * target).sum(1, keepdim=True)
        one = torch.ones_like(offset)
        # rows: H^T numerators, (H . C') numerators, denominator
        averages = torch.cat([h, offset, one], dim=1).t() @ block.numerators
        share = averages[d + 1 :].reciprocal()
        AH = averages[: d + 1].mul_(share)
        mean = (block.x[:d] * AH[:d]).sum(0).sub_(AH[d])
        right = mean.new_empty(d + 2, len(mean))
        torch.mul(block.x, share, out=right[: d + 1])
        torch.mul(mean, right[d], out=right[d + 1])
        left = torch.cat([h, -offset, -one], dim=1)  # (k', d + 2)
        dtau = None if into is None else into.dtau
        dC_block, dw = _through_distance(block, left, right, dtau, attention, wanted)
        if dC_block is not None:
            dC[block.near] += dC_block
        if into is not None:
            vectors.add(into.dW, at, dw.add_(AH[:d]))
    return attention.unsorted(dC) if wanted else None


def _through_distance(
    block: _Block, left: Tensor, right: Tensor, dtau: Tensor | None, attention: _Attention, wanted: bool
) -> tuple[Tensor | None, Tensor]:
    """From `dA - mean = left @ right`, where `right` is already divided by the denominator, through the softmax and the
    distance: the gradients of C `(k', d)`, if it is wanted, and of w `(d, b)`.  That of tau is added to `dtau`, if that
    is given."""
    d, slope = len(block.x) - 1, attention.slope
    k, b = block.numerators.shape
    dlogits = attention.vectors.scratch("dlogits", (k, b), right)
    torch.mm(left, right, out=dlogits).mul_(block.numerators)
    if dtau is not None:
        assert block.logits is not None
        dtau.sub_(block.logits.mul_(dlogits).sum(), alpha=1 / attention.tau)
    if block.distance is not None:
        dlogits.div_(block.distance).masked_fill_(block.distance == 0, 0)
    # For the squared distance the dlogits of a vector add up to zero, but for rounding.  Without this sum, their errors
    # would count with the length of the centroids, and not with their distance from the vector.
    totals = torch.cat([block.C, torch.ones_like(block.C[:, :1])], dim=1).t() @ dlogits
    dw = totals[:d].addcmul_(totals[d], block.x[:d], value=-1)
    if not wanted:
        return None, dw.mul_(slope)
    sums = dlogits @ block.x.t()
    return (sums[:, :d] - sums[:, d:] * block.C).mul_(slope), dw.mul_(slope)
