"""Section 3 of the paper as functions: cluster, assign, init_centroids.

`W` is `(n, d)`: a weight flattened contiguously into vectors of `d` values (`to_vectors`).
`C` is `(k, d)`: the centroids.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import blocked, reference

METRICS = ("sqeuclidean", "euclidean")
IMPLEMENTATIONS = ("auto", "reference", "blocked", "triton")
GRADIENTS = ("unrolled", "last", "implicit")


class Clustering(NamedTuple):
    """What `cluster` returns."""

    W_tilde: Tensor  # like W: every vector replaced by its attention-weighted average of the centroids
    C: Tensor  # (k, d), detached: the centroids to start from next time
    iterations: Tensor  # (), int64: how many iterations were used


def cluster(
    W: Tensor,
    C: Tensor,
    *,
    tau: float | Tensor,
    eps: float = 1e-4,
    max_iter: int = 5,
    metric: str = "sqeuclidean",
    gradient: str = "unrolled",
    impl: str = "auto",
) -> Clustering:
    """Differentiable k-means: each row of W becomes a soft average of the centroids it is near to.

        repeat up to max_iter:
            A      = softmax(-f(W, C) / tau)              over the centroids
            C_next = (A^T W) / (A^T 1)                    a centroid without mass stays where it is
            stop if max|C_next - C| <= eps, else C = C_next
        W_tilde = A C                                     the A and the C that belong together

    Differentiable in `W`, `C` and a tensor `tau`.  A `W` that is not `(n, d)` is flattened contiguously into
    vectors of `d = C.shape[1]` values, zero-padded at the tail; `W_tilde` has its shape and dtype.  The
    arithmetic, and the returned `C`, are float32 or, for float64, float64.

    Args:
        tau: the temperature: a positive number, or a tensor of one element.
        metric: f, "sqeuclidean" (the squared Euclidean distance) or "euclidean".
        gradient: "unrolled" is exact, through every iteration.  "last" takes the centroids as constants: the
            cheapest.  "implicit" takes them as the fixed point they have converged to (IDKM): a fixed number of
            passes, whatever max_iter.  The last two give no gradient to `C`.
        impl: "reference" materialises A: O(max_iter * n * k) memory, autograd's own gradient.  "blocked"
            recomputes A block by block in both passes: O(n * d) memory, any device.  "triton" does so on the
            chip of a GPU, without waiting for it.  "auto" picks for the device.
    """
    _check_cluster(W, C, tau, eps, max_iter, metric, impl, gradient)
    dtype = blocked.compute_dtype(W.dtype)
    # filled on the device: a copy from the host could not be captured in a graph
    tau = tau.to(W.device, dtype) if isinstance(tau, Tensor) else torch.full((), tau, dtype=dtype, device=W.device)
    if impl == "reference":
        with torch.autocast(W.device.type, enabled=False):
            V = to_vectors(W, C.shape[1]).to(dtype)
            V_tilde, C_next, iterations = reference.cluster(V, C.to(dtype), tau, eps, max_iter, metric, gradient)
        return Clustering(from_vectors(V_tilde.to(W.dtype), W.shape), C_next, iterations)
    run = _operator if torch.compiler.is_compiling() else _Cluster.apply
    W_tilde, iterations, trail = run(W.reshape(-1), C, tau, eps, max_iter, metric, impl, gradient)
    return Clustering(W_tilde.view(W.shape), trail.detach()[-1, :, :-1].contiguous(), iterations)


def can_advance(weight: Tensor, C: Tensor, impl: str) -> bool:
    """Whether `advance` is for this weight and these centroids."""
    if torch.compiler.is_compiling() or C.dtype != torch.float32:
        return False
    kernels = _kernels(impl, weight, C.shape[1])
    return kernels is not blocked and not kernels.by_table(weight, *C.shape)


def advance(
    weight: Tensor, state: tuple, eps: float, max_iter: int, metric: str, gradient: str
) -> tuple[Tensor, Tensor]:
    """`cluster` on a GPU, from a `kernels.triton.State` that it brings up to date, in place: W_tilde and iterations.

    Differentiable in the weight.
    """
    return _Advance.apply(weight, state, eps, max_iter, metric, gradient)


def assign(W: Tensor, C: Tensor) -> Tensor:
    """`(n, d), (k, d) -> (n,)` int64: the index of each vector's nearest centroid (the first one of equals).

    Works block by block: memory is O(n) whatever k.
    """
    if W.ndim != 2 or C.ndim != 2 or W.shape[1] != C.shape[1]:
        raise ValueError(f"assign needs W (n, d) and C (k, d), got W {tuple(W.shape)} and C {tuple(C.shape)}")
    W, C = W.detach(), C.detach().to(blocked.compute_dtype(W.dtype))
    if C.shape[1] == 1:
        # By bisection between sorted centroids: exact, and O(n log k).
        levels, order = C[:, 0].sort(stable=True)
        edges = (levels[1:] + levels[:-1]) / 2
        # equal centroids: always the same one of them; clamped, because NaN is past the end
        first = torch.searchsorted(levels, levels).clamp(max=len(levels) - 1)
        return order[first[torch.bucketize(W[:, 0].to(C.dtype).contiguous(), edges)]]
    with torch.autocast(W.device.type, enabled=False):
        offsets = -C.square().sum(1) / 2
        rows = max(1, blocked.BLOCK // len(C))
        return torch.cat([torch.addmm(offsets, block.to(C.dtype), C.t()).argmax(1) for block in W.split(rows)])


def to_vectors(weight: Tensor, dim: int) -> Tensor:
    """Any shape -> `(ceil(numel / dim), dim)`: flattened contiguously, zero-padded at the tail."""
    flat = weight.reshape(-1)
    if missing := -flat.numel() % dim:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(-1, dim)


def from_vectors(W: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `to_vectors`: drops the padding."""
    return W.reshape(-1)[: math.prod(shape)].view(shape)


