"""Measuring a model with some of its tensors replaced: its loss, and how the loss changes with each of them."""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..foundation.errors import PlanError
from ..modelling.hessian import NoSecondDerivative, trace_samples
from .candidates import Candidate, Original

WORST = 1e9  # the cost of a loss that is not finite
KMEANS, GRADIENT, LOSS = "k-means", "gradients", "losses"  # what the work consists of

Loss = Callable[[nn.Module], Any]
Combination = Sequence[Candidate | None]  # one per tensor; None: as it was
Measured = MutableMapping[str, list[float]]


@runtime_checkable
class SecondOrder(Protocol):
    """A loss that also tells how it curves: `dkm.divergence` makes one."""

    passes: int  # how many numbers `probes` gives

    def __call__(self, model: nn.Module) -> Any:
        """The loss."""

    def probes(self, model: nn.Module) -> Iterator[Tensor]:
        """Random numbers that depend on the weights.  The mean of the squares of their derivatives by a weight is the
        second derivative of the loss by this weight, as Gauss and Newton approximate it."""


@runtime_checkable
class Terms(Protocol):
    """A loss that is the mean of several terms, one for each batch, which need not be in memory together."""

    def terms(self, model: nn.Module) -> Sequence[Callable[[], Tensor]]:
        """Functions, each of which computes a term with its gradient."""


@dataclass
class Progress:
    """How much of the work is done, of each kind; `total` is an estimate, and is right at the end."""

    listener: Callable[["Progress"], None]
    done: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    last: str = ""  # the kind of what has just been done; empty where it was done before, and took no time

    def expect(self, kind: str, count: int) -> None:
        """So many more will have to be done."""
        self.total[kind] = self.total.get(kind, 0) + count

    def add(self, kind: str, count: int = 1, *, now: bool = True) -> None:
        """So many are done, just now or before."""
        self.done[kind] = self.done.get(kind, 0) + count
        self.total[kind] = max(self.total.get(kind, 0), self.done[kind])
        self.last = kind if now else ""
        self.listener(self)


