"""Hutchinson's estimator of the trace of a Hessian, tensor by tensor."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dkm.modelling.hessian import NoSecondDerivative, trace_samples


def mean_and_error(samples: list[list[float]]) -> tuple[Tensor, Tensor]:
    """The mean of each tensor's samples, and its standard error."""
    each = torch.tensor(samples, dtype=torch.float64)
    return each.mean(0), each.std(0) / math.sqrt(len(each))


def draw(loss: Tensor, tensors: list[Tensor], count: int, seed: int = 0) -> list[list[float]]:
    return list(trace_samples(loss, tensors, count, torch.Generator().manual_seed(seed)))


def test_every_sample_is_exact_where_the_hessian_is_diagonal():
    """The square of a sign is 1: nothing random is left."""
    generator = torch.Generator().manual_seed(0)
    diagonals = [torch.rand(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (5,), ())]
    tensors = [torch.randn(d.shape, generator=generator, dtype=torch.float64, requires_grad=True) for d in diagonals]
    loss = sum((d * x.square()).sum() / 2 for d, x in zip(diagonals, tensors, strict=True))
    for sample in draw(loss, tensors, 3):
        assert sample == pytest.approx([float(d.sum()) for d in diagonals], rel=1e-12)


def test_the_mean_is_the_trace_of_a_known_hessian():
    """x' A x / 2 has the Hessian A; the variance of a sample is twice the sum of squares off its diagonal."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    A = A + A.T
    x = torch.randn(12, generator=generator, dtype=torch.float64, requires_grad=True)
    samples = draw(x @ A @ x / 2, [x], 4000)
    mean, error = mean_and_error(samples)
    variance = 2 * (A.square().sum() - A.diagonal().square().sum())
    assert abs(mean[0] - A.trace()) < 4 * (variance / 4000).sqrt()  # 4 standard deviations, known exactly
    assert error[0] == pytest.approx(float((variance / 4000).sqrt()), rel=0.15)


def test_it_agrees_with_the_whole_hessian_of_a_network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))
    names, tensors = zip(*model.named_parameters(), strict=True)
    mean, error = mean_and_error(draw(F.cross_entropy(model(x), y), list(tensors), 2000))
    for name, tensor, found, spread in zip(names, tensors, mean, error, strict=True):

        def loss(value: Tensor, name: str = name) -> Tensor:
            return F.cross_entropy(functional_call(model, {name: value}, (x,)), y)

        size = tensor.numel()
        exact = hessian(loss, tensor.detach()).reshape(size, size).trace()
        assert abs(found - exact) < 5 * spread, name
        assert spread < 0.2 * exact, name  # or the line above would say nothing


def test_the_same_seed_draws_the_same():
    x = torch.randn(5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = x.sum().square() * x.square().sum()
    assert draw(loss, [x], 3, seed=1) == draw(loss, [x], 3, seed=1) != draw(loss, [x], 3, seed=2)


def test_no_second_derivative_is_zero_where_the_loss_is_linear():
    x, unused = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    square = torch.ones(2, requires_grad=True)
    assert draw(3 * x.sum(), [x, unused], 2) == [[0.0, 0.0]] * 2
    assert draw(x.sum() + square.square().sum(), [x, unused, square], 1) == [[0.0, 0.0, 4.0]]


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def test_what_can_be_differentiated_once_only():
    x = torch.ones(3, requires_grad=True)
    for loss in (Once.apply(x).square().sum(), Once.apply(x).sum().square() + x.square().sum()):
        with pytest.raises(NoSecondDerivative, match="once_differentiable"):
            draw(loss, [x], 1)


def test_a_kernel_without_a_second_derivative():
    """PyTorch's fast attention on CPUs is one."""
    q = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        loss = F.scaled_dot_product_attention(q, q, q).square().sum()
        with pytest.raises(NoSecondDerivative, match=r"flash_attention.* is not implemented"):
            draw(loss, [q], 1)


def test_another_failure_is_not_taken_for_that():
    class Fails(Once):
        @staticmethod
        def backward(ctx, gradient):
            return Later.apply(ctx.saved_tensors[0]) * gradient

    class Later(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("too little memory")

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="too little memory") as error:
        draw(Fails.apply(x).square().sum(), [x], 1)
    assert not isinstance(error.value, NoSecondDerivative)