def init_centroids(W: Tensor, k: int, *, init: str = "kmeans", seed: int = 0) -> Tensor:
    """`(n, d) -> (k, d)` centroids to start from, in at least float32, on W's device.

    init: "kmeans" is k-means: optimal on a histogram and then polished for d = 1, k-means++ and Lloyd
    steps for d > 1.  "random" is the paper's k randomly selected vectors.

    Deterministic: the same W, k and seed give the same centroids; the arithmetic is done on the CPU, so
    that every rank and every kind of device agrees.  Where W has fewer than k distinct vectors, some
    centroids are equal.
    """
    from . import initialize

    if init not in ("kmeans", "random"):
        raise ValueError(f'init must be "kmeans" or "random", got {init!r}')
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be an integer of at least 1, got {k!r}")
    if W.ndim != 2 or W.numel() == 0:
        raise ValueError(f"W must be (n, d) with at least one weight, got shape {tuple(W.shape)}")
    if not W.is_floating_point():
        raise TypeError(f"W must be a floating-point tensor, got {W.dtype}")
    if not bool(W.detach().isfinite().all()):
        raise ValueError("W holds NaN or infinite values: there are no centroids of those")
    dtype = blocked.compute_dtype(W.dtype)
    return getattr(initialize, init)(W.detach(), k, seed).to(device=W.device, dtype=dtype)


def _kernels(impl: str, W: Tensor, d: int) -> ModuleType:
    """The module that computes, for this weight and centroids of d dimensions."""
    if impl == "triton" or (impl == "auto" and W.is_cuda and _has_triton()):
        from .kernels import triton

        if impl == "triton" or triton.fits(W, d):
            return triton
    return blocked


@functools.cache
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    from .kernels import triton

    return triton.runs_here()


