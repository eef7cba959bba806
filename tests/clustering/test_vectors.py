"""A weight as vectors, and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dkm.clustering.vectors import compute_dtype, from_vectors, to_vectors

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@given(shapes, st.integers(1, 70))
def test_back_is_the_inverse(shape: tuple[int, ...], dim: int):
    weight = torch.randn(shape)
    vectors = to_vectors(weight, dim)
    assert vectors.shape == (-(-weight.numel() // dim), dim)
    assert torch.equal(from_vectors(vectors, weight.shape), weight)


@given(shapes, st.integers(1, 70))
def test_the_tail_is_filled_with_zeros(shape: tuple[int, ...], dim: int):
    weight = torch.ones(shape)
    assert int(to_vectors(weight, dim).count_nonzero()) == weight.numel()
    assert to_vectors(weight, dim).reshape(-1)[: weight.numel()].all()


def test_vectors_run_across_rows():
    weight = torch.arange(6.0).view(2, 3)
    assert to_vectors(weight, 2).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert to_vectors(weight.t(), 4).tolist() == [[0, 3, 1, 4], [2, 5, 0, 0]]  # in the order of its indices


def test_the_gradient_of_the_tail_is_dropped():
    weight = torch.randn(5, requires_grad=True)
    to_vectors(weight, 3).sum().backward()
    assert weight.grad.tolist() == [1.0] * 5


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_computed_in_at_least_float32(dtype: torch.dtype, computed: torch.dtype):
    assert compute_dtype(dtype) == computed
