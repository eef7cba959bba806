"""Section 3 of the paper as one function: differentiable k-means, on any device.

`W` is `(n, d)`: a weight flattened contiguously into vectors of `d` values (`vectors.to_vectors`).
`C` is `(k, d)`: the centroids.

`cluster` checks its arguments, a backend of `kernels` computes, and this file connects the two with autograd.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .kernels import reference
from .kernels.backend import Gradients, Reduce, State, Trace, progress_size
from .options import ClusterOptions, shows_options
from .temperature import check_tau
from .vectors import compute_dtype, from_vectors, to_vectors


class Clustering(NamedTuple):
    """What `cluster` returns.

    Attributes:
        W_tilde: like W; every vector is replaced by its attention-weighted average of the centroids.
        C: `(k, d)`, without gradient; the centroids to start from next time.
        iterations: `()` int64; how many iterations were used.
    """

    W_tilde: Tensor
    C: Tensor
    iterations: Tensor


@shows_options(ClusterOptions)
def cluster(W: Tensor, C: Tensor, *, tau: float | Tensor, **options: Any) -> Clustering:
    """Differentiable k-means: each row of W becomes a soft average of the centroids that are near to it.

        repeat up to max_iter:
            A      = softmax(-f(W, C) / tau)              over the centroids
            C_next = (A^T W) / (A^T 1)                    a centroid without mass stays where it is
            stop if max|C_next - C| <= eps, else C = C_next
        W_tilde = A C                                     the A and the C that belong together

    Differentiable in `W`, `C` and a tensor `tau`.  A `W` that is not `(n, d)` is flattened contiguously into
    vectors of `d = C.shape[1]` values, with zeros after the last one where needed; `W_tilde` has the shape and the
    dtype of `W`.  The arithmetic, and the returned `C`, are float32, or float64 for a float64 `W`.

    Args:
        tau: the temperature: a positive number, or a tensor of one element.
        eps: the iterations end when no centroid moves farther than this; 1e-4 by default.
        max_iter: the most iterations; 5 by default.
        metric: f, "sqeuclidean" (the squared Euclidean distance, the default) or "euclidean".
        gradient: "unrolled" (the default) is exact, through every iteration.  "last" takes the centroids as constants
            and is the cheapest.  "implicit" takes them as the fixed point they have converged to (IDKM), in a
            fixed number of passes, whatever max_iter.  The last two give no gradient to `C`.
        impl: "reference" materialises A: O(max_iter * n * k) memory, autograd's own gradient.  "blocked"
            recomputes A block by block in both passes: O(n * d) memory, any device.  "native" does so in compiled
            code on a CPU, "triton" on the chip of a GPU, without waiting for it.  "auto" (the default) picks for the
            device.
    """
    chosen = ClusterOptions(**options)
    check_tau(tau)
    check_tensors(W, C)
    _foresee(W, C, tau, chosen)
    return run(W, C, tau, chosen)


def check_tensors(W: Tensor, C: Tensor) -> None:
    """Raise unless these are weights and centroids that can be clustered."""
    if not W.is_floating_point() or not C.is_floating_point():
        raise TypeError(f"cluster needs floating-point tensors, got W {W.dtype} and C {C.dtype}")
    if W.numel() == 0:
        raise ValueError(f"cluster needs at least one weight, got a W of shape {tuple(W.shape)}")
    if C.ndim != 2 or C.numel() == 0:
        raise ValueError(f"C must be (k, d) with k, d >= 1, got shape {tuple(C.shape)}")


def run(W: Tensor, C: Tensor, tau: float | Tensor, options: ClusterOptions) -> Clustering:
    """`cluster` without its checks: a network calls this for every weight at every step."""
    dtype = compute_dtype(W.dtype)
    # filled on the device: a copy from the host could not be captured in a CUDA graph
    tau = tau.to(W.device, dtype) if isinstance(tau, Tensor) else torch.full((), tau, dtype=dtype, device=W.device)
    if options.impl == "reference":
        with torch.autocast(W.device.type, enabled=False):
            V = to_vectors(W, C.shape[1]).to(dtype)
            V_tilde, C_next, iterations = reference.cluster(V, C.to(dtype), tau, options)
        return Clustering(from_vectors(V_tilde.to(W.dtype), W.shape), C_next, iterations)
    apply = _compiled if torch.compiler.is_compiling() else _Cluster.apply
    W_tilde, iterations, trail, _ = apply(W.reshape(-1), C, tau, options)
    return Clustering(W_tilde.view(W.shape), trail.detach()[-1, :, :-1].contiguous(), iterations)


def can_advance(weight: Tensor, C: Tensor, impl: str) -> bool:
    """Whether there is a kernel for `advance` with this weight and these centroids."""
    if torch.compiler.is_compiling() or C.dtype != torch.float32 or impl == "reference":
        return False
    backend = kernels.stateful(kernels.choose(impl, weight, C.shape[1]))
    return backend is not None and backend.can_advance(weight, C)


def advance(weight: Tensor, state: State, options: ClusterOptions) -> tuple[Tensor, Tensor]:
    """The clustering that follows from a state, in one launch: W_tilde, differentiable in the weight, and iterations.

    The state is brought up to date in place.
    """
    W_tilde, _, iterations, *_ = _Advance.apply(weight, state, options)
    return W_tilde, iterations


def rehearse_advance(weight: Tensor, state: State, options: ClusterOptions) -> None:
    """Both passes of `advance`, for a backend that only writes down how it is launched."""
    W_tilde, tau, *trace = _Advance.forward(weight, state, options)
    channels_last = _in_channels_last_order(weight, state.C.shape[1])
    W, G = _flat(weight, channels_last), _flat(W_tilde, channels_last)
    backward(G, W, tau, Trace(*trace), options, centroids=False)


def rehearse(W: Tensor, C: Tensor, tau: Tensor, options: ClusterOptions, *, centroids: bool, temperature: bool) -> None:
    """The same of `run`."""
    W_tilde, trace = forward(W, C, tau, options)
    backward(W_tilde, W, tau, trace, options, centroids=centroids, temperature=temperature)


_foreseen: set[tuple[Any, ...]] = set()


def _foresee(W: Tensor, C: Tensor, tau: float | Tensor, options: ClusterOptions) -> None:
    """Let the kernels of both passes be compiled together, the first time that there is a weight of this kind."""
    learned = isinstance(tau, Tensor) and tau.requires_grad
    differentiable = torch.is_grad_enabled() and (W.requires_grad or C.requires_grad or learned)
    transformed = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
    kind = (W.dtype, W.device, C.shape, C.requires_grad, learned, options)
    if not differentiable or transformed or options.impl == "reference" or kind in _foreseen:
        return
    _foreseen.add(kind)
    backend = kernels.compiled(kernels.choose(options.impl, W, C.shape[1]))
    if backend is not None:
        centroids = C.requires_grad and options.gradient == "unrolled"
        heat = torch.ones((), dtype=compute_dtype(W.dtype), device=W.device)
        W, C = W.detach().reshape(-1), C.detach()
        backend.rehearse(lambda: rehearse(W, C, heat, options, centroids=centroids, temperature=learned))


def forward(
    W: Tensor, C: Tensor, tau: Tensor, options: ClusterOptions, reduce: Reduce | None = None
) -> tuple[Tensor, Trace]:
    """The forward pass of the backend that `options.impl` chooses; no autograd.  See `kernels.backend.Backend`."""
    with no_autocast(W):
        return kernels.choose(options.impl, W, C.shape[1]).forward(W, C, tau, options, reduce)


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
    """The backward pass that belongs to `forward`."""
    backend = kernels.choose(options.impl, W, trace.trail.shape[2] - 1)
    with no_autocast(W):
        wanted = dict(centroids=centroids, temperature=temperature)
        return backend.backward(G, W, tau, trace, options, reduce=reduce, **wanted)


def no_autocast(W: Tensor) -> AbstractContextManager[None]:
    """Autocast would compute products in 16 bit: at a small tau the logits would be noise."""
    kind = W.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


# --- autograd ------------------------------------------------------------------------------------

Output = tuple[Tensor, Tensor, Tensor, Tensor]  # W_tilde and the three tensors of a Trace
Backward = Callable[..., Gradients]


def _save(ctx: Any, W: Tensor, C: Tensor, tau: Tensor, options: ClusterOptions, output: Output) -> None:
    ctx.options, ctx.C_dtype = options, C.dtype
    ctx.save_for_backward(W, tau, *output[1:])


def _gradients(ctx: Any, G: Tensor, backward: Backward) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of W, C and tau, as far as autograd wants them."""
    W, tau, *tensors = ctx.saved_tensors
    trace, options = Trace(*tensors), ctx.options
    _, C_wanted, tau_wanted, *_ = ctx.needs_input_grad
    centroids = C_wanted and options.gradient == "unrolled"
    dW, dC, dtau = backward(G.contiguous(), W, tau, trace, options, centroids=centroids, temperature=tau_wanted)
    if C_wanted:
        dC = torch.zeros_like(trace.trail[0, :, :-1]) if dC is None else dC
        dC = dC.to(ctx.C_dtype)
    return dW, dC, None if dtau is None else dtau.view(tau.shape)