def _forward(
    W: Tensor, C: Tensor, tau: Tensor, eps: float, max_iter: int, metric: str, impl: str, gradient: str
) -> tuple[Tensor, Tensor, Tensor]:
    kernels = _kernels(impl, W, C.shape[1])
    with _no_autocast(W, kernels):
        return kernels.forward(W, C, tau, eps, max_iter, metric)


def _backward(
    G: Tensor,
    W: Tensor,
    trail: Tensor,
    iterations: Tensor,
    tau: Tensor,
    metric: str,
    impl: str,
    gradient: str,
    centroids: bool,
) -> tuple[Tensor, Tensor]:
    kernels = _kernels(impl, W, trail.shape[2] - 1)
    with _no_autocast(W, kernels):
        dW, dC = kernels.backward(G, W, trail, iterations, tau, metric, gradient, centroids=centroids)
    return dW, trail.new_empty(0) if dC is None else dC  # an operator returns tensors


def _no_autocast(W: Tensor, kernels: ModuleType) -> AbstractContextManager:
    """Autocast would run products in 16 bit: at a small tau that is noise, not attention."""
    return torch.autocast(W.device.type, enabled=False) if kernels is blocked else nullcontext()


def _save(ctx, inputs: tuple, output: tuple) -> None:
    W, C, tau, _, _, ctx.metric, ctx.impl, ctx.gradient = inputs
    W_tilde, iterations, trail = output
    ctx.C_dtype = C.dtype
    ctx.save_for_backward(W, trail, iterations, tau, W_tilde if tau.requires_grad else None)


def _gradients(ctx, G: Tensor, backward: Callable) -> tuple:
    """Of every argument of `_forward`."""
    W, trail, iterations, tau, W_tilde = ctx.saved_tensors
    G = G.contiguous()
    wanted = ctx.needs_input_grad[1]
    centroids = W_tilde is not None or (wanted and ctx.gradient == "unrolled")
    dW, dC = backward(G, W, trail, iterations, tau, ctx.metric, ctx.impl, ctx.gradient, centroids)
    dtau = None if W_tilde is None else _tau_gradient(G, W_tilde, dW, W, dC, trail, iterations, tau, ctx)
    if not wanted:
        dC = None
    elif ctx.gradient == "unrolled":
        dC = dC.to(ctx.C_dtype)
    else:
        dC = torch.zeros_like(trail[0, :, :-1], dtype=ctx.C_dtype)
    return dW, dC, dtau, None, None, None, None, None


def _tau_gradient(G, W_tilde, dW, W, dC, trail, iterations, tau, ctx) -> Tensor:
    """The gradient of tau, without another pass over the attention.

    Scaling W and C by s and tau by s^2 (by s for the plain distance) scales W_tilde by s: by Euler's theorem on
    homogeneous functions, the gradients times their arguments, tau's counted twice, add up to <G, W_tilde>.
    """
    scaled = (G.double() * W_tilde - dW.double() * W).sum()
    if ctx.gradient != "implicit":  # a fixed point is a function of W and tau alone
        first = torch.zeros_like(iterations) if ctx.gradient == "unrolled" else iterations - 1
        scaled -= (dC * trail.index_select(0, first.view(1))[0, :, :-1]).sum()
    return (scaled / tau / (2 if ctx.metric == "sqeuclidean" else 1)).to(tau.dtype).view(tau.shape)


class _Cluster(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[1:])
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, G, *_):
        return _gradients(ctx, G, _backward)


