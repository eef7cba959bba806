"""The trace of the Hessian of a loss for each of several tensors, by Hutchinson's estimator."""

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

NO_SECOND_DERIVATIVE = re.compile("not implemented|differentiate twice|double backward")


class NoSecondDerivative(RuntimeError):
    """An operation between the tensors and the loss can be differentiated once only; the message is PyTorch's."""


def trace_samples(
    loss: Tensor, tensors: Sequence[Tensor], count: int, generator: torch.Generator
) -> Iterator[list[float]]:
    """`count` lists with a number for each tensor, whose mean is the trace of the second derivative by this tensor.

    Each is from one product of the Hessian H of all tensors with a random vector v of signs: the part of v * Hv that
    belongs to a tensor, added up.  The products of different signs have mean 0, so what remains is the diagonal.  The
    variance of a tensor's number is 2 |H_ii|^2 off the diagonal, and |H_ij|^2 for every other tensor j.

    `loss` is a number with its gradient; `generator` is on the CPU.  NoSecondDerivative where an operation has none.
    """
    gradients = torch.autograd.grad(loss, list(tensors), create_graph=True, allow_unused=True)
    # A tensor on which the loss depends linearly, or not at all, has no second derivative, and H has zeros for it.
    curved = [i for i, gradient in enumerate(gradients) if gradient is not None and gradient.requires_grad]
    _check_graph([gradients[i] for i in curved])
    for _ in range(count):
        signs = [_signs(tensor, generator) for tensor in tensors]
        products: Sequence[Tensor | None] = [None] * len(tensors)
        if curved:
            try:
                products = torch.autograd.grad(
                    [gradients[i] for i in curved],
                    list(tensors),
                    [signs[i] for i in curved],
                    retain_graph=True,
                    allow_unused=True,
                )
            except RuntimeError as error:
                if NO_SECOND_DERIVATIVE.search(str(error)) is None:  # such as too little memory
                    raise
                raise NoSecondDerivative(str(error).splitlines()[0]) from error
        yield [
            0.0 if product is None else float((product * v).sum(dtype=torch.float64))
            for product, v in zip(products, signs, strict=True)
        ]


def _check_graph(gradients: Sequence[Tensor]) -> None:
    """NoSecondDerivative where the gradients went through a function that is marked as differentiable once.

    PyTorch leaves a node in the graph that raises when it is reached, but no path leads from there to the tensors, so
    a product with the Hessian would not reach it and silently leave out what goes through the function.
    """
    waiting = [gradient.grad_fn for gradient in gradients]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":
            raise NoSecondDerivative("a function that is marked with @once_differentiable")
        waiting.extend(following for following, _ in node.next_functions)


def _signs(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """-1 or 1 for each value of the tensor, the same ones on every device."""
    drawn = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8)
    return (2 * drawn - 1).to(tensor.device, tensor.dtype)