class _Cluster(torch.autograd.Function):
    # setup_context is apart from forward, as torch.func (grad, functional_call) asks for.

    @staticmethod
    def forward(W: Tensor, C: Tensor, tau: Tensor, options: ClusterOptions) -> Output:
        W_tilde, trace = forward(W, C, tau, options)
        return W_tilde, *trace

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Output) -> None:
        W, C, tau, options = inputs
        _save(ctx, W, C, tau, options, output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, G: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, G, backward), None


class _Advance(torch.autograd.Function):
    @staticmethod
    def forward(weight: Tensor, state: State, options: ClusterOptions) -> tuple[Tensor, ...]:
        channels_last = _in_channels_last_order(weight, state.C.shape[1])
        W = _flat(weight, channels_last)
        backend = kernels.stateful(kernels.choose(options.impl, W, state.C.shape[1]))
        assert backend is not None  # `can_advance` was asked first
        order = dict(channels=weight.shape[1], pixels=weight.shape[2] * weight.shape[3]) if channels_last else {}
        W_tilde, tau, trace = backend.advance(W, state, options, **order)
        return _shaped(W_tilde, weight.shape, channels_last), tau, *trace

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        weight, state, ctx.options = inputs
        ctx.channels_last = _in_channels_last_order(weight, state.C.shape[1])
        ctx.save_for_backward(weight, *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # zeros for the other outputs would be launches per weight and step

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, G: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None]:
        if G is None:
            return None, None, None
        weight, tau, *trace = ctx.saved_tensors
        W, G = _flat(weight, ctx.channels_last), _flat(G, ctx.channels_last)
        found = backward(G, W, tau, Trace(*trace), ctx.options, centroids=False)
        return _shaped(found.dW, weight.shape, ctx.channels_last), None, None