class Bench:
    """Measures the model with some of its tensors replaced, and puts everything back at the end.

    It remembers what the tensors hold, so that a measurement writes only what differs from the one before.  What is in
    `measured` already is not measured again.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        tensors: Sequence[nn.Parameter],
        tested: Sequence[Original],
        measured: Measured,
        progress: Progress,
    ):
        self.model, self.measure, self.tensors, self.tested = model, loss, tensors, tested
        self.measured, self.progress = measured, progress
        self.uncompressed: Combination = [None] * len(tensors)
        self.present = self.uncompressed
        self.room = 0  # for so many more snapped weights, which are remembered
        self.snapped: dict[Candidate, Tensor] = {}
        self.modes = {part: part.training for part in model.modules()}

    def __enter__(self) -> "Bench":
        self.model.eval()
        return self

    @torch.no_grad()
    def __exit__(self, *error: object) -> None:
        for tensor, own in zip(self.tensors, self.tested, strict=True):
            tensor.copy_(own.weight)
        for part, mode in self.modes.items():
            part.training = mode

    def loss(self, wanted: Combination) -> float:
        """The loss with these candidates in the place of the tensors; None leaves a tensor as it was."""
        key = _key(LOSS, wanted)
        known = self.measured.get(key)
        if known is None:
            self._put(wanted)
            self.measured[key] = [self._measure()]
        self.progress.add(LOSS, now=known is None)
        return self.measured[key][0]

    @torch.no_grad()
    def _measure(self) -> float:
        value = self.measure(self.model)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise TypeError(f"loss(model) must return a number, lower is better, got {value!r}") from None

    def cost(self, i: int, candidate: Candidate, others: Combination, base: float) -> float:
        """How much more than `base` the loss is with this candidate for tensor i, and the others as given."""
        cost = self.loss([*others[:i], candidate, *others[i + 1 :]]) - base
        return cost if math.isfinite(cost) else WORST

    def expected_costs(self, choices: Sequence[Sequence[Candidate]], at: Combination) -> list[list[float]]:
        """What each candidate costs alone, as the second order of the loss says.

        The loss is differentiated where the tensors are as given: other tensors that are clustered make it more, or
        less, sensitive to this one.  It must have `probes`.
        """
        labels = [[candidate.row.label for candidate in options] for options in choices]
        key = _key(GRADIENT, at, str(labels))
        known = self.measured.get(key)
        if known is None or len(known) != sum(map(len, labels)):
            self._put(at)
            curvatures = self._curvatures()
            known = [
                _half_product(candidate, curvature)
                for options, curvature in zip(choices, curvatures, strict=True)
                for candidate in options
            ]
            self.measured[key] = known
        else:
            self.progress.add(GRADIENT, getattr(self.measure, "passes", 1), now=False)
        numbers = iter(known)
        return [[next(numbers) for _ in own] for own in labels]

    def _curvatures(self) -> list[Tensor]:
        """The second derivative of the loss by each weight of the samples."""
        assert isinstance(self.measure, SecondOrder)
        found = [torch.zeros_like(own.sampled(own.weight), dtype=torch.float32) for own in self.tested]
        count = 0

        def add(own: Original, into: Tensor) -> Callable[[Tensor], None]:
            # A hook, which runs as soon as this tensor has its gradient: they are never all in memory.  And where a
            # signal is to end the process, Python gets to know of it in a hook, and not in the midst of a pass.
            def hook(gradient: Tensor) -> None:
                whole = gradient.to_dense() if gradient.is_sparse else gradient
                into.add_(own.sampled(whole).float().square_())

            return hook

        with self._gradients(), contextlib.ExitStack() as after:
            for tensor, own, into in zip(self.tensors, self.tested, found, strict=True):
                after.enter_context(_removed(tensor.register_hook(add(own, into))))
            for number in self.measure.probes(self.model):
                if number.requires_grad:  # else no tensor has any influence
                    torch.autograd.grad(number, list(self.tensors), allow_unused=True)
                count += 1
                self.progress.add(GRADIENT)
        return [total / max(1, count) for total in found]

    def traces(self, vectors: int, seed: int) -> list[float]:
        """The trace of the second derivative of the loss by each tensor of the uncompressed model, from at least so
        many products with random vectors: one for each term of the loss, where there are more."""
        key = _key(GRADIENT, self.uncompressed, f"traces {vectors} {seed}")
        if key in self.measured:
            self.progress.add(GRADIENT, vectors, now=False)
            return list(self.measured[key])
        self._put(self.uncompressed)
        terms = (
            self.measure.terms(self.model) if isinstance(self.measure, Terms) else [lambda: self.measure(self.model)]
        )
        each = -(-vectors // len(terms))
        self.progress.expect(GRADIENT, each * len(terms) - vectors)
        generator = torch.Generator().manual_seed(seed)
        samples = []
        # the fast kernels of attention have no second derivative
        with self._gradients(), sdpa_kernel(SDPBackend.MATH):
            for term in terms:
                for sample in _trace_samples(term(), self.tensors, each, generator):
                    samples.append(sample)
                    self.progress.add(GRADIENT)
        found = [sum(own) / len(samples) for own in zip(*samples, strict=True)]
        if not all(map(math.isfinite, found)):
            raise PlanError("the second derivative of the loss is not finite: choose with another allocator than hawq")
        self.measured[key] = found
        return list(found)

    @contextlib.contextmanager
    def _gradients(self) -> Iterator[None]:
        """Every tensor can be differentiated by, also a frozen one."""
        with contextlib.ExitStack() as after:
            for tensor in self.tensors:
                after.callback(tensor.requires_grad_, tensor.requires_grad)
                tensor.requires_grad_(True)
            after.enter_context(torch.enable_grad())
            yield

    @torch.no_grad()
    def _put(self, wanted: Combination) -> None:
        for tensor, own, old, new in zip(self.tensors, self.tested, self.present, wanted, strict=True):
            if old is not new:
                tensor.copy_(own.weight if new is None else self._values(new))
        self.present = list(wanted)

    def _values(self, candidate: Candidate) -> Tensor:
        values = self.snapped.get(candidate)
        if values is None:
            values = candidate.values()
            if values.numel() <= self.room:
                self.room -= values.numel()
                self.snapped[candidate] = values
        return values


@contextlib.contextmanager
def _removed(hook: Any) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()


def _trace_samples(
    value: Any, tensors: Sequence[Tensor], count: int, generator: torch.Generator
) -> Iterator[list[float]]:
    """`trace_samples` of what a loss returned, with errors that say what to do."""
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise PlanError(
            "hawq differentiates the loss twice: return it as a tensor with its gradient, such as "
            f"F.cross_entropy(model(x), y), without no_grad, detach or item; got {value!r}"
        )
    try:
        yield from trace_samples(value, tensors, count, generator)
    except NoSecondDerivative as error:
        raise PlanError(
            f"hawq differentiates the loss twice, and an operation of this model can be differentiated once only "
            f"({error}): let the model compute it in plain PyTorch, such as attention with "
            'attn_implementation="eager", or choose with another allocator'
        ) from error


def _half_product(candidate: Candidate, curvature: Tensor) -> float:
    """The second order of a Taylor series, over all of the tensor."""
    if candidate.row.spec is None:
        return 0.0
    total = candidate.tested.share * float((candidate.squares() * curvature).sum()) / 2
    return min(total, WORST) if math.isfinite(total) else WORST


def _key(kind: str, combination: Combination, more: str = "") -> str:
    """A name for a measurement of a model: what the tensors are replaced with, by a checksum."""
    parts = [f"{own.row.name}:{own.row.label}" for own in combination if own is not None]
    return f"{kind} {hashlib.sha256(repr((parts, more)).encode()).hexdigest()[:32]}"
