"""The uncompressed network teaches the compressed one: no labels needed."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ..modelling.parameters import clusterings
from .batchnorm import feed


def teacher(model: nn.Module) -> nn.Module:
    """A frozen copy of the model, in evaluation mode, to take before `compress_`."""
    if clusterings(model):
        raise ValueError("the model is compressed already: make the teacher first, teacher = dkm.teacher(model)")
    return copy.deepcopy(model).eval().requires_grad_(False)


def distill(student: Any, teacher: Any, *, temperature: float = 1.0) -> Tensor:
    """`(..., classes), (..., classes) -> ()`: how far the student's distribution is from the teacher's.

    The Kullback-Leibler divergence KL(teacher || student) of the softmax of logits / temperature, averaged
    over all but the last dimension, times temperature^2, which keeps the size of the gradient.  Logits are
    tensors, or outputs that have them as `.logits` (transformers).  Differentiable in the student's; the
    arithmetic is at least float32.
    """
    if not isinstance(temperature, Real) or not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a positive finite number, got {temperature!r}")
    ours, theirs = _logits(student, "student"), _logits(teacher, "teacher").detach()
    if ours.shape != theirs.shape or ours.ndim < 1 or not ours.numel():
        raise ValueError(
            f"distill needs logits (..., classes) of one shape, got {tuple(ours.shape)} from the student "
            f"and {tuple(theirs.shape)} from the teacher"
        )
    ours, theirs = ((logits / temperature).log_softmax(-1) for logits in (ours, theirs))
    divergence = F.kl_div(ours, theirs, log_target=True, reduction="sum")
    return divergence * (temperature**2 * ours.shape[-1] / ours.numel())


def _logits(output: Any, whose: str, call: str = "distill") -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(f"{call} needs the {whose}'s logits, a tensor or an output with .logits, got {type(output)}")
    return logits.float() if logits.element_size() < 4 else logits


def probe(output: Any, generator: torch.Generator) -> Tensor:
    """`()`: a random number; the mean square of its derivatives is the second derivative of the divergence of answers.

    The second derivative of the divergence by the logits is diag(p) - p p', for the probabilities p.  A random vector
    of which this is the covariance, times the logits, makes such a number.
    """
    logits = _logits(output, "model", "calibrate_")
    roots = logits.detach().softmax(-1).sqrt()
    signs = torch.randint(0, 2, logits.shape, generator=generator, dtype=torch.int8).to(logits.device)
    noise = roots * (2 * signs - 1)
    noise = noise - roots.square() * (roots * noise).sum(-1, keepdim=True)
    return (noise * logits).sum() * (logits.shape[-1] / logits.numel()) ** 0.5


PROBES = 4  # at least; with two, what the weights of small tensors are worth is known to half of it only


def divergence(
    model: nn.Module, batches: Iterable[Any], *, forward: Callable[[nn.Module, Any], Any] | None = None
) -> "Divergence":
    """A `loss` for `dkm.plan(model, size=..., loss=...)` that needs no labels: how far the model's answers move.

    It is the Kullback-Leibler divergence from what the model answers now, averaged over the batches.  A batch is what
    `recalibrate_` takes; an answer is logits, or has `.logits`.  Batch norm uses the statistics of each batch, because
    they are re-estimated after compression, and with the old ones compression would look worse than it is.
    """
    batches = list(batches)
    if not batches:
        raise ValueError("divergence needs at least one batch, got none: an exhausted iterator?")
    return Divergence(model, batches, forward)


class Divergence:
    """See `divergence`.  It also tells how it curves, so that a plan needs few evaluations of it."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], forward: Callable[[nn.Module, Any], Any] | None):
        self.batches, self.forward = batches, forward
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        with torch.no_grad():
            self.before = [_logits(self._answer(model, batch), "teacher") for batch in batches]

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> Tensor:
        """How far the answers are from those before."""
        return torch.stack([term() for term in self.terms(model)]).mean()

    def terms(self, model: nn.Module) -> list[Callable[[], Tensor]]:
        """The same of each batch, as functions that compute it, with gradient where that is enabled."""

        def term(batch: Any, old: Tensor) -> Tensor:
            return distill(self._answer(model, batch), old)

        return [partial(term, *pair) for pair in zip(self.batches, self.before, strict=True)]

    @property
    def passes(self) -> int:
        """How many numbers `probes` gives."""
        return len(self.batches) * -(-PROBES // len(self.batches))

    def probes(self, model: nn.Module) -> Iterator[Tensor]:
        """Random numbers, always the same ones; the mean of the squares of their derivatives by a weight is the second
        derivative of the divergence by this weight, as Gauss and Newton approximate it.
        """
        generator = torch.Generator().manual_seed(0)
        for i in range(self.passes):
            yield probe(self._answer(model, self.batches[i % len(self.batches)]), generator)

    def _answer(self, model: nn.Module, batch: Any) -> Any:
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        modes = {module: module.training for module in model.modules()}
        try:
            model.eval()
            for norm in norms:
                norm.train()
                norm.track_running_stats = False  # use the batch's own statistics, and leave the running ones alone
            return feed(model, batch, self.device) if self.forward is None else self.forward(model, batch)
        finally:
            for norm in norms:
                norm.track_running_stats = True
            for module, mode in modes.items():
                module.training = mode
