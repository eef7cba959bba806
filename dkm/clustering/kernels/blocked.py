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
and only the centroids within its reach are computed.  Where `nodes.py` has a few places that stand for many weights,
the loop goes over these, each with its weight in the sums over vectors.

The iterations are those of `loop.py`.  This file reads the reach on the host, which stalls a GPU.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..options import ClusterOptions
from ..vectors import compute_dtype
from . import loop
from .backend import Gradients, Reduce, Trace
from .blocked_groups import backward_groups as backward_groups  # a part of this backend
from .blocked_groups import fits_groups as fits_groups
from .blocked_groups import forward_groups as forward_groups
from .columns import Vectors
from .nodes import Nodes, nodes_for
from .reference import no_mass

BLOCK = 1 << 20  # entries of the attention of a block: smaller blocks suit the cache, larger ones everything else
LOG2 = math.log(2)
SAFE = 80.0  # exp of logits up to this size neither overflows nor underflows, even if k of them are added
SORTED = 32  # from this many centroids on, sorting the weights (d = 1) costs less than it saves


def fits(W: Tensor, d: int) -> bool:
    """Always true: this is plain PyTorch."""
    return True


class _Attention:
    """The attention of one block of vectors after another to the centroids `C` `(k, d)`."""

    def __init__(self, C: Tensor, tau: float, metric: str, places: "_Places", keep_logits: bool = False):
        self.tau, self.metric, self.vectors, self.keep_logits = tau, metric, places.vectors, keep_logits
        self.slope = (2 if metric == "sqeuclidean" else 1) / tau
        # Logits are in units of log 2: 2^x takes a fraction of the time of e^x.
        self.unit = tau * LOG2
        # attention below the floor counts as zero
        self.floor, C = places.no_mass, C.to(places.vectors.dtype)
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

    def __call__(self, w: Tensor, at: slice) -> "_Block":
        """The attention of a block of vectors `(d, b)`."""
        d = len(w)
        near, distance = slice(0, len(self.C)), None
        if d == 1 and len(self.C) >= SORTED:
            near = self.reach(w[0])
        # All that follows depends on differences only, which are more precise relative to the mean of the block.
        center, longest = self.vectors.center(w, at)
        C = self.C[near] - center.t()
        x = w.new_empty(d + 1, w.shape[1])
        x[d] = 1
        torch.sub(w, center, out=x[:d])
        w, numerators = x[:d], self.vectors.scratch("numerators", (len(C), x.shape[1]), x)
        if self.metric == "euclidean":
            # not by matrix products, which lose small distances: the backward pass divides by them
            distance = torch.cdist(C, w.t(), compute_mode="donot_use_mm_for_euclid_dist")
            torch.div(distance, -self.unit, out=numerators)
        elif d == 1:
            torch.sub(w, C, out=numerators)
            torch.addcmul(numerators.new_zeros(()), numerators, numerators, value=-1 / self.unit, out=numerators)
        else:
            largest = float(C.square().sum(1).amax().sqrt())
            if (2 * longest + largest) * largest < SAFE * self.tau:
                # |w|^2 cancels in the softmax.  These logits are so small that their rounding does no harm.
                left = torch.cat([2 * C, -C.square().sum(1, keepdim=True)], 1).div_(self.unit)
                torch.mm(left, x, out=numerators)
                is_safe = True
            else:
                _squared_distances(w, C, max(longest, largest), -1 / self.unit, numerators)
                is_safe = float(numerators.amin()) > -SAFE / LOG2
            if is_safe and not self.keep_logits:
                return _Block(near, center, x, C, numerators.exp2_(), distance)
        # Clamped before exp2, which takes 50 times as long where it underflows, as do products with such results.
        numerators.sub_(numerators.amax(0)).clamp_(min=self.cutoff / LOG2)
        logits = None
        if self.keep_logits:
            logits = self.vectors.scratch("logits", (len(C), x.shape[1]), x).copy_(numerators)
        numerators = torch.threshold_(numerators.exp2_(), self.floor, 0.0)
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
    logits: Tensor | None = None  # (k', b), the same, in units of log 2, where they are kept; in a buffer, too


