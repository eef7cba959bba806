"""The uncompressed network teaches the compressed one: no labels needed."""

import copy
import math
from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .clustered import Clustered


def teacher(model: nn.Module) -> nn.Module:
    """A frozen copy of the model, in evaluation mode, to take before `compress_`."""
    if any(isinstance(module, Clustered) for module in model.modules()):
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


def _logits(output: Any, whose: str) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(f"distill needs the {whose}'s logits, a tensor or an output with .logits, got {type(output)}")
    return logits.float() if logits.element_size() < 4 else logits
