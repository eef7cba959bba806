"""The loop on a GPU: attention never leaves the chip, the host never waits, and a pass is one launch.

    frame.py         the iterations, convergence, sums over programs: what both families share
    differences.py   distances by differences: d = 1, few centroids, the plain distance
    products.py      matrix products on the tensor cores: all else
    windows.py       d = 1, many weights in float32 and many centroids: differences, with near ones only
    table.py         d = 1 in 16 bit: the loop on a table of all values
    launch.py        launches that take little time

Everything is float32, whatever the dtype of the weight.
"""

import functools
import os
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...options import ClusterOptions
from ..backend import Gradients, Reduce, State, Trace, progress_size
from ..implicit import solve
from ..reference import no_mass
from . import frame, table
from .windows import PART

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_D = 64
# From so many weights on, a table of all 16-bit values is worth making: with more centroids than a few, and with few.
TABLE, TABLE_FOR_FEW, FEW = 1 << 20, 1 << 23, 8
# From so many float32 weights on, and with more centroids than two windows have, it pays to put them in order.
WINDOWS, WINDOW = 1 << 22, 16
SHARED = 8  # rows of partial sums, where programs share them: at least so many
NO_MASS = no_mass(torch.float32)


def fits(W: Tensor, d: int) -> bool:
    """Whether these kernels are for this weight, and run with this Triton."""
    return runs_here() and _computes(W, d)


def _computes(W: Tensor, d: int) -> bool:
    return W.dtype in (torch.float32, torch.bfloat16, torch.float16) and d <= MAX_D and W.numel() < 2**31


def forward(
    W: Tensor, C: Tensor, tau: Tensor, options: ClusterOptions, reduce: Reduce | None = None
) -> tuple[Tensor, Trace]:
    """W_tilde `(N,)` and the trace; see `backend.Backend`."""
    _check(W, C)
    if not by_table(W, *C.shape):
        return _forward(W, None, C, tau, options, reduce)
    values, counts, _ = table.population(W)
    W_tilde, trace = _forward(values, counts, C, tau, options, reduce)
    return table.look_up(W, W_tilde), trace


def can_advance(W: Tensor, C: Tensor) -> bool:
    """Unless a table of all values is made, which takes launches of its own."""
    return not by_table(W, *C.shape)


def advance(W: Tensor, state: State, options: ClusterOptions) -> tuple[Tensor, Tensor, Trace]:
    """`forward` from a state, which it brings up to date in place: W_tilde `(N,)`, tau and the trace."""
    _check(W, state.C)
    tau = torch.empty((), device=W.device)
    W_tilde, trace = _forward(W, None, state.C, tau, options, None, state)
    return W_tilde, tau, trace


