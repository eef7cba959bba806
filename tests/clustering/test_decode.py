"""Codes, centroids, scales and an exponent as a weight; how many vectors of a grouping count."""

import math
import random

import pytest
import torch
from torch import Tensor

from dkm.clustering import decode as module
from dkm.clustering.decode import all_finite, decode
from dkm.clustering.groups import Group, Grouping
from dkm.clustering.vectors import compute_dtype


def some_group(rng: random.Random) -> Group | None:
    rows, columns = rng.randint(1, 14), rng.randint(1, 60)
    return rng.choice([None, Group(rows), Group(rows, columns), Group(None, columns)])


def some_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randint(1, 12) for _ in range(rng.randint(0, 3)))


def literally(
    codes: list[int], C: Tensor, scales: Tensor | None, exponent: int, grouping: Grouping, dtype: torch.dtype
) -> Tensor:
    """Value by value, in Python: tiles from left to right and from top to bottom, each row by row."""
    wide = compute_dtype(dtype)
    weight = torch.empty(grouping.rows, grouping.columns, dtype=wide)
    C, left_over = C.to(wide).reshape(grouping.count, -1, grouping.dim), iter(codes)
    corners = [
        (top, left)
        for top in range(0, grouping.rows, grouping.tile_rows)
        for left in range(0, grouping.columns, grouping.tile_columns)
    ]
    for group, (top, left) in enumerate(corners):
        for first in range(0, grouping.weights, grouping.dim):
            places = [
                divmod(p, grouping.tile_columns) for p in range(first, min(first + grouping.dim, grouping.weights))
            ]
            inside = [top + r < grouping.rows and left + c < grouping.columns for r, c in places]
            if any(inside):
                vector = C[group, next(left_over)]
                for (r, c), value, is_inside in zip(places, vector, inside, strict=False):
                    if is_inside:
                        weight[top + r, left + c] = value
    assert next(left_over, None) is None
    if scales is not None:
        weight = weight.reshape(len(scales), -1) * scales.to(wide)[:, None]
    return (weight * torch.tensor(2.0**exponent, dtype=wide)).to(dtype).reshape(-1)


@pytest.mark.parametrize("piece", [1, 5, 64, 1 << 20])
def test_it_is_the_definition(piece, monkeypatch):
    monkeypatch.setattr(module, "PIECE", piece)
    rng = random.Random(piece)
    for _ in range(60):
        shape, group, dim, k = some_shape(rng), some_group(rng), rng.randint(1, 9), 2 ** rng.randint(1, 4)
        grouping = Grouping.of(shape, group, dim)
        stored = rng.choice([torch.float16, torch.bfloat16, torch.float8_e4m3fn])
        C = torch.randn(*([] if group is None else [grouping.count]), k, dim).to(stored)
        codes = torch.randint(k, (grouping.codes,))
        scales = rng.choice([None, torch.rand(shape[0] if shape else 1).add(0.1).half()])
        exponent, dtype = rng.choice([0, 3, -20]), rng.choice([torch.float64, torch.float32, torch.float16])
        weight = decode(codes, C, scales, exponent, group, shape, dim, dtype)
        assert (weight.shape, weight.dtype) == (shape, dtype)
        expected = literally(codes.tolist(), C, scales, exponent, grouping, dtype)
        assert torch.equal(weight.reshape(-1), expected), (shape, group, dim)
        in_parts = decode(lambda start, stop: codes[start:stop], C, scales, exponent, group, shape, dim, dtype)  # noqa: B023
        assert torch.equal(in_parts, weight)


def test_products_are_rounded_once_to_the_tensors_dtype():
    """In float16 itself, the product with the scale would leave its range before the exponent brings it back."""
    C, codes = torch.tensor([[300.0], [1.0]]).half(), torch.tensor([0, 1])
    weight = decode(codes, C, torch.tensor([300.0]).half(), -10, None, (1, 2), 1, torch.float16)
    assert weight.tolist() == [[90000 / 1024 // 0.0625 * 0.0625, float(torch.tensor(300 / 1024).half())]]


def test_what_is_not_finite():
    C, scales = torch.tensor([[1.0], [-300.0]]).half(), torch.tensor([2.0, 0.5]).half()
    assert all_finite(C, scales, 0, torch.float16)
    assert all_finite(C, scales, 6, torch.float16)  # 300 * 2 * 64 is 38,400
    assert not all_finite(C, scales, 7, torch.float16)
    assert all_finite(C, scales, 7, torch.bfloat16)
    assert not all_finite(torch.tensor([[1.0], [math.nan]]).to(torch.float8_e4m3fn), None, 0, torch.float32)


def test_how_many_vectors_count():
    rng = random.Random(0)
    for _ in range(500):
        grouping = Grouping.of(some_shape(rng), some_group(rng), rng.randint(1, 9))
        counted = grouping.counted()
        assert grouping.codes == int(counted.sum())
        assert torch.equal(grouping.codes_per_group(), counted.sum(1))


def test_counting_needs_no_table():
    """A tile of 2^57 weights at an edge.  Every row of it begins a new vector, because 64 divides its width."""
    grouping = Grouping.of((2**29, 2**29 + 2**28), Group(2**29, 2**29), 64)
    assert grouping.codes == 2**29 * (2**29 + 2**28) // 64
    other = Grouping.of((2**29, 2**29 + 1), Group(2**29, 2**29), 64)  # one weight of each row, in a vector of its own
    assert other.codes == 2**58 // 64 + 2**29
