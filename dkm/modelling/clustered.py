"""The parametrization of a clustered weight, whatever the method: W -> W~ in training, W -> nearest centroid after it.

`Clustered` knows tensors, not layers: `torch.nn.utils.parametrize` puts it on any parameter.  It says when the
centroids advance, what evaluation computes, and what the file holds.  A method (`methods/`) says how W~ is made.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.parametrize import ParametrizationList

from ..clustering.assign import assign, assign_groups
from ..clustering.cluster import Clustering
from ..clustering.decode import Outliers, products
from ..clustering.groups import Group, Grouping
from ..clustering.initialize import init_centroids
from ..clustering.initialize_groups import init_group_centroids
from ..clustering.options import LoopOptions, MethodOptions, StartOptions
from ..clustering.precision import (
    MAX_BITS,
    PLAIN_EXPONENTS,
    check_weight,
    exponent_of,
    stored_centroids,
)
from ..clustering.snapping import coded_values, nearest_codes, row_scales, surely_finite
from ..clustering.spec import Spec
from ..clustering.vectors import to_vectors
from ..foundation.errors import MethodError
from .checksum import checksum
from .clock import Clock, in_backward
from .dtensors import is_sharded, whole
from .needs import Needs
from .snapped import Memory, StraightThrough, guarded

ALL = slice(None)
TYPICAL_EXPONENT = -5  # of the weights that eps = 1e-4 is meant for: their root mean square is about 0.03
SCALED_EXPONENT = -2  # of weights whose rows are divided by their largest value


class Moment(NamedTuple):
    """Where the training of a weight is."""

    seen: Tensor  # () int64: the checksum of the weight
    start: Tensor  # (k, d): the centroids to cluster it from
    step: Tensor  # () int64: the step of the training, as far as this weight knows
    clock: Tensor  # () int64: the count of the model's clock


class Clustered(Needs, ABC):
    """The abstract base of a clustered weight: its clustering in training, its nearest centroids in evaluation.

    In training mode, reading the weight gives what the method's `cluster` computes from it, with gradient.  In
    evaluation mode, and if the weight is frozen, reading it gives the snapped weight: every vector is replaced by its
    nearest centroid in 16 bits, which is what the file holds.  A gradient that arrives at a snapped weight passes
    straight through.  So training in evaluation mode, for example to keep batch norm still, trains hard clusters.

    A clustering is a function of the weight, of the centroids `start` and of the step.  The centroids advance only when
    the weight differs from the one that was clustered last, or when other weights of the model have seen a new step.
    Reading it again, activation checkpointing, gradient accumulation and a forward pass without gradient change
    nothing.  A checksum of the weight's bits, computed on the device, detects the change.  It needs no hook, works with
    any optimizer, and is part of a checkpoint.  The weights of a model share a `clock`.

    A subclass declares its `Options`, implements `cluster`, and is registered under a name with `dkm.register_method`.
    These buffers have a fixed shape and are part of the state_dict:

        C       (k, d)  the newest centroids, which evaluation and `codes` use; (groups, k, d) where there are groups
        start   (k, d)  the centroids from which the present weight was clustered; the same
        seen    ()      the checksum of that weight
        step    ()      the step of the training that the weight has seen last, which is the time of a schedule
        unit    ()      the mean squared error per weight of the first clustering, which is the unit of a temperature;
                        (groups,) where there are groups
        exponent ()     e, such that the root mean square of the first weight is about 2^e
        scales  (rows,) what the rows are divided by, in the precision of the file; only if the spec is scaled

    The attribute `iterations`, a () tensor, says how many iterations the last clustering took; 0 before the first one.

    A weight of an extreme scale (see `PLAIN_EXPONENTS`) is divided by 2^e before it is clustered, and what comes out is
    multiplied by it; both are exact.  For such a weight C, start, unit and everything that a method computes belong to
    the divided weight, which `scaled` returns.  `shift` is that e, and 0 for all other weights.  Rows that have scales
    are divided by them, after that.
    """

    Options: ClassVar[type[MethodOptions]] = StartOptions
    paper: ClassVar[str] = ""  # author and year
    clusters_groups: ClassVar[bool] = False  # whether `cluster` knows groups
    made_at_once: ClassVar[bool] = False  # whether the weights of a model may be made in threads: no global generator
    only_scalars: ClassVar[bool] = False  # whether vectors have one weight
    most_bits: ClassVar[int] = MAX_BITS

    C: Tensor
    start: Tensor
    seen: Tensor
    step: Tensor
    unit: Tensor
    exponent: Tensor
    scales: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bits: int,
        dim: int = 1,
        *,
        scaled: bool = False,
        group: Group | None = None,
        float8: bool = False,
        start_from: Tensor | None = None,  # the first centroids, where they are known already
        **options: Any,
    ):
        super().__init__()
        self.spec = Spec(bits, dim, scaled, group, float8)
        self.options = self.Options(**options)
        if is_sharded(weight):
            raise ValueError("the weight is a DTensor: call dkm.compress_ before fully_shard")
        check_weight(weight)
        if self.spec.is_absurd(weight.shape):
            advice = "choose a smaller dim" if group is None else "choose larger groups, a smaller dim or fewer bits"
            raise ValueError(
                f"{self.spec.label} has far more centroids than {weight.numel()} weights have values: {advice}"
            )
        if cannot := self.cannot(self.spec):
            raise MethodError(f'method="{self.method}" {cannot}, got {self.spec.label}')
        self.bits, self.dim, self.shape = bits, dim, weight.shape
        self.grouping = self.spec.grouping(weight.shape)
        exponent = exponent_of(weight)
        self.register_buffer("exponent", torch.tensor(exponent, dtype=torch.int32, device=weight.device))
        self.adapt_to_scale(exponent)
        self.register_buffer("scales", row_scales(weight * 2.0**-self.shift) if scaled else None)
        C, unit = self.first_clustering(self.scaled(weight.detach()), start_from)
        self.register_buffer("C", C)
        self.register_buffer("start", C.clone())
        self.register_buffer("seen", checksum(weight))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=weight.device))
        self.register_buffer("unit", unit)
        self.begin_needs(weight.device)
        self.clock = Clock()  # of its own, unless it becomes a part of a model
        self.memory = Memory()
        self.iterations = torch.zeros_like(self.step)  # no buffer: nothing to save, nothing to send to other ranks

    # --- the scale of the weight

    def adapt_to_scale(self, exponent: int) -> None:
        """The weight is about 2^exponent: decide, on the host, what follows from that.

        `loop` is the options with `eps` for the scaled weight.
        """
        # centroids in 8 bits have an even smaller range than those in 16
        self.shift = 0 if exponent in PLAIN_EXPONENTS and not self.spec.float8 else exponent
        self.loop = self.options
        if isinstance(self.options, LoopOptions):
            # The paper's eps is absolute, and stays so for weights of an ordinary scale.
            if self.relative_eps and self.spec.scaled:
                eps = self.options.eps * 2.0 ** (SCALED_EXPONENT - TYPICAL_EXPONENT)
            else:
                relative = 2.0 ** (exponent - TYPICAL_EXPONENT) if self.shift and self.relative_eps else 1.0
                eps = self.options.eps * relative * 2.0**-self.shift
            self.loop = replace(self.options, eps=eps)  # type: ignore[call-arg]

    @property
    def relative_eps(self) -> bool:
        """Whether, for a weight of an extreme scale, `eps` is meant for one of typical scale and is scaled alike."""
        return True

    def scaled(self, weight: Tensor, rows: slice = ALL) -> Tensor:
        """The weight as methods see it: divided by 2^shift, which is exact, and by the scales of its rows.

        Where `weight` is a shard, `rows` says which rows of the whole weight it holds.
        """
        weight = weight if not self.shift else weight * 2.0**-self.shift
        # by float32 scales: in 16 bits, the quotient would lose what the weight has
        return weight if self.scales is None else weight / self._row_by_row(weight, rows)

    def unscaled(self, values: Tensor, rows: slice = ALL) -> Tensor:
        """The inverse of `scaled`; where rows have scales, in at least float32."""
        values = values if self.scales is None else values * self._row_by_row(values, rows)
        return values if not self.shift else values * 2.0**self.shift

    def _row_by_row(self, weight: Tensor, rows: slice) -> Tensor:
        assert self.scales is not None
        return self.scales[rows].view(-1, *(1,) * (weight.ndim - 1))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = prefix + "exponent"
        if key not in state_dict and prefix + "C" in state_dict:
            # Checkpoints without exponents hold the centroids of the weight itself, whatever its scale.
            state_dict[key] = torch.zeros((), dtype=torch.int32)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.clock.loaded(self.step, load=args[-1])
        self.needs_loaded()
        if not self.exponent.is_meta:
            self.adapt_to_scale(int(self.exponent))

    # --- what a method decides

    @classmethod
    def cannot(cls, spec: Spec) -> str:
        """What the method has against a spec, and what to write instead; "" if nothing."""
        if spec.group is not None and not cls.clusters_groups:
            return f'has one codebook per tensor: leave out "per {spec.group}", or use method="dkm"'
        if spec.dim > 1 and cls.only_scalars:
            return f"clusters single weights: give dim 1, as in {min(spec.bits, cls.most_bits)}/1"
        if spec.bits > cls.most_bits:
            bits = f"{cls.most_bits} bit{'s' * (cls.most_bits > 1)}"
            return f'has {bits} per weight at most: name the tensor with {cls.most_bits} or "keep"'
        return ""

    @abstractmethod
    def cluster(self, weight: Tensor, start: Tensor, step: Tensor) -> Clustering:
        """The clustering of the scaled weight from the centroids `start` `(k, d)`, after `step` steps.  Changes
        nothing."""

    def initial_centroids(self, W: Tensor) -> Tensor:
        """`(n, d) -> (k, d)`: where the centroids start."""
        return init_centroids(W, 2**self.bits, **self.from_options())

    def from_options(self) -> dict[str, Any]:
        """What the options say about the first centroids, of a method that does not choose them itself."""
        assert isinstance(self.options, StartOptions)
        return dict(init=self.options.init, seed=self.options.seed)

    def first_clustering(self, weight: Tensor, start_from: Tensor | None) -> tuple[Tensor, Tensor]:
        """Where the centroids start, and the squared error per weight, of the scaled weight; for each group.

        Where the centroids are known already, they are `start_from`; see `first_centroids.py`.
        """
        if self.spec.group is None:
            W = to_vectors(weight, self.dim)
            C = self.initial_centroids(W) if start_from is None else start_from
            return C, squared_error(W, C)
        C = init_group_centroids(weight, 2**self.bits, self.grouping, **self.from_options())
        return C, squared_errors(weight, C, self.grouping)

    def temperature(self, step: Tensor) -> Tensor | float | None:
        """tau after `step` changes of the weight: a number or a () tensor; None for a method without temperature."""
        return None

    @property
    def anneals(self) -> bool:
        """Whether the method changes over the training, so that `steps` matters."""
        return False

    def set_steps(self, steps: int) -> None:
        """Change the number of optimizer steps of the training.  Only methods that anneal use it."""

    def join(self, first: "Clustered") -> None:
        """Become a part of the model whose first clustered weight is `first`: share what all of its weights share."""
        self.clock = first.clock

    def shard(self, original: Any) -> None:
        """Called when FSDP2 has split the weight; `original` is its DTensor."""
        raise NotImplementedError(
            f'method="{self.method}" cannot be sharded with fully_shard: use DistributedDataParallel, or method="dkm"'
        )

    # --- the parametrization

    def forward(self, weight: Tensor) -> Tensor:
        """What the module computes with: W~ in training, the snapped weight otherwise."""
        if self.needs:
            if self.dense:
                return weight
            self.check_needs(weight)
        if not (self.training and weight.requires_grad):
            if weight.requires_grad and torch.is_grad_enabled():
                return StraightThrough.apply(weight, self.snapped(weight))
            return guarded(self.memory.recall(self.snapped, weight, chain(self.parameters(), self.buffers())))
        if getattr(self, "_is_replica", False):
            raise RuntimeError(
                "nn.DataParallel trains copies of the model that it throws away after every forward pass, and the "
                "centroids with them: use DistributedDataParallel, a process for each device"
            )
        self.memory.forget()
        return self.soft(weight)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What an assignment to the module's attribute stores: the weight itself."""
        return weight

    def soft(self, weight: Tensor) -> Tensor:
        """W~, with gradient.  The state advances if the weight has changed."""
        now = self.moment(weight)
        W_tilde, C, iterations = self.cluster(self.scaled(weight), now.start, now.step)
        self.advance(C, now, iterations)
        return self.unscaled(W_tilde).to(weight.dtype)

    def moment(self, weight: Tensor, add_up: Callable[[Tensor], Tensor] | None = None, first: int = 0) -> Moment:
        """Where the training of this weight is.  Changes nothing.

        Where `weight` is a shard, `first` is the position of its first value in the whole weight, and `add_up` adds the
        checksums of all shards.
        """
        seen = checksum(weight, first)
        seen = seen if add_up is None else add_up(seen)
        step, clock = self.clock.ahead(self.step, seen != self.seen, in_backward())
        return Moment(seen, torch.where(step != self.step, self.C, self.start), step, clock)

    def advance(self, C: Tensor, now: Moment, iterations: Tensor) -> None:
        """Take on the state after a clustering, in place: a CUDA graph reads where its capture has read."""
        if torch.compiler.is_compiling():  # it has its own ways of keeping a buffer in its place
            self.C, self.start, self.seen, self.step = C, now.start, now.seen, now.step
            self.clock.on(now.clock.device).copy_(now.clock)
            self.iterations = iterations
            return
        with torch.no_grad():
            self.clock.on(now.clock.device).copy_(now.clock)
            self.C.copy_(C)
            self.start.copy_(now.start)
            self.seen.copy_(now.seen)
            self.step.copy_(now.step)
        self.iterations = _outside_of_transforms(iterations)

    @torch.no_grad()
    def codes(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The centroids in the precision of the file, shaped like C, and each vector's index, `(n,)` int64.

        The centroids are those of the scaled weight; `decode` makes the weight of them.  Where there are groups, the
        indices are those of the vectors that count, group after group.
        """
        weight = whole(weight)
        C = self.stored(self.C, weight.dtype)
        return C, nearest_codes(self.scaled(weight), C.to(self.C.dtype), self.grouping)

    def stored(self, C: Tensor, dtype: torch.dtype) -> Tensor:
        """Centroids of a weight of this dtype in the precision of the file."""
        return stored_centroids(C, dtype, self.spec.float8)

    def stored_scales(self, weight: Tensor) -> Tensor | None:
        """The scales of the rows as the file holds them, in 16 bits; None where there are none."""
        return None if self.scales is None else self.scales.half()

    def outliers(self, weight: Tensor) -> Outliers | None:
        """The weights that are no centroid but stay as they are, in evaluation and in the file; None where all are."""
        return None

    @torch.no_grad()
    def snapped(self, weight: Tensor) -> Tensor:
        """The weight with every vector replaced by its nearest centroid, and by NaN where the weight is not finite."""
        weight, (C, codes) = whole(weight), self.codes(weight)
        values = coded_values(codes, self.marked(weight), C.to(self.C.dtype), self.grouping).view(weight.shape)
        scales = self.stored_scales(weight)
        beside = None if scales is None else scales.view(-1, *(1,) * (weight.ndim - 1))
        return products(values, beside, self.shift, weight.dtype)

    # The parts of `snapped`, for a shard too: `rows` and `groups` say which ones of the whole weight it has.

    def marked(self, weight: Tensor, rows: slice = ALL) -> Tensor:
        """The scaled weight, with NaN where the weight is not finite.

        A diverged weight must show: it has a nearest centroid, but that is not what it is.
        """
        scaled = self.scaled(weight, rows)
        return scaled if surely_finite(weight) else torch.where(weight.isfinite(), scaled, torch.nan)

    def nearest(self, W: Tensor, grouping: Grouping, dtype: torch.dtype, groups: slice = ALL) -> Tensor:
        """`(weights,)`: each vector of a `marked` weight of this dtype replaced by the nearest stored centroid."""
        C = self.stored(self.C, dtype).to(self.C.dtype)[groups]
        return coded_values(nearest_codes(W, C, grouping), W, C, grouping)

    def stands_for(self, values: Tensor, dtype: torch.dtype, rows: slice = ALL) -> Tensor:
        """From values of centroids, shaped like the weight, to the weights that they stand for."""
        return products(values, None if self.scales is None else self._row_by_row(values, rows), self.shift, dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Clustered":
        # model.half() and model.bfloat16() are for weights: centroids of 16 bit would not move any more.
        def keep_precision(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return tensor.to(result.device) if result.dtype in (torch.float16, torch.bfloat16) else result

        return super()._apply(keep_precision, recurse)

    def twin(self) -> "Clustered":
        """Another module that is this one in all but identity, for the second name of a tied weight.

        PyTorch's distributed checkpoints visit a module once, and would miss the state under its second name.
        """
        twin = object.__new__(type(self))
        twin.__dict__ = self.__dict__
        return twin

    # Deep copies and pickles remember a dict that they have seen.  So twins, which have one dict, share their copy too.

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        groups = "" if self.spec.group is None else f" x {self.grouping.count}"
        return f"{self.spec.label}, k={2**self.bits}{groups}"


class Chain(ParametrizationList):
    """The parametrizations of a clustered weight.  It notices when FSDP2 replaces the weight by a DTensor."""

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP2 assigns a parameter, instead of writing to `_parameters`, only where __setattr__ is overridden.
        super().__setattr__(name, value)
        if name == "original":
            self._tell_method()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Chain":
        result = super()._apply(fn, recurse)
        self._tell_method()  # model.to(...) makes a new local tensor
        return result

    def _tell_method(self) -> None:
        if is_sharded(original := self._parameters.get("original")):
            clustered = self[0]
            assert isinstance(clustered, Clustered)
            clustered.shard(original)


def _outside_of_transforms(tensor: Tensor) -> Tensor:
    """The tensor that torch.func (grad, vjp) has wrapped: what is kept must not outlive its transform."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def squared_error(W: Tensor, C: Tensor) -> Tensor:
    """`()`: the mean squared distance to the nearest centroid, per weight.

    Never less than a millionth of the mean square, so that it is positive even where every weight is a centroid, and
    never zero, not even where all weights are.
    """
    W = W[:: max(1, len(W) >> 18)].to(C.dtype)
    error = (W - C[assign(W, C)]).square().mean()
    return torch.maximum(error, 1e-6 * W.square().mean()).clamp(min=1e-30)


def squared_errors(weight: Tensor, C: Tensor, grouping: Grouping) -> Tensor:
    """`(groups,)`: `squared_error` of each group, but over all of its weights."""
    V, counted = grouping.split(weight.to(C.dtype)), grouping.counted(weight.device)
    near = C.gather(1, assign_groups(V, C)[:, :, None].expand(-1, -1, grouping.dim))
    weights = (counted.sum(1) * grouping.dim).to(C.dtype)
    # the zeros that fill up a vector count as weights, as in `squared_error`
    error = ((V - near).square() * counted[:, :, None]).sum((1, 2)) / weights
    return torch.maximum(error, 1e-6 * V.square().sum((1, 2)) / weights).clamp(min=1e-30)
