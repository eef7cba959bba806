"""The backward pass, as the host sees it: memory, arguments and launches of `device/backward.py`."""

from typing import Any

import torch
from torch import Tensor

from ...options import ClusterOptions
from ..backend import Gradients, Reduce, Trace
from ..implicit import solve
from ..reference import no_mass
from . import tiles
from .device import steps
from .device.backward import backward_kernel, fixed_point_kernel
from .tiles import Scratch, Tiles, allocate, choose_tiles, describe

NO_MASS = no_mass(torch.float32)
FIXED_POINT_CONSTANTS = ("PRODUCTS", "D", "D_SEGMENT", "ROW_WIDTH", "GROUP_K")


class BackwardPass:
    """One backward pass, from G `(N,)` to dW and, if `centroids` asks for it, dC.

    With `counts`, the weights are values that count several times, and G holds sums over equal weights.  Without
    `output`, dW leaves out what comes through W_tilde = A C directly.
    """

    def __init__(
        self,
        G: Tensor,
        W: Tensor,
        tau: Tensor,
        trace: Trace,
        options: ClusterOptions,
        *,
        counts: Tensor | None = None,
        reduce: Reduce | None = None,
        centroids: bool = True,
        output: bool = True,
    ):
        rows, self.k, columns = trace.trail.shape
        self.max_iter, self.d = rows - 1, columns - 1
        self.gradient, self.reduce = options.gradient, reduce
        self.dC_wanted, self.output = centroids, output
        problem = describe(W, self.k, self.d, options.metric, counts=counts is not None, backward=True)
        self.tiles, windows = choose_tiles(problem), problem.windows
        # dW can be added up on the way, instead of in a last walk, but not in three cases: for a table of values only
        # the part through the updates is wanted; for the fixed point the updates come after the solution of a linear
        # system; and windows keep the order of the weights in dW until the end.
        exact = W.dtype == torch.float32
        self.add_to_dW = self.gradient == "unrolled" and counts is None and exact and not windows
        # one level per iteration; windows have one more, for the output
        self.scratch = allocate(self.tiles, W.device, self.max_iter + windows)
        self.trail_gradients = torch.empty(self.max_iter + 1, self.k, self.d, device=W.device)
        self.dW = torch.empty_like(W)
        self.arguments: dict[str, Any] = dict(
            G=G,
            W=W,
            counts=W if counts is None else counts,
            trail=trace.trail,
            progress=trace.progress,
            iterations=trace.iterations,
            tau=tau,
            trail_gradients=self.trail_gradients,
            H_slots=_allocate_H(self.tiles, self.scratch, 1 if self.add_to_dW else self.max_iter + 1, self.k),
            workspace=self.scratch.workspace,
            partial=self.scratch.partial,
            dW=self.dW,
            N=W.numel(),
            n=self.tiles.n,
            K=self.k,
            K_PADDED=self.tiles.k_padded,
            PARTIAL_ROWS=self.tiles.partial_rows,
            no_mass=NO_MASS,
            max_iter=self.max_iter,
            t=0,
            slot=0,
            target=0,
            GRADIENT=self.gradient,
            OUTPUT=False,
            UPDATES=False,
            ADD_TO_DW=False,
            # windows are found while the sums for dC are computed, and the fixed point starts from these sums
            WANT_DC=centroids or windows or self.gradient == "implicit",
            **self.tiles.constants,
        )

    def run(self) -> Gradients:
        """dW `(N,)` and, where asked for, dC `(k, d)`."""
        if self.gradient == "unrolled" and self.reduce is None and not tiles.INTERPRETED:
            self._launch(
                steps.ALL.value,
                OUTPUT=self.output,
                UPDATES=True,
                ADD_TO_DW=self.add_to_dW,
                launch_cooperative_grid=True,
            )
            return Gradients(self.dW, self.trail_gradients[0] if self.dC_wanted else None)
        return self._run_phases()

    def _run_phases(self) -> Gradients:
        """One launch per phase; in between, the sums may be reduced over processes."""
        dC = self.trail_gradients[0]
        self._launch(steps.PREPARE.value)
        if self.gradient != "last" or self.arguments["WANT_DC"]:
            self._receive(output=True)
        if self.gradient == "unrolled":
            for t in range(self.max_iter - 2, -1, -1):
                self._receive(t, slot=0 if self.add_to_dW else t + 1, target=t)
        elif self.gradient == "implicit":
            dC = solve(dC.clone(), self._through_fixed_point)
            self._write_fixed_point_H(dC)
        if not self.add_to_dW:
            self._launch(steps.MAP.value, OUTPUT=self.output, UPDATES=self.gradient != "last")
        return Gradients(self.dW, dC if self.dC_wanted else None)

    def slopes(self) -> Tensor:
        """The derivative of each element of W_tilde by its weight, with the centroids held still: `(N,)`.

        It is the dW of a gradient of ones.
        """
        result = torch.empty_like(self.dW)
        self._launch(steps.MAP.value, OUTPUT=True, G=torch.ones_like(self.dW), dW=result)
        return result

    def _receive(self, t: int = 0, slot: int = 0, target: int = 0, output: bool = False) -> None:
        """What the centroids receive, into `trail_gradients[target]`: through the output or, from the H in `slot`,
        through the update of iteration t."""
        way = dict(t=t, slot=slot, target=target, OUTPUT=output)
        self._launch(steps.SUMS.value, ADD_TO_DW=self.add_to_dW, **way)
        # Processes that share a weight must agree on how often they reduce: this does not depend on windows.
        only_for_dC = self.gradient == "last" or (self.gradient == "unrolled" and t == 0 and not output)
        if only_for_dC and not self.dC_wanted:
            return
        partial_rows = self.tiles.partial_rows
        if self.reduce is not None:
            if not self.tiles.n:
                self.scratch.partial.zero_()  # without vectors, no program has written it
            self._launch(steps.FOLD.value, **way)
            sums = self.scratch.partial[0, : self.k]
            sums.copy_(self.reduce(sums.contiguous()))
            partial_rows = 1
        self._launch(steps.APPLY.value, ADD_TO_DW=self.add_to_dW, PARTIAL_ROWS=partial_rows, **way)

    def _through_fixed_point(self, u: Tensor) -> Tensor:
        """From a gradient `(k, d)` of the centroids that the last iteration made to that of those it started from."""
        self._write_fixed_point_H(u)
        self._receive(slot=self.max_iter)
        return self.trail_gradients[0].clone()

    def _write_fixed_point_H(self, u: Tensor) -> None:
        """The H of u, for the way through the last iteration, into the slot after all others."""
        self.trail_gradients[self.max_iter] = u
        names = ("trail", "workspace", "iterations", "trail_gradients", "H_slots", "K", "K_PADDED", "no_mass")
        fixed_point_kernel[(-(-self.tiles.k_padded // self.tiles.constants["GROUP_K"]),)](
            **{name: self.arguments[name] for name in names},
            source=self.max_iter,
            slot=self.max_iter,
            **{name: self.tiles.constants[name] for name in FIXED_POINT_CONSTANTS},
        )

    def _launch(self, phase: int, **changed: Any) -> None:
        backward_kernel[(self.tiles.programs,)](**{**self.arguments, "PHASE": phase, **changed})


def _allocate_H(chosen: Tiles, scratch: Scratch, slots: int, k: int) -> Tensor:
    """Memory for H: per slot a table like a logit table for `products`, otherwise `(k, d + 1)`."""
    device = scratch.partial.device
    if chosen.constants["PRODUCTS"]:
        table = scratch.workspace
        return torch.empty(slots * chosen.k_padded, table.shape[1], dtype=table.dtype, device=device)
    return torch.empty(slots, k, chosen.constants["D"] + 1, device=device)