@functools.cache
def runs_here() -> bool:
    """Whether this Triton launches programs that wait for one another, and for the GPUs that these kernels are for."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= (3, 3) and torch.version.hip is None


def _check(W: Tensor, C: Tensor) -> None:
    if not (W.is_cuda or INTERPRETED):
        raise ValueError(f'impl="triton" needs a GPU, and the weight is on {W.device}: use impl="auto"')
    if not (runs_here() or INTERPRETED):
        raise ValueError(
            f'impl="triton" needs an NVIDIA GPU and Triton 3.3, which comes with PyTorch 2.7; '
            f'this is Triton {triton.__version__}: use impl="auto"'
        )
    if not _computes(W, C.shape[1]):
        raise ValueError(
            f'impl="triton" computes in float32, for d up to {MAX_D} and under 2^31 weights; '
            f'got {W.dtype}, d = {C.shape[1]}, {W.numel()} weights: use impl="auto"'
        )


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
    common = trace.trail, trace.iterations, tau, options.metric, options.gradient, reduce, centroids
    if not by_table(W, trace.trail.shape[1], trace.trail.shape[2] - 1):
        return Gradients(*_Backward(G, W, None, *common).run())
    values, counts, sums = table.population(W, G)
    through_updates = _Backward(sums, values, counts, *common, output=False)
    offsets, dC = through_updates.run()
    slopes = through_updates.slopes()
    return Gradients(table.look_up_gradient(W, G, slopes, offsets), dC)


def by_table(W: Tensor, k: int, d: int) -> bool:
    """Whether a table of all values is worth making."""
    # With processes that share a weight, some may and some may not: both ways reduce the same sums equally often.
    return d == 1 and W.element_size() == 2 and W.numel() >= (TABLE if k > FEW else TABLE_FOR_FEW)


def by_windows(W: Tensor, k: int, d: int, metric: str) -> bool:
    """Whether to look at near centroids only.  Processes that share a weight may differ in this, too."""
    wide = k > 2 * WINDOW and WINDOWS <= W.numel() < 1 << 30  # it counts past the last weight
    return wide and d == 1 and W.dtype == torch.float32 and metric == "sqeuclidean"


class _Tiles(NamedTuple):
    """Which family, how large its tiles are, and how many programs share them."""

    n: int  # vectors
    KP: int  # centroids, whole tiles
    programs: int
    rows: int  # of partial sums: as many as programs that have any, or fewer, and shared
    arguments: dict  # of the kernels


@functools.lru_cache(maxsize=4096)
def _tiles(
    N: int,
    k: int,
    d: int,
    euclidean: bool,
    counts: bool,
    windows: bool,
    backward: bool,
    deterministic: bool,
    device: torch.device,
) -> _Tiles:
    n = -(-N // d)
    BK = max(2, triton.next_power_of_2(k))
    DP = triton.next_power_of_2(d)
    DS = max(8, DP)
    # beyond 32 dimensions the tables of products do not fit the shared memory
    products = 1 < d <= 32 and not euclidean and DP * BK > 64
    registers = None
    if products:
        # 64 rows are the least that the tensor cores take at once; the more programs a processor has, the better
        # they hide one another's waiting
        BK, BN, warps = 64, 64, 4
        each, registers = (3, 168) if DS == 8 or (DS == 16 and not backward) else (2 if DS == 16 else 1, None)
    elif windows:
        BK, BN, warps = WINDOW, 128, 4
        each, registers = (3, 168) if backward else (4, 128)
    else:
        # what a thread holds of a tile, whole columns of it, must fit its registers
        BK = min(BK, max(2, 128 // DP)) if d > 1 else BK if BK <= 32 else 16
        BN, warps, each = 128 * max(1, min(8, 64 // (BK * DP))), 4, 2
    NK = -(-k // BK)
    stages = (3 if DS == 8 and not backward else 2) if products else 1  # tiles read ahead, as many as there is room for
    if products and not _has_room(device):
        each, registers, stages = 1, None, 1
    E = max(DS, triton.next_power_of_2(d + 1)) if products else triton.next_power_of_2(d + 1)
    processors = 3 if INTERPRETED else each * torch.cuda.get_device_properties(device).multi_processor_count
    arguments = dict(
        PRODUCTS=products, EUCLIDEAN=euclidean, COUNTS=counts, D=d, DP=DP, DS=DS, E=E,
        BK=BK, BN=BN, NK=NK, TILE=8192 if windows else 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if INTERPRETED and windows:
        arguments |= dict(TILE=256, BN=64)
    if registers is not None and not INTERPRETED:
        arguments["maxnreg"] = registers
    KP = (NK + windows) * BK  # the last window may begin anywhere
    tiles = max(1, -(-n // max(arguments["TILE"], BN)))
    working = -(-tiles // -(-tiles // processors))  # as many as take equally many tiles, or one less
    # With few vectors, more programs share the work of the centroids; not where even those without vectors write sums.
    programs = max(working, min(KP // 4, processors)) if products and NK > 1 else working
    # sums over programs: everybody takes part, and reads as much at once as fits the registers
    if INTERPRETED:
        centroids, chunk = 64, 4
    elif products:
        centroids, chunk = (1, 256) if programs >= KP else (4, 64)
    else:
        centroids, chunk = 4, min(512, 1024 // E)
    arguments |= dict(ROWS=centroids, CHUNK=chunk)
    rows, row = min(tiles, programs), KP * (d + 1)
    # Backward, a small weight's sums would take a good part of what the weight itself takes; forward, there is room.
    if products and backward and not deterministic and rows * row > N // 20:
        rows = min(rows, max(SHARED, N // 48 // row))
    return _Tiles(n, KP, programs, rows, arguments)


def _has_room(device: torch.device) -> bool:
    """Whether this is a Hopper, for whose shared memory the numbers of `products` are."""
    return INTERPRETED or torch.cuda.get_device_properties(device).major == 9


def _scratch(tiles: _Tiles, device: torch.device, tables: int) -> tuple[Tensor, Tensor]:
    """Partial sums; `products`' tables or `windows`' room."""
    d, DS = tiles.arguments["D"], tiles.arguments["DS"]
    # a pointer is wanted even where there is nothing to point to
    rows = tables * tiles.KP if tiles.arguments["PRODUCTS"] else 1
    tile = tiles.arguments["TILE"]
    each = tile // 2 + tile // PART.value * tables
    room = torch.empty(tiles.programs * each, device=device) if tile else None
    return (
        torch.empty(tiles.rows, tiles.KP, d + 1, device=device),
        torch.empty(rows, 8 * DS, dtype=torch.bfloat16, device=device) if room is None else room,
    )


def _forward(W, counts, C, tau, options: ClusterOptions, reduce, state: State | None = None):
    (k, d), eps, max_iter, metric = C.shape, options.eps, options.max_iter, options.metric
    windows = counts is None and by_windows(W, k, d, metric)
    tiles = _tiles(W.numel(), k, d, metric == "euclidean", counts is not None, windows, False, True, W.device)
    moves = torch.zeros(progress_size(max_iter), device=W.device)
    partial, Qs = _scratch(tiles, W.device, 1 if windows else max_iter + 1)
    trail = torch.empty(max_iter + 1, k, d + 1, device=W.device)
    iterations = torch.empty((), dtype=torch.int64, device=W.device)
    W_tilde = torch.empty_like(W)
    if state is None:
        C = C.float().contiguous()
        kept = C, C, iterations, iterations, tau, 1.0, 0.0, False, 1  # not looked at
    else:
        kept = *state[:5], *state.law

    def launch(phase: int, t: int = 0, rows: int = tiles.rows, **options) -> None:
        frame.forward_kernel[(tiles.programs,)](
            W, W if counts is None else counts, *kept[:5], tau, trail, moves, partial, Qs, iterations, W_tilde,
            W.numel(), tiles.n, k, tiles.KP, rows, eps, NO_MASS, max_iter, *kept[5:], t, PHASE=phase,
            STATEFUL=state is not None, **tiles.arguments, **options,
        )  # fmt: skip

    if reduce is None and not INTERPRETED:
        launch(frame.ALL.value, launch_cooperative_grid=True)
        return W_tilde, Trace(iterations, trail, moves)
    if state is not None:
        launch(frame.COUNT.value)
    launch(frame.PREPARE.value)
    for t in range(max_iter):
        launch(frame.SUMS.value, t)
        if reduce is None:
            launch(frame.TAKE.value, t)
        else:
            if not tiles.n:
                partial.zero_()  # nobody wrote it
            launch(frame.FOLD.value, t)
            partial[0, :k] = reduce(partial[0, :k].contiguous())
            launch(frame.TAKE.value, t, 1)
    launch(frame.MAP.value, max_iter)
    return W_tilde, Trace(iterations, trail, moves)


class _Backward:
    def __init__(self, G, W, counts, trail, iterations, tau, metric, gradient, reduce, centroids, output=True):
        self.max_iter, self.k, self.d = trail.shape[0] - 1, trail.shape[1], trail.shape[2] - 1
        self.gradient, self.reduce, self.output, self.wanted = gradient, reduce, output, centroids
        windows = counts is None and by_windows(W, self.k, self.d, metric)
        # As everywhere in PyTorch, who wants the same bits every time says so: torch.use_deterministic_algorithms(True)
        same = torch.are_deterministic_algorithms_enabled()
        self.tiles = tiles = _tiles(
            W.numel(), self.k, self.d, metric == "euclidean", counts is not None, windows, True, same, W.device
        )
        # windows are found on the way, and the fixed point starts from what the centroids received
        self.centroids = centroids or windows or gradient == "implicit"
        # a table's dW is not a sum over the output and the updates, the fixed point's updates come later, and for
        # windows dW holds something else meanwhile
        self.push = gradient == "unrolled" and counts is None and W.dtype == torch.float32 and not windows
        # every iteration's, and of windows also the output's
        self.partial, Qs = _scratch(tiles, W.device, self.max_iter + windows)
        slots = 1 if self.push else self.max_iter + 1
        if tiles.arguments["PRODUCTS"]:
            Hs = torch.empty(slots * tiles.KP, Qs.shape[1], dtype=Qs.dtype, device=W.device)
        else:
            Hs = torch.empty(slots, self.k, self.d + 1, device=W.device)
        self.us = torch.empty(self.max_iter + 1, self.k, self.d, device=W.device)
        self.dW = torch.empty_like(W)
        self.G = G
        self.common = (
            W, W if counts is None else counts, trail, iterations, tau, self.us, Hs, Hs, Qs, self.partial
        )  # fmt: skip
        self.sizes = W.numel(), tiles.n, self.k, tiles.KP

    def launch(
        self,
        phase,
        t=0,
        slot=0,
        target=0,
        rows=None,
        output=False,
        updates=False,
        push=False,
        G=None,
        dW=None,
        **options,
    ):
        frame.backward_kernel[(self.tiles.programs,)](
            self.G if G is None else G, *self.common, self.dW if dW is None else dW, *self.sizes,
            self.tiles.rows if rows is None else rows, NO_MASS, self.max_iter, t, slot, target, PHASE=phase,
            MODE=self.gradient, OUTPUT=output, UPDATES=updates, PUSH=push, CENTROIDS=self.centroids,
            **self.tiles.arguments, **options,
        )  # fmt: skip

    def run(self) -> tuple[Tensor, Tensor | None]:
        dC = self.us[0] if self.wanted else None
        if self.gradient == "unrolled" and self.reduce is None and not INTERPRETED:
            self.launch(frame.ALL.value, output=self.output, updates=True, push=self.push, launch_cooperative_grid=True)
            return self.dW, dC
        self.launch(frame.PREPARE.value)
        if self.gradient != "last" or self.centroids:
            self.receive(output=True)
        if self.gradient == "unrolled":
            for t in range(self.max_iter - 2, -1, -1):
                self.receive(t, 0 if self.push else t + 1, t)
        elif self.gradient == "implicit":
            fixed = solve(self.us[0].clone(), self.through_fixed_point)
            self.hold(fixed)
            dC = fixed if self.wanted else None
        if not self.push:
            self.launch(frame.MAP.value, output=self.output, updates=self.gradient != "last")
        return self.dW, dC

    def receive(self, t: int = 0, slot: int = 0, target: int = 0, output: bool = False) -> None:
        """What the centroids receive through the output, or through iteration t from H in `slot`: into us[target]."""
        self.launch(frame.SUMS.value, t, slot, target, output=output, push=self.push)
        # Processes that share a weight must agree on how often they reduce: this does not depend on windows.
        only_dC = self.gradient == "last" or (self.gradient == "unrolled" and t == 0 and not output)
        if only_dC and not self.wanted:
            return
        rows = None
        if self.reduce is not None:
            if not self.tiles.n:
                self.partial.zero_()  # nobody wrote it
            self.launch(frame.FOLD.value, t, slot, target, output=output)
            self.partial[0, : self.k] = self.reduce(self.partial[0, : self.k].contiguous())
            rows = 1
        self.launch(frame.TAKE.value, t, slot, target, rows, output=output, push=self.push)

    def hold(self, u: Tensor) -> None:
        """H of u, for the way through the last iteration, into the slot past all others."""
        self.us[self.max_iter] = u
        _, _, trail, iterations, tau, us, Hs, tables, *_ = self.common
        names = ("PRODUCTS", "D", "DS", "E", "ROWS")
        frame.fixed_point_kernel[(-(-self.tiles.KP // self.tiles.arguments["ROWS"]),)](
            trail, iterations, tau, us, Hs, tables, self.k, self.tiles.KP, NO_MASS, self.max_iter, self.max_iter,
            **{name: self.tiles.arguments[name] for name in names},
        )  # fmt: skip

    def through_fixed_point(self, u: Tensor) -> Tensor:
        self.hold(u)
        self.receive(0, self.max_iter, 0)
        return self.us[0].clone()

    def slopes(self) -> Tensor:
        """The derivative of W_tilde by the weight, each by itself: dW of a gradient of ones, centroids held still."""
        result = torch.empty_like(self.dW)
        self.launch(frame.MAP.value, output=True, G=torch.ones_like(self.dW), dW=result)
        return result