def _in_channels_last_order(weight: Tensor, d: int) -> bool:
    """Single weights (d = 1) may be clustered in any order; taking the order in memory saves a copy."""
    return (
        d == 1
        and weight.ndim == 4
        and not weight.is_contiguous()
        and weight.is_contiguous(memory_format=torch.channels_last)
    )


def _flat(X: Tensor, channels_last: bool) -> Tensor:
    # contiguous: the gradient of a sum is one number expanded to many, and stays that when it is reshaped
    return (X.permute(0, 2, 3, 1) if channels_last else X).reshape(-1).contiguous()


def _shaped(X: Tensor, shape: torch.Size, channels_last: bool) -> Tensor:
    if channels_last:
        n, c, h, w = shape
        return X.view(n, h, w, c).permute(0, 3, 1, 2)
    return X.view(shape)


# --- torch.compile -------------------------------------------------------------------------------
# An operator that the compiler neither looks into nor stumbles over.  Its arguments are tensors, numbers and texts.
# In eager mode an operator's call takes half a millisecond, and a network has hundreds of weights: hence `_Cluster`.


def _flat_options(options: ClusterOptions) -> dict[str, Any]:
    """The options as arguments of an operator, by name."""
    names = ("eps", "max_iter", "metric", "gradient", "impl")
    return {name: getattr(options, name) for name in names}


