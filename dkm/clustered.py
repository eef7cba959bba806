"""The parametrization: W -> W~ in training, W -> its nearest centroids in evaluation.

`Clustered` knows tensors, not layers: `torch.nn.utils.parametrize` puts it on any parameter.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .functional import (
    Clustering,
    advance,
    assign,
    can_advance,
    check_options,
    cluster,
    from_vectors,
    init_centroids,
    to_vectors,
)
from .sharded import Sharded, is_sharded, whole
from .temperature import AUTO, HOT, Schedule, check_temperature, law

MAX_BITS = 12


class Clustered(nn.Module):
    """Replaces a weight by its differentiable clustering (training) or its nearest centroids (evaluation).

    Training mode returns `cluster(weight, ...)`, with gradient.  Evaluation mode, or a weight that is
    frozen, returns the snapped weight: nearest centroids of 16 bit, exactly what the file will hold.  Where a
    gradient arrives there all the same, it goes straight through: whoever trains in evaluation mode (to keep batch
    norm still) trains hard clusters, not nothing.

    The clustering is a function of the weight and of `start`.  The centroids move on only when the weight
    is not the one that was clustered last: reading it again, activation checkpointing, gradient
    accumulation or a forward pass without gradient change nothing.  That test is a checksum of the bits,
    made on the device: it needs no hook, holds for any optimizer, and resumes from a checkpoint.

    On a GPU all of that, the checksum, the temperature, the clustering, the new state, is one launch: a network has
    many weights, and as operations of PyTorch they would take longer than the network itself.

    Buffers, all of fixed shape and part of the state_dict:
        C       (k, d)  the newest centroids: what evaluation and `codes` use
        start   (k, d)  the centroids that the present weight was clustered from
        seen    ()      the checksum of that weight
        step    ()      how often the weight has changed: the clock of a schedule
        unit    ()      the mean squared error per weight of the first clustering, or for the plain distance what
                        amounts to it: the scale of a schedule
    A parameter, with tau="learn" only:
        log_multiple  (1,)  the logarithm of tau / unit.  Relative, so that weight decay pulls tau to the unit, a
                            sensible temperature, and not to 1; not a scalar, because FSDP refuses those
    `iterations`, a () tensor, is how many the last clustering used; 0 before the first.
    """

    def __init__(
        self,
        weight: Tensor,
        bits: int,
        dim: int = 1,
        *,
        tau: float | str | Schedule = "auto",
        steps: int | None = None,
        eps: float = 1e-4,
        max_iter: int = 5,
        metric: str = "sqeuclidean",
        gradient: str = "unrolled",
        init: str = "kmeans",
        seed: int = 0,
        impl: str = "auto",
    ):
        super().__init__()
        check_bits_dim(bits, dim)
        check_options(1.0, eps, max_iter, metric, impl, gradient)
        check_weight(weight)
        check_temperature(tau, steps, weight.device)
        self.bits, self.dim, self.shape = bits, dim, weight.shape
        self.tau, self.steps = tau, steps
        self.schedule = AUTO if tau == "auto" else tau if callable(tau) else None
        self.eps, self.max_iter, self.metric, self.gradient, self.impl = eps, max_iter, metric, gradient, impl
        W = to_vectors(weight.detach(), dim)
        C = init_centroids(W, 2**bits, init=init, seed=seed)
        self.register_buffer("C", C)
        self.register_buffer("start", C.clone())
        self.register_buffer("seen", checksum(weight))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=weight.device))
        unit = squared_error(W, C)
        if metric == "euclidean":
            # near |w - c| = D a step of the squared distance is 2 D of the plain one, and D^2 is about dim * unit
            unit = (unit / dim).sqrt() / 2
        self.register_buffer("unit", unit)
        if tau == "learn":
            hot = self.unit.new_full((1,), math.log(HOT))
            self.log_multiple = nn.Parameter(hot, requires_grad=weight.requires_grad)
        self.sharded: Sharded | None = None  # where fully_shard has split the weight
        self.iterations = torch.zeros_like(self.step)  # no buffer: nothing to save, nothing to send to other ranks

    def forward(self, weight: Tensor) -> Tensor:
        if self.sharded is not None:
            return self.sharded.read(weight)
        if not (self.training and weight.requires_grad):
            snapped = self.snapped(weight)
            return _StraightThrough.apply(weight, snapped) if weight.requires_grad else snapped
        if getattr(self, "_is_replica", False):
            raise RuntimeError(
                "nn.DataParallel trains copies of the model that it throws away after every forward pass, and the "
                "centroids with them: use DistributedDataParallel, a process for each device"
            )
        if (result := self.in_one_launch(weight)) is not None:
            return result
        seen, start, step = self.moment(weight)
        W_tilde, C, iterations = self.cluster(weight, start, step)
        self.advance(C, start, seen, step, iterations)
        return W_tilde

    def in_one_launch(self, weight: Tensor) -> Tensor | None:
        """What `moment`, `cluster` and `advance` do, where there is a kernel that does it all."""
        temperature = law(self.schedule or self.tau)
        if temperature is None or not can_advance(weight, self.C, self.impl) or type(self).cluster != Clustered.cluster:
            return None
        state = self.C, self.start, self.seen, self.step, self.unit, *temperature, self.steps or 1
        W_tilde, iterations = advance(weight, state, self.eps, self.max_iter, self.metric, self.gradient)
        self.__dict__["iterations"] = iterations
        return W_tilde

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Assigning to the attribute assigns the weight underneath."""
        return weight

    def moment(self, weight: Tensor, add_up: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The weight's checksum, the centroids to cluster it from, and its step.  Changes nothing.

        Where `weight` is a shard, `add_up` adds the checksums of all shards.
        """
        seen = checksum(weight)
        seen = seen if add_up is None else add_up(seen)
        changed = seen != self.seen
        return seen, torch.where(changed, self.C, self.start), self.step + changed

    def cluster(self, weight: Tensor, start: Tensor, step: Tensor) -> Clustering:
        """The clustering of the weight at that moment.  Changes nothing."""
        return cluster(
            weight,
            start,
            tau=self.temperature(step),
            eps=self.eps,
            max_iter=self.max_iter,
            metric=self.metric,
            gradient=self.gradient,
            impl=self.impl,
        )

    def advance(self, C: Tensor, start: Tensor, seen: Tensor, step: Tensor, iterations: Tensor) -> None:
        """Take on the state after a clustering, in place: a CUDA graph reads where its capture has read."""
        if torch.compiler.is_compiling():  # it has its own ways of keeping a buffer in its place
            self.C, self.start, self.seen, self.step, self.iterations = C, start, seen, step, iterations
            return
        with torch.no_grad():
            self.C.copy_(C)
            self.start.copy_(start)
            self.seen.copy_(seen)
            self.step.copy_(step)
        self.iterations = iterations

    def temperature(self, step: Tensor) -> Tensor | float:
        """tau after `step` changes of the weight: a number, or a () tensor."""
        if self.schedule is not None:
            return self.unit * self.schedule((step / self.steps).clamp(max=1))
        if self.tau == "learn":
            return (self.unit * whole(self.log_multiple).exp()).view(())
        return self.tau

    @torch.no_grad()
    def codes(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The centroids in the precision of the file, `(k, dim)`, and each vector's index, `(n,)` int64."""
        weight, C = whole(weight), self.C.to(stored_dtype(weight.dtype))
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


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, snapped: Tensor) -> Tensor:
        return snapped.view_as(snapped)

    @staticmethod
    def backward(ctx, G: Tensor):
        return G, None


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


def check_weight(weight: Tensor, name: str = "the weight") -> None:
    """Raise unless the tensor can be clustered: floating point, not empty, finite, within 16-bit range."""
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise TypeError(f"{name} is {weight.dtype}: only float64, float32, bfloat16 and float16 can be clustered")
    if weight.numel() == 0:
        raise ValueError(f"{name} is empty, shape {tuple(weight.shape)}: there is nothing to cluster")
    if is_sharded(weight):
        raise ValueError(f"{name} is a DTensor: call dkm.compress_ before fully_shard")
    if weight.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values: load the weights before compressing them")
    largest = float(weight.detach().abs().amax())  # NaN wins over everything
    if not math.isfinite(largest):
        raise ValueError(f"{name} holds NaN or infinite values: repair the weights before compressing them")
    if largest > torch.finfo(stored_dtype(weight.dtype)).max:
        raise ValueError(f"{name} holds values up to {largest:.3g}, beyond the range of 16-bit centroids: keep it")
