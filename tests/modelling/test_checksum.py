"""The checksum that tells whether a weight has changed: literal, by shards, and with what a plain sum misses."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dkm.modelling.checksum import MIX, SPAN, SPREAD, checksum

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def literal(weight: torch.Tensor, first: int = 0) -> int:
    """The definition, in Python's integers."""

    def signed(x: int) -> int:
        return (x + 2**63) % 2**64 - 2**63

    def mixed(x: int) -> int:
        x = signed((x + 1) * SPREAD)
        return signed((x ^ (x >> 32)) * MIX) | 1

    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    bits = weight.contiguous().flatten().view(integer).tolist()
    return signed(sum(b * mixed(i % SPAN) * mixed(i // SPAN) for i, b in enumerate(bits, first)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("first", [0, 5, SPAN - 3, SPAN, 3 * SPAN + 1])
def test_literal(dtype, shape, first):
    weight = torch.randn(shape).to(dtype)
    assert int(checksum(weight, first)) == literal(weight, first)


@pytest.mark.parametrize("n", [SPAN - 1, SPAN, SPAN + 1, 3 * SPAN, 40 * SPAN + 17])
def test_long_weights(n):
    """Numpy, whose products wrap around as well, stands for Python: this would take it too long."""
    weight = torch.randn(n)
    i = torch.arange(n).numpy()

    def mixed(x):
        x = (x + 1) * SPREAD
        return (x ^ (x >> 32)) * MIX | 1

    wanted = (weight.view(torch.int32).long().numpy() * mixed(i % SPAN) * mixed(i // SPAN)).sum()
    assert int(checksum(weight)) == int(wanted)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 3 * SPAN), max_size=4))
def test_shards_add_up(cuts):
    weight = torch.randn(3 * SPAN, generator=torch.Generator().manual_seed(0))
    bounds = [0, *sorted(cuts), len(weight)]
    shards = [checksum(weight[a:b], a) for a, b in itertools.pairwise(bounds)]
    assert int(sum(shards)) == int(checksum(weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_values_matters(dtype):
    weight = torch.randn(64).to(dtype)
    assert int(checksum(weight)) != int(checksum(weight.flip(0)))


def test_small_changes_that_cancel_in_a_plain_sum():
    """A small step in bfloat16 moves few weights, by one unit each: up as often as down, now and then."""
    torch.manual_seed(0)
    weight = torch.randn(64, dtype=torch.bfloat16)
    seen, plain = int(checksum(weight)), int(weight.view(torch.int16).long().sum())
    missed = 0
    for _ in range(500):
        steps = torch.zeros(64, dtype=torch.int16)
        steps[torch.randperm(64)[:4]] = torch.randint(0, 2, (4,), dtype=torch.int16) * 2 - 1
        moved = (weight.view(torch.int16) + steps).view(torch.bfloat16)
        missed += int(moved.view(torch.int16).long().sum()) == plain
        assert int(checksum(moved)) != seen
    assert missed > 100  # what this test is about


def test_memory_order_does_not_matter():
    weight = torch.randn(8, 6, 3, 3)
    assert int(checksum(weight)) == int(checksum(weight.to(memory_format=torch.channels_last)))
