"""The loop on a CPU, compiled: about five times as fast as `blocked`, in as little memory.

    vectors.h     what is computed for vectors
    passes.c      one pass over all vectors of a weight
    groups.py     the loop for groups: groups.c
    nearest.py    the nearest centroid of every vector, in passes.c
    checksum.py   the sum that tells whether a weight has changed: checksum.c
    compiling.py  the user's C compiler makes libraries of these, once; without one, `blocked` computes everything

A weight is cut into chunks, and several threads compute some chunks each.  Every chunk has sums of its own, which are
added up in their order, so nothing depends on the number of threads.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...options import ClusterOptions
from ...threads import spread
from ...vectors import compute_dtype, in_memory
from .. import blocked, loop
from ..backend import Gradients, Reduce, Trace
from ..blocked_groups import fits_groups as fits_groups  # a part of this backend
from ..reference import no_mass
from .compiling import passes, pointer, required, weight_type
from .groups import backward_groups as backward_groups
from .groups import forward_groups as forward_groups

CHUNK = 4096  # vectors, at least: sums in float32 over so many are as exact as their terms
PER_CENTROID = 32  # vectors, at least: the sums of a chunk then take an eighth of the memory of its weights
CONVERTED = 1 << 18  # weights of 16 bit that are converted at a time


def fits(W: Tensor, d: int) -> bool:
    """Whether there is a compiler, and the weight lies in the CPU's memory."""
    return in_memory(W) and passes(compute_dtype(W.dtype), d) is not None


def forward(
    W: Tensor, C: Tensor, tau: Tensor, options: ClusterOptions, reduce: Reduce | None = None
) -> tuple[Tensor, Trace]:
    """W_tilde `(N,)` and the trace; see `backend.Backend`."""
    if options.metric != "sqeuclidean":
        return blocked.forward(W, C, tau, options, reduce)
    temperature = float(tau)
    return loop.forward(W, C, options, reduce, lambda C: _Passes(W, C.shape, temperature))


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
    if options.metric != "sqeuclidean":
        wanted = dict(centroids=centroids, temperature=temperature)
        return blocked.backward(G, W, tau, trace, options, reduce=reduce, **wanted)
    passes = _GradientPasses(G, W, trace.trail[0, :, :-1].shape, float(tau), temperature)
    return loop.backward(passes, trace, options, reduce=reduce, centroids=centroids)


class _Weight:
    """A flat weight `(N,)`, and its passes for centroids of the shape `(k, d)`."""

    def __init__(self, W: Tensor, shape: torch.Size, tau: float):
        self.W, self.tau, self.dtype = W.contiguous(), tau, compute_dtype(W.dtype)
        self.k, self.d = shape
        self.library, self.facts = required(self.dtype, self.d), weight_type(self.dtype)
        self.chunk = max(CHUNK, PER_CENTROID * self.k)
        self.chunks = -(-W.numel() // (self.chunk * self.d))
        self.factors = (1 / (tau * math.log(2)), math.log2(no_mass(self.dtype)), 2 / tau)

    def run(
        self,
        name: str,
        C: Tensor,
        *constants: Tensor,
        reads: Sequence[Tensor] = (),
        writes: Tensor | None,
        sums: Sequence[Tensor | None],
    ) -> None:
        """Call a function of the library for all chunks.

        It gets the weight, C and other `constants` of its shape; what it `reads` and `writes`, `(N,)` as the weight
        is; and the sums of each chunk `(chunks, ...)`, in float64, which it fills.
        """
        function = getattr(self.library, name)
        small = [X.to(self.dtype).contiguous() for X in (C, *constants)]

        def piece(first: int) -> None:
            at = slice(first * self.chunk * self.d, (first + each) * self.chunk * self.d)
            large = [X[at].to(self.dtype) for X in (self.W, *reads)]  # copies only where W has 16 bits
            into = None if writes is None else writes[at]
            written = None if into is None or into.dtype == self.dtype else torch.empty_like(into, dtype=self.dtype)
            tensors = [*small, *large[1:], into if written is None else written]
            found = [None if X is None else X[first:] for X in sums]
            facts = self.facts(large[0].data_ptr(), len(large[0]), self.d, self.k, self.chunk, *self.factors)
            if function(ctypes.byref(facts), *map(pointer, [*tensors, *found])):
                raise MemoryError(f"no memory is left to cluster {self.W.numel():,} weights with {self.k} centroids")
            if into is not None and written is not None:
                into.copy_(written)

        each = -(-self.chunks // torch.get_num_threads()) or 1  # the shard of a rank may be empty
        if self.W.dtype != self.dtype:
            each = max(1, min(each, CONVERTED // (self.chunk * self.d)))
        spread(piece, range(0, self.chunks, each))

    def new_sums(self, *shape: int) -> Tensor:
        """For sums of each chunk, of this shape."""
        return torch.empty(self.chunks, *shape, dtype=torch.float64)


class _Passes(_Weight):
    """The forward passes, see `loop.Passes`."""

    W_tilde: Tensor | None = None
    first = True

    def sums(self, C: Tensor, last: bool) -> Tensor:
        # Late in a training the first iteration is the only one, and W_tilde is cheap beside the sums.
        self.W_tilde = torch.empty_like(self.W) if self.first or last else None
        self.first = False
        sums = self.new_sums(self.k, self.d + 1)
        self.run("dkm_sums", C, writes=self.W_tilde, sums=[sums])
        total = sums.sum(0)
        total[:, :-1] += total[:, -1:] * C  # the sums are of differences from the centroids
        return total

    def average(self, C: Tensor) -> Tensor:
        if self.W_tilde is None:
            self.sums(C, True)
        assert self.W_tilde is not None
        return self.W_tilde


class _GradientPasses(_Weight):
    """The backward passes, see `loop.GradientPasses`."""

    def __init__(self, G: Tensor, W: Tensor, shape: torch.Size, tau: float, temperature: bool):
        super().__init__(W, shape, tau)
        self.G, self.slope = G.contiguous(), 2 / tau
        self.dW = torch.zeros_like(self.W, dtype=self.dtype)  # a sum in 16 bits would lose precision
        self.lost = torch.zeros(self.chunks, dtype=torch.float64) if temperature else None

    def through_output(self, C: Tensor, wanted: bool) -> Tensor | None:
        sums = self.new_sums(self.k, 2, self.d) if wanted else None
        self.add_up("dkm_through_output", C, reads=[self.G], writes=self.dW, sums=sums)
        if sums is None:
            return None
        through_distance, of_average = sums.sum(0).unbind(1)
        return through_distance * self.slope + of_average

    def through_update(self, H: Tensor, C: Tensor, C_next: Tensor, add: bool, wanted: bool) -> Tensor | None:
        sums = self.new_sums(self.k, self.d) if wanted else None
        self.add_up("dkm_through_update", C, H, C_next, writes=self.dW if add else None, sums=sums)
        return None if sums is None else sums.sum(0) * self.slope

    def add_up(self, name: str, *constants: Tensor, writes: Tensor | None, sums: Tensor | None, **reads: Any) -> None:
        """`run` with the sums for tau, where these and the gradient of W are asked for."""
        lost = self.new_sums() if self.lost is not None and writes is not None else None
        self.run(name, *constants, writes=writes, sums=[sums, lost], **reads)
        if self.lost is not None and lost is not None:
            self.lost += lost

    def result(self) -> tuple[Tensor, Tensor | None]:
        dtau = None if self.lost is None else (self.lost.sum() / self.tau**2).to(self.dtype)
        return self.dW.to(self.W.dtype), dtau
