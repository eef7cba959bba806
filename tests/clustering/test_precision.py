"""What a parameter that is not clustered keeps of its precision."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dkm.clustering.precision import exponent_of, rounded


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20), st.integers(-100, 0))
def test_no_value_moves_by_more_than_float16_moves_the_largest(values: list[float], exponent: int):
    tensor = torch.tensor(values) * 2.0**exponent
    kept = rounded(tensor, torch.float16).to(torch.float32)
    assert (kept - tensor).abs().max() <= 2.0**-11 * tensor.abs().max()


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e-6, 1e-5, 1e5, 1e30])
def test_too_small_and_too_large_stay_as_they_are(scale: float):
    tensor = torch.linspace(0.5, 1, 9) * scale
    assert rounded(tensor, torch.float16) is tensor


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_ordinary_values_take_16_bit(scale: float):
    assert rounded(torch.randn(50) * scale, torch.float16).dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_16_bit_and_integers_stay(dtype: torch.dtype):
    tensor = torch.arange(5).to(dtype)
    assert rounded(tensor, torch.float16) is tensor


@pytest.mark.parametrize("exponent", [-100, -3, 0, 3, 100])
def test_exponent(exponent: int):
    assert exponent_of(torch.tensor([1.0, -1.0]) * 2.0**exponent) == exponent
    assert exponent_of(torch.zeros(3)) == 0
