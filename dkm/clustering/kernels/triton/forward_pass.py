"""The forward pass, as the host sees it: memory, arguments and launches of `device/forward.py`."""

from typing import Any

import torch
from torch import Tensor

from ...options import ClusterOptions
from ...temperature import Law
from ..backend import Reduce, State, Trace, progress_size
from ..reference import no_mass
from . import tiles
from .device import steps
from .device.forward import forward_kernel
from .tiles import allocate, choose_tiles, describe

NO_MASS = no_mass(torch.float32)
NO_LAW = Law(hot=1.0, decay=0.0, relative=False, steps=1)  # for a pass without a state, which does not look at it


class ForwardPass:
    """One forward pass of W `(N,)` with centroids C `(k, d)`.

    With `counts` `(N,)`, each weight counts several times.  With a `state`, the pass starts from it, brings it up to
    date, and writes tau; C is then the state's.  `channels` and `pixels` are for its checksum: see `Backend.advance`.
    """

    def __init__(
        self,
        W: Tensor,
        C: Tensor,
        tau: Tensor,
        options: ClusterOptions,
        *,
        counts: Tensor | None = None,
        reduce: Reduce | None = None,
        state: State | None = None,
        channels: int = 1,
        pixels: int = 1,
    ):
        self.reduce, self.max_iter, self.stateful = reduce, options.max_iter, state is not None
        self.k, d = C.shape
        problem = describe(W, self.k, d, options.metric, counts=counts is not None, backward=False)
        self.tiles = choose_tiles(problem)
        self.scratch = allocate(self.tiles, W.device, 1 if problem.windows else self.max_iter + 1)
        self.W_tilde = torch.empty_like(W)
        self.trace = Trace(
            iterations=torch.empty((), dtype=torch.int64, device=W.device),
            trail=torch.empty(self.max_iter + 1, self.k, d + 1, device=W.device),
            progress=torch.zeros(progress_size(self.max_iter), device=W.device),
        )
        if state is None:
            C = C.float().contiguous()
            # without a state, the pointers of its parts point to something that is not used
            unused = self.trace.iterations
            state = State(C, C, unused, unused, unused, unit=tau, law=NO_LAW, recomputing=False)
        self.arguments: dict[str, Any] = dict(
            W=W,
            counts=W if counts is None else counts,
            **_of_state(state),
            tau=tau,
            trail=self.trace.trail,
            progress=self.trace.progress,
            partial=self.scratch.partial,
            workspace=self.scratch.workspace,
            iterations=self.trace.iterations,
            W_tilde=self.W_tilde,
            N=W.numel(),
            n=self.tiles.n,
            K=self.k,
            K_PADDED=self.tiles.k_padded,
            eps=options.eps,
            no_mass=NO_MASS,
            max_iter=self.max_iter,
            channels=channels,
            pixels=pixels,
            STATEFUL=self.stateful,
            CHANNELS_LAST=channels * pixels > 1,
            **self.tiles.constants,
        )

    def run(self) -> tuple[Tensor, Trace]:
        """W_tilde `(N,)` and the trace."""
        if self.reduce is None and not tiles.INTERPRETED:
            self._launch(steps.ALL.value, launch_cooperative_grid=True)
        else:
            self._run_phases(self.reduce)
        return self.W_tilde, self.trace

    def _run_phases(self, reduce: Reduce | None) -> None:
        """One launch per phase; in between, the sums may be reduced over processes."""
        if self.stateful:
            self._launch(steps.CHECKSUM.value)
        self._launch(steps.PREPARE.value)
        for t in range(self.max_iter):
            self._launch(steps.SUMS.value, t)
            partial_rows = None
            if reduce is not None:
                if not self.tiles.n:
                    self.scratch.partial.zero_()  # without vectors, no program has written it
                self._launch(steps.FOLD.value, t)
                sums = self.scratch.partial[0, : self.k]
                sums.copy_(reduce(sums.contiguous()))
                partial_rows = 1
            self._launch(steps.APPLY.value, t, partial_rows)
        self._launch(steps.MAP.value, self.max_iter)

    def _launch(self, phase: int, t: int = 0, partial_rows: int | None = None, **options: Any) -> None:
        forward_kernel[(self.tiles.programs,)](
            **self.arguments,
            PARTIAL_ROWS=self.tiles.partial_rows if partial_rows is None else partial_rows,
            t=t,
            PHASE=phase,
            **options,
        )


def _of_state(state: State) -> dict[str, Any]:
    """The arguments of the kernel that a state is."""
    arguments: dict[str, Any] = state._asdict()
    return arguments | arguments.pop("law")._asdict()