class _Advance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, state, eps, max_iter, metric, gradient):
        from .kernels import triton

        ctx.metric, ctx.gradient, ctx.shape = metric, gradient, weight.shape
        # Single weights may be clustered in any order.  That in memory needs no copy.
        ctx.last = (
            state[0].shape[1] == 1
            and weight.ndim == 4
            and not weight.is_contiguous()
            and weight.is_contiguous(memory_format=torch.channels_last)
        )
        W = _flat(weight, ctx.last)
        W_tilde, iterations, trail, tau = triton.advance(W, triton.State(*state), eps, max_iter, metric)
        ctx.save_for_backward(W, trail, iterations, tau)
        ctx.mark_non_differentiable(iterations)
        ctx.set_materialize_grads(False)  # zeros for the iterations: a launch a weight and step
        return _shaped(W_tilde, ctx.shape, ctx.last), iterations

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, G, _):
        from .kernels import triton

        if G is None:
            return (None,) * 6
        W, trail, iterations, tau = ctx.saved_tensors
        G = _flat(G, ctx.last)
        dW, _ = triton.backward(G, W, trail, iterations, tau, ctx.metric, ctx.gradient, centroids=False)
        return _shaped(dW, ctx.shape, ctx.last), None, None, None, None, None


def _flat(X: Tensor, channels_last: bool) -> Tensor:
    # contiguous: the gradient of a sum is one number in the shape of many, and stays that when it is reshaped
    return (X.permute(0, 2, 3, 1) if channels_last else X).reshape(-1).contiguous()


def _shaped(X: Tensor, shape: torch.Size, channels_last: bool) -> Tensor:
    if channels_last:
        n, c, h, w = shape
        return X.view(n, h, w, c).permute(0, 3, 1, 2)
    return X.view(shape)


# The same for torch.compile: an operator that it neither looks into nor stumbles over.  Without torch.compile the
# call of an operator takes half a millisecond, and a network has hundreds of weights.

_operator = torch.library.custom_op("dkm::cluster", _forward, mutates_args=())
_backward_operator = torch.library.custom_op("dkm::cluster_backward", _backward, mutates_args=())


@_operator.register_fake
def _(W, C, tau, eps, max_iter, metric, impl, gradient):
    trail = C.new_empty(max_iter + 1, C.shape[0], C.shape[1] + 1, dtype=blocked.compute_dtype(W.dtype))
    return torch.empty_like(W), W.new_empty((), dtype=torch.int64), trail


@_backward_operator.register_fake
def _(G, W, trail, iterations, tau, metric, impl, gradient, centroids):
    return torch.empty_like(W), trail.new_empty((trail.shape[1], trail.shape[2] - 1) if centroids else 0)


_operator.register_autograd(lambda ctx, G, *_: _gradients(ctx, G, _backward_operator), setup_context=_save)


def _check_cluster(W, C, tau, eps, max_iter, metric, impl, gradient) -> None:
    if not W.is_floating_point() or not C.is_floating_point():
        raise TypeError(f"cluster needs floating-point tensors, got W {W.dtype} and C {C.dtype}")
    if W.numel() == 0:
        raise ValueError(f"cluster needs at least one weight, got a W of shape {tuple(W.shape)}")
    if C.ndim != 2 or C.numel() == 0:
        raise ValueError(f"C must be (k, d) with k, d >= 1, got shape {tuple(C.shape)}")
    check_options(tau, eps, max_iter, metric, impl, gradient)


def check_options(tau, eps, max_iter, metric, impl, gradient) -> None:
    """Raise unless these are what `cluster` takes."""
    check_tau(tau)
    if not isinstance(eps, Real) or not eps >= 0:
        raise ValueError(f"eps must be a number >= 0, got {eps!r}")
    if not isinstance(max_iter, int) or max_iter < 1:
        raise ValueError(f"max_iter must be an integer >= 1, got {max_iter!r}")
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    for name, value, known in (("impl", impl, IMPLEMENTATIONS), ("gradient", gradient, GRADIENTS)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def check_tau(tau: float | Tensor) -> None:
    """Raise ValueError unless tau is a number that float32 can divide by.  Tensors are not read: a GPU would stall."""
    if isinstance(tau, Tensor):
        return
    if not isinstance(tau, Real) or isinstance(tau, bool) or not 1e-37 <= tau < math.inf:
        raise ValueError(f"tau must be a finite number of at least 1e-37, got {tau!r}; the paper's are 5e-6 to 4e-4")