def _compiled(W: Tensor, C: Tensor, tau: Tensor, options: ClusterOptions) -> Output:
    return _operator(W, C, tau, **_flat_options(options))


@torch.library.custom_op("dkm::cluster", mutates_args=())
def _operator(
    W: Tensor, C: Tensor, tau: Tensor, eps: float, max_iter: int, metric: str, gradient: str, impl: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = ClusterOptions(eps=eps, max_iter=max_iter, metric=metric, gradient=gradient, impl=impl)
    W_tilde, trace = forward(W, C, tau, options)
    return W_tilde, *trace


@_operator.register_fake
def _(
    W: Tensor, C: Tensor, tau: Tensor, eps: float, max_iter: int, metric: str, gradient: str, impl: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    trail = C.new_empty(max_iter + 1, C.shape[0], C.shape[1] + 1, dtype=compute_dtype(W.dtype))
    return torch.empty_like(W), W.new_empty((), dtype=torch.int64), trail, trail.new_empty(progress_size(max_iter))


@torch.library.custom_op("dkm::cluster_backward", mutates_args=())
def _backward_operator(
    G: Tensor, W: Tensor, tau: Tensor, iterations: Tensor, trail: Tensor, progress: Tensor,
    eps: float, max_iter: int, metric: str, gradient: str, impl: str, centroids: bool, temperature: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = ClusterOptions(eps=eps, max_iter=max_iter, metric=metric, gradient=gradient, impl=impl)
    trace = Trace(iterations, trail, progress)
    dW, *rest = backward(G, W, tau, trace, options, centroids=centroids, temperature=temperature)
    dC, dtau = (trail.new_empty(0) if found is None else found for found in rest)  # an operator returns tensors
    return dW, dC, dtau


@_backward_operator.register_fake
def _(
    G: Tensor, W: Tensor, tau: Tensor, iterations: Tensor, trail: Tensor, progress: Tensor,
    eps: float, max_iter: int, metric: str, gradient: str, impl: str, centroids: bool, temperature: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dC = trail.new_empty((trail.shape[1], trail.shape[2] - 1) if centroids else 0)
    return torch.empty_like(W), dC, trail.new_empty(() if temperature else 0)


def _compiled_backward(
    G: Tensor, W: Tensor, tau: Tensor, trace: Trace, options: ClusterOptions, *, centroids: bool, temperature: bool
) -> Gradients:
    wanted = dict(centroids=centroids, temperature=temperature)
    dW, dC, dtau = _backward_operator(G, W, tau, *trace, **_flat_options(options), **wanted)
    return Gradients(dW, dC if centroids else None, dtau if temperature else None)


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: Output) -> None:
    W, C, tau, eps, max_iter, metric, gradient, impl = inputs
    options = ClusterOptions(eps=eps, max_iter=max_iter, metric=metric, gradient=gradient, impl=impl)
    _save(ctx, W, C, tau, options, output)


def _operator_gradients(ctx: Any, G: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, G, _compiled_backward), None, None, None, None, None


_operator.register_autograd(_operator_gradients, setup_context=_save_operator)
