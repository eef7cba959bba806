"""The iterations of the loop and of its gradient, for backends that make one pass over all vectors after another.

What a pass computes is the backend's own (`Passes` and `GradientPasses`); `blocked.py` and `native/` have some.  This
file reads tau and the convergence test on the host, which stalls a GPU.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..options import ClusterOptions
from ..vectors import compute_dtype
from .backend import Gradients, Reduce, Trace, progress_size
from .implicit import solve
from .reference import no_mass


class Passes(Protocol):
    """The passes of the forward direction over the vectors of one weight."""

    def sums(self, C: Tensor, last: bool) -> Tensor:
        """A^T [W, 1] `(k, d + 1)` for centroids `(k, d)`.  If it is the `last` one, `average` of the same C follows."""
        ...

    def average(self, C: Tensor) -> Tensor:
        """W_tilde = A C, `(N,)`, for the centroids of the newest `sums`.  Nothing follows."""
        ...


class GradientPasses(Protocol):
    """The passes of the backward direction, which add up the gradients of W and tau."""

    def through_output(self, C: Tensor, wanted: bool) -> Tensor | None:
        """Through W_tilde = A C.  Returns the gradient of C `(k, d)`, if it is wanted."""
        ...

    def through_update(self, H: Tensor, C: Tensor, C_next: Tensor, add: bool, wanted: bool) -> Tensor | None:
        """Through C_next = (A^T W) / mass, with `H = dC_next / mass` `(k, d)`: adds to the gradients of W and tau only
        if it shall, and returns the gradient of C if it is wanted."""
        ...

    def result(self) -> tuple[Tensor, Tensor | None]:
        """The gradients of W `(N,)` and, if there was asked for it, of tau `()`.  Nothing follows."""
        ...


def forward(
    W: Tensor, C: Tensor, options: ClusterOptions, reduce: Reduce | None, begin: Callable[[Tensor], Passes]
) -> tuple[Tensor, Trace]:
    """W_tilde `(N,)` and the trace, see `backend.Backend`; `begin` makes the passes from the first centroids."""
    dtype, max_iter = compute_dtype(W.dtype), options.max_iter
    C = C.to(dtype)
    k, d = C.shape
    trail = C.new_zeros(max_iter + 1, k, d + 1)
    trail[0, :, :-1] = C
    passes = begin(C)
    for iteration in range(1, max_iter + 1):
        last = iteration == max_iter
        sums = passes.sums(C, last)
        if reduce is not None:
            sums = reduce(sums.to(dtype))
        mass = sums[:, -1:]
        C_next = torch.where(mass <= no_mass(dtype), C, sums[:, :-1] / mass).to(dtype)
        trail[iteration] = torch.cat([C_next, mass], dim=1)
        if last or bool((C_next - C).abs().amax() <= options.eps):
            break
        C = C_next
    trail[-1] = trail[iteration]
    # These backward passes need no notes.  Zeros, because outputs of an operator must be the same every time.
    progress = trail.new_zeros(progress_size(max_iter))
    return passes.average(C), Trace(torch.tensor(iteration, device=W.device), trail, progress)


def backward(
    passes: GradientPasses,
    trace: Trace,
    options: ClusterOptions,
    *,
    reduce: Reduce | None,
    centroids: bool,
) -> Gradients:
    """The gradients of W and, where they are asked for, of the centroids and of tau; see `backend.Backend`."""
    trail, used, gradient = trace.trail, int(trace.iterations), options.gradient
    d, dtype = trail.shape[2] - 1, trail.dtype
    further = goes_further(options, used)

    def add_up(dC: Tensor | None) -> Tensor | None:
        dC = None if dC is None else dC.to(dtype)
        return dC if reduce is None or dC is None else reduce(dC)

    def through_update(dC: Tensor, t: int, add: bool, wanted: bool) -> Tensor | None:
        """Through iteration t: from the gradient of the centroids that it made to that of those it started from."""
        C, C_next, mass = trail[t, :, :d], trail[t + 1, :, :d], trail[t + 1, :, d:]
        H = torch.where(mass <= no_mass(dtype), 0.0, dC / mass)
        return add_up(passes.through_update(H, C, C_next, add, wanted))

    def through_last_update(dC: Tensor) -> Tensor:
        result = through_update(dC, used - 1, False, True)
        assert result is not None
        return result

    dC = add_up(passes.through_output(trail[used - 1, :, :d], centroids or further))
    if gradient == "unrolled":
        for t in range(used - 2, -1, -1):
            assert dC is not None
            stayed = torch.where(trail[t + 1, :, d:] <= no_mass(dtype), dC, 0.0)
            dC = through_update(dC, t, True, centroids or t > 0)
            dC = None if dC is None else stayed + dC
    elif gradient == "implicit":
        assert dC is not None
        through_update(solve(dC, through_last_update), used - 1, True, False)
    dW, dtau = passes.result()
    return Gradients(dW, dC if centroids else None, dtau)


def goes_further(options: ClusterOptions, used: int) -> bool:
    """Whether a gradient goes on through updates of the centroids, after that of W_tilde."""
    return options.gradient == "implicit" or (options.gradient == "unrolled" and used > 1)
