"""The parametrization: W -> W~ in training, W -> its nearest centroids in evaluation.

`Clustered` knows tensors, not layers: `torch.nn.utils.parametrize` puts it on any parameter.
"""

import math

import torch
from torch import Tensor, nn

from .functional import assign, check_options, check_tau, cluster, from_vectors, init_centroids, to_vectors

MAX_BITS = 12
HOT, COLD = 2.0, 0.1  # tau="auto" goes from HOT to COLD times the squared error per weight


class Clustered(nn.Module):
    """Replaces a weight by its differentiable clustering (training) or its nearest centroids (evaluation).

    Training mode returns `cluster(weight, ...)`, with gradient.  Evaluation mode, or a weight that is
    frozen, returns the snapped weight: nearest centroids of 16 bit, exactly what the file will hold.

    The clustering is a function of the weight and of `start`.  The centroids move on only when the weight
    is not the one that was clustered last: reading it again, activation checkpointing, gradient
    accumulation or a forward pass without gradient change nothing.  That test is a checksum of the bits,
    made on the device: it needs no hook, holds for any optimizer, and resumes from a checkpoint.

    Buffers, all of fixed shape and part of the state_dict; rebound, never written in place, because the
    graphs of earlier forward passes hold on to them:
        C       (k, d)  the newest centroids: what evaluation and `codes` use
        start   (k, d)  the centroids that the present weight was clustered from
        seen    ()      the checksum of that weight
        step    ()      how often the weight has changed: the clock of tau="auto"
        unit    ()      the mean squared error per weight of the first clustering: the scale of tau="auto"
    """

    def __init__(
        self,
        weight: Tensor,
        bits: int,
        dim: int = 1,
        *,
        tau: float | str = "auto",
        steps: int | None = None,
        eps: float = 1e-4,
        max_iter: int = 5,
        metric: str = "sqeuclidean",
        init: str = "kmeans",
        seed: int = 0,
        impl: str = "auto",
    ):
        super().__init__()
        check_bits_dim(bits, dim)
        check_schedule(tau, steps)
        check_options(1.0 if tau == "auto" else tau, eps, max_iter, metric, impl)
        check_weight(weight)
        self.bits, self.dim, self.shape = bits, dim, weight.shape
        self.tau, self.steps = tau, steps
        self.eps, self.max_iter, self.metric, self.impl = eps, max_iter, metric, impl
        W = to_vectors(weight.detach(), dim)
        C = init_centroids(W, 2**bits, init=init, seed=seed)
        self.register_buffer("C", C)
        self.register_buffer("start", C.clone())
        self.register_buffer("seen", checksum(weight))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=weight.device))
        self.register_buffer("unit", squared_error(W, C))

    def forward(self, weight: Tensor) -> Tensor:
        if not (self.training and weight.requires_grad):
            return self.snapped(weight)
        seen = checksum(weight)
        changed = seen != self.seen
        start = torch.where(changed, self.C, self.start)
        step = self.step + changed
        W_tilde, C, _ = cluster(
            weight,
            start,
            tau=self.temperature(step),
            eps=self.eps,
            max_iter=self.max_iter,
            metric=self.metric,
            impl=self.impl,
        )
        self.C, self.start, self.seen, self.step = C, start, seen, step
        return W_tilde

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Assigning to the attribute assigns the weight underneath."""
        return weight

    def temperature(self, step: Tensor) -> Tensor | float:
        """tau after `step` changes of the weight."""
        if self.tau != "auto":
            return self.tau
        progress = (step / self.steps).clamp(max=1).to(self.unit.dtype)
        return self.unit * HOT * (COLD / HOT) ** progress

    @torch.no_grad()
    def codes(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The centroids in the precision of the file, `(k, dim)`, and each vector's index, `(n,)` int64."""
        C = self.C.to(stored_dtype(weight.dtype))
        return C, assign(to_vectors(weight, self.dim), C)

    @torch.no_grad()
    def snapped(self, weight: Tensor) -> Tensor:
        """The weight with every vector replaced by its nearest centroid."""
        C, codes = self.codes(weight)
        return from_vectors(C[codes].to(weight.dtype), weight.shape)

    def _apply(self, fn, recurse=True):
        # model.half() and model.bfloat16() are for weights: centroids of 16 bit would not move any more.
        def keep_precision(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return tensor.to(result.device) if result.dtype in (torch.float16, torch.bfloat16) else result

        return super()._apply(keep_precision, recurse)

    def extra_repr(self) -> str:
        return f"{self.bits}/{self.dim}, k={2**self.bits}, tau={self.tau}"


def checksum(weight: Tensor) -> Tensor:
    """`()` int64: the sum of the bit patterns, whatever the order in memory.

    Two different weights have the same sum about never; where they do, the centroids move a step late.
    """
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return weight.detach().view(integer).sum(dtype=torch.int64)


def squared_error(W: Tensor, C: Tensor) -> Tensor:
    """`()`: the mean squared distance to the nearest centroid, per weight; positive even where all is exact."""
    W = W[:: max(1, len(W) >> 18)].to(C.dtype)
    error = (W - C[assign(W, C)]).square().mean()
    return torch.maximum(error, 1e-6 * W.square().mean() + 1e-12)


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit dtype that holds the centroids of a weight of this dtype."""
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16


def check_bits_dim(bits: int, dim: int) -> None:
    if not isinstance(bits, int) or bits is True or not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits must be an integer from 1 to {MAX_BITS}, got {bits!r}")
    if not isinstance(dim, int) or dim is True or dim < 1:
        raise ValueError(f"dim must be an integer of at least 1, got {dim!r}")


def check_schedule(tau: float | str, steps: int | None) -> None:
    if isinstance(tau, str):
        if tau != "auto":
            raise ValueError(f'tau must be "auto" or a positive number, got {tau!r}')
        if not isinstance(steps, int) or steps is True or steps < 1:
            raise ValueError(
                f'tau="auto" anneals over the training: say how many optimizer steps you will train, '
                f"steps=<an integer of at least 1>, got steps={steps!r}; or give tau as a number"
            )
    else:
        check_tau(tau)


def check_weight(weight: Tensor, name: str = "the weight") -> None:
    """Raise unless the tensor can be clustered: floating point, not empty, finite, within 16-bit range."""
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise TypeError(f"{name} is {weight.dtype}: only float64, float32, bfloat16 and float16 can be clustered")
    if weight.numel() == 0:
        raise ValueError(f"{name} is empty, shape {tuple(weight.shape)}: there is nothing to cluster")
    if weight.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values: load the weights before compressing them")
    largest = float(weight.detach().abs().amax())  # NaN wins over everything
    if not math.isfinite(largest):
        raise ValueError(f"{name} holds NaN or infinite values: repair the weights before compressing them")
    if largest > torch.finfo(stored_dtype(weight.dtype)).max:
        raise ValueError(f"{name} holds values up to {largest:.3g}, beyond the range of 16-bit centroids: keep it")