class _Places(NamedTuple):
    """What the loop goes over: the vectors of a weight, or the nodes that stand for them."""

    vectors: Vectors
    columns: Tensor  # (d, n)
    no_mass: float  # the attention mass up to which a centroid is empty
    nodes: Nodes | None
    counts: Tensor | None = None  # (nodes,): with which weight a node counts in a sum over vectors
    pulls: Tensor | None = None  # (nodes,): the same for sums of gradients of W_tilde

    @classmethod
    def of(cls, W: Tensor, C: Tensor, tau: float, options: ClusterOptions) -> "_Places":
        """For centroids, those of several iterations perhaps, `(..., k, d)`."""
        k, d = C.shape[-2:]
        dtype, many = compute_dtype(W.dtype), d == 1 and k >= SORTED
        nodes = nodes_for(W, C, tau, options) if d == 1 else None
        if nodes is not None:
            vectors = Vectors(nodes.x, k, d, nodes.x.dtype, entries=BLOCK // 8, near=many, ordered=True)
            return cls(vectors, nodes.x[None], no_mass(dtype), nodes)  # without counts, which are a pass over W
        vectors = Vectors(W, k, d, dtype, entries=BLOCK, near=many, ordered=False)
        return cls(vectors, vectors.columns(W), no_mass(dtype), None)

    def counted(self, W: Tensor, G: Tensor | None = None, counts: bool = True) -> "_Places":
        """With the counts of nodes, and with their pulls where there is a G, if there are nodes."""
        factors = [None] * counts + [G] * (G is not None)
        if self.nodes is None or not factors:
            return self
        found = self.nodes.gather(W, *factors)
        return self._replace(counts=found[0] if counts else None, pulls=None if G is None else found[-1])


def forward(
    W: Tensor, C: Tensor, tau: Tensor, options: ClusterOptions, reduce: Reduce | None = None
) -> tuple[Tensor, Trace]:
    """W_tilde `(N,)` and the trace; see `backend.Backend`."""
    temperature = float(tau)
    return loop.forward(W, C, options, reduce, lambda C: _Passes(W, C, temperature, options))


class _Passes:
    """The forward passes over W, see `loop.Passes`."""

    def __init__(self, W: Tensor, C: Tensor, tau: float, options: ClusterOptions):
        self.W, self.tau, self.options = W, tau, options
        self.places = _Places.of(W, C, tau, options).counted(W)
        self.W_tilde: Tensor | None = None  # (d, places), once the iteration is known to be the last one

    def sums(self, C: Tensor, last: bool) -> Tensor:
        if self.places.nodes is not None and not self.places.nodes.resolve(C):
            self.places = _Places.of(self.W, C, self.tau, self.options).counted(self.W)
        attention = _Attention(C, self.tau, self.options.metric, self.places)
        self.W_tilde = torch.zeros_like(self.places.columns) if last else None
        return _sums(self.places, attention, self.W_tilde)

    def average(self, C: Tensor) -> Tensor:
        if self.W_tilde is None:  # that an iteration is the last one, which makes W_tilde, is known after its sums
            self.sums(C, True)
        W_tilde, vectors, nodes = self.W_tilde, self.places.vectors, self.places.nodes
        assert W_tilde is not None
        del self.places, self.W_tilde  # and the columns: they are as large as W
        if nodes is None:
            return vectors.flat(W_tilde, self.W.numel())
        result = torch.empty_like(self.W)
        for at, (values,) in nodes.evaluate(self.W, W_tilde[0]):
            result[at] = values
        return result


def _sums(places: _Places, attention: _Attention, W_tilde: Tensor | None) -> Tensor:
    """A^T [W, 1], `(k, d + 1)`.  If `W_tilde` is given, A C is added to it."""
    vectors, d = places.vectors, places.vectors.d
    total = attention.C.new_zeros(len(attention.C), d + 1)
    for at in vectors:
        block = attention(vectors.read(places.columns, at), at)
        share = block.numerators.sum(0).reciprocal_()
        counted = _counted(share, None if places.counts is None else places.counts[at])
        sums = block.numerators @ (block.x * counted).t()
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
    passes = _GradientPasses(G, W, float(tau), trace, options, centroids, temperature)
    return loop.backward(passes, trace, options, reduce=reduce, centroids=centroids)


class _GradientPasses:
    """The backward passes over W, see `loop.GradientPasses`."""

    def __init__(
        self,
        G: Tensor,
        W: Tensor,
        tau: float,
        trace: Trace,
        options: ClusterOptions,
        centroids: bool,
        temperature: bool,
    ):
        used, d = int(trace.iterations), trace.trail.shape[2] - 1
        rows = trace.trail[:used] if options.gradient == "unrolled" else trace.trail[used - 1 : used]
        self.G, self.W, self.further = G, W, loop.goes_further(options, used)
        places = _Places.of(W, rows[:, :, :d], tau, options)
        dtau = trace.trail.new_zeros(()) if temperature else None
        # Several iterations are added up in dW: a sum in 16 bit would lose precision.
        dW = torch.zeros_like(places.columns, dtype=places.vectors.dtype)
        self.output = self.into = _Totals(dW, dtau)
        if places.nodes is not None:
            self.output = _Totals(torch.zeros_like(dW), dtau)  # of a gradient of 1: each weight has one of its own
            places = places.counted(W, G if self.further or centroids or temperature else None, self.further)
        self.places = places
        self.attention_to = lambda C: _Attention(C, tau, options.metric, places, keep_logits=temperature)

    def through_output(self, C: Tensor, wanted: bool) -> Tensor | None:
        return _through_output(self.G, self.places, self.output, self.attention_to(C), wanted)

    def through_update(self, H: Tensor, C: Tensor, C_next: Tensor, add: bool, wanted: bool) -> Tensor | None:
        into = self.into if add else None
        return _through_update(H, C_next, self.places, into, self.attention_to(C), wanted)

    def result(self) -> tuple[Tensor, Tensor | None]:
        offsets = self.into.dW if self.further else None
        return _gradient(self.G, self.W, self.places, self.output.dW, offsets), self.into.dtau


def _gradient(G: Tensor, W: Tensor, places: _Places, slopes: Tensor, offsets: Tensor | None) -> Tensor:
    """The gradient of W `(N,)`; of nodes, G times the slopes plus the offsets, if there are any."""
    if places.nodes is None:
        return places.vectors.flat(slopes.to(W.dtype), W.numel())
    result, tables = torch.empty_like(W), [slopes[0]] if offsets is None else [slopes[0], offsets[0]]
    for at, (slope, *offset) in places.nodes.evaluate(W, *tables):
        slope.mul_(G[at])
        result[at] = slope.add_(offset[0]) if offset else slope
    return result


class _Totals(NamedTuple):
    """The gradients that every iteration adds to."""

    dW: Tensor  # (d, n)
    dtau: Tensor | None  # ()


def _through_output(G: Tensor, places: _Places, into: _Totals, attention: _Attention, wanted: bool) -> Tensor | None:
    """W_tilde = A C: adds to the totals, and returns the gradient of C if it is wanted.

    Of nodes, the totals get what a gradient of 1 would give.
    """
    vectors, d = places.vectors, places.vectors.d
    dC = torch.zeros_like(attention.C)
    for at in vectors:
        block, pull = (
            attention(vectors.read(places.columns, at), at),
            None if places.pulls is None else places.pulls[at],
        )
        g = vectors.read_once(G, at) if places.nodes is None else torch.ones_like(block.x[:d])
        left = torch.cat([block.C, torch.ones_like(block.C[:, :1])], dim=1)  # (k', d + 1)
        averages = left.t() @ block.numerators  # rows: C^T numerators, denominator
        share = averages[d:].reciprocal()
        right = g.new_empty(d + 1, g.shape[1])
        torch.mul(g, share, out=right[:d])
        right[d] = -(right[:d] * averages[:d]).sum(0) * share[0]
        dC_block, dw = _through_distance(block, left, right, pull, into.dtau, attention, wanted)
        if dC_block is not None:
            dC[block.near] += dC_block.addmm_(block.numerators, _counted(right[:d], pull).t())
        vectors.add(into.dW, at, dw)
    return attention.unsorted(dC) if wanted else None


def _through_update(
    H: Tensor, C_next: Tensor, places: _Places, into: _Totals | None, attention: _Attention, wanted: bool
) -> Tensor | None:
    """C' = (A^T W) / mass, with H = dC' / mass: adds to the totals if they are given, and returns the gradient of C if
    it is wanted."""
    vectors, d = places.vectors, places.vectors.d
    dC = torch.zeros_like(attention.C)
    H, C_next = (attention.sorted(X.to(vectors.dtype)) for X in (H, C_next))
    for at in vectors:
        block = attention(vectors.read(places.columns, at), at)
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
        dtau, count = None if into is None else into.dtau, None if places.counts is None else places.counts[at]
        dC_block, dw = _through_distance(block, left, right, count, dtau, attention, wanted)
        if dC_block is not None:
            dC[block.near] += dC_block
        if into is not None:
            vectors.add(into.dW, at, dw.add_(AH[:d]))
    return attention.unsorted(dC) if wanted else None


def _counted(X: Tensor, counts: Tensor | None) -> Tensor:
    return X if counts is None else X * counts


def _through_distance(
    block: _Block,
    left: Tensor,
    right: Tensor,
    counts: Tensor | None,
    dtau: Tensor | None,
    attention: _Attention,
    wanted: bool,
) -> tuple[Tensor | None, Tensor]:
    """From `dA - mean = left @ right`, where `right` is already divided by the denominator, through the softmax and the
    distance: the gradients of C `(k', d)`, if it is wanted, and of w `(d, b)`.  That of tau is added to `dtau`, if that
    is given.  `counts` `(b,)` are with which weight the vectors count in the sums of C and tau."""
    d, slope = len(block.x) - 1, attention.slope
    k, b = block.numerators.shape
    dlogits = attention.vectors.scratch("dlogits", (k, b), right)
    torch.mm(left, right, out=dlogits).mul_(block.numerators)
    if dtau is not None:
        assert block.logits is not None
        dtau.sub_(_counted(block.logits.mul_(dlogits), counts).sum(), alpha=LOG2 / attention.tau)
    if block.distance is not None:
        dlogits.div_(block.distance).masked_fill_(block.distance == 0, 0)
    # For the squared distance the dlogits of a vector add up to zero, but for rounding.  Without this sum, their errors
    # would count with the length of the centroids, and not with their distance from the vector.
    totals = torch.cat([block.C, torch.ones_like(block.C[:, :1])], dim=1).t() @ dlogits
    dw = totals[:d].addcmul_(totals[d], block.x[:d], value=-1)
    if not wanted:
        return None, dw.mul_(slope)
    sums = dlogits @ _counted(block.x, counts).t()
    return (sums[:, :d] - sums[:, d:] * block.C).mul_(slope), dw.mul_(slope)
