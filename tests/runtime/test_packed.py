"""Weights decoded from packed codes, some rows at a time, are those that the file has: bit for bit."""

import random

import pytest
import torch
from dkm_files import apart, coded, grouped, skewed, tensor, with_outliers

from dkm.clustering.groups import Group
from dkm.clustering.spec import Spec
from dkm.formats.described import Codes, Described
from dkm.runtime import packed as module
from dkm.runtime.packed import PackedWeight

CASES = [each for each in [*grouped(), *coded(), *apart()] if isinstance(each.content, Codes)]


def packed(each: Described, dtype: torch.dtype | None = None) -> PackedWeight:
    assert isinstance(each.content, Codes)
    return PackedWeight(each.content, each.shape, each.dtype, dtype)


def some_tensor(rng: random.Random) -> Described:
    rows, columns = rng.randint(1, 14), rng.randint(1, 60)
    shape = tuple(rng.choice([rng.randint(1, 12), 8, 24, 64]) for _ in range(rng.randint(0, 3)))
    group = rng.choice([None, Group(rows), Group(rows, columns), Group(4, 8), Group(None, columns), Group(None, 16)])
    stored = rng.choice([torch.float64, torch.float32, torch.float16, torch.bfloat16])
    spec = Spec(
        rng.randint(1, 12) if rng.random() < 0.3 else rng.randint(1, 4),
        rng.choice([1, 1, 2, 3, 4, 8]),
        scaled=rng.random() < 0.5,
        group=group,
        float8=rng.random() < 0.3,
    )
    each = skewed("some", shape, spec, dtype=stored, exponent=rng.choice([0, 0, 3, -20]))
    return each if rng.random() < 0.5 else with_outliers(each, rng.randint(1, 99))


def check(each: Described, rng: random.Random) -> None:
    weight, expected = packed(each), each.values()
    assert (weight.dense().dtype, weight.dense().shape) == (each.dtype, each.shape)
    assert torch.equal(weight.dense(), expected), each
    start = rng.randrange(weight.count)
    stop = rng.randint(start + 1, weight.count)
    by_row = expected.view(weight.count, *each.shape[1:])
    assert torch.equal(weight.rows(start, stop), by_row[start:stop]), (each, start, stop)
    rows = torch.randint(weight.count, (rng.randint(0, 9),))
    assert torch.equal(weight.take(rows), by_row[rows]), (each, rows)
    assert torch.equal(packed(each, torch.bfloat16).dense(), expected.bfloat16())


@pytest.mark.parametrize("each", CASES, ids=lambda each: each.name)
def test_it_is_the_weight_of_the_file(each):
    check(each, random.Random(0))


@pytest.mark.parametrize("block", [1, 50, 1 << 18])
def test_any_bits_dim_groups_and_shape(block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    rng = random.Random(block)
    for _ in range(150):
        check(some_tensor(rng), rng)


def test_blocks_cover_all_rows_and_are_whole_tiles(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 100)
    weight = packed(tensor("tiles", (50, 20), Spec(2, group=Group(4, 8))))
    assert weight.blocks()[:2] == [(0, 4), (4, 8)]
    assert weight.blocks()[-1] == (48, 50)
    assert packed(tensor("plain", (50, 20), Spec(2))).blocks()[0] == (0, 5)


def test_dtypes_of_what_is_stored_stay():
    each = tensor("each", (12, 8), Spec(3, scaled=True, float8=True))
    weight, expected = packed(each), each.values()
    for dtype in (torch.float16, torch.float64, torch.bfloat16, torch.float32):
        weight = weight.to(dtype)
        assert weight.dense().dtype == dtype
    assert weight.codes.dtype == torch.uint8
    assert weight.centroids.dtype == torch.float8_e4m3fn
    assert weight.scales.dtype == torch.float16
    assert torch.equal(weight.dense(), expected)


def test_outliers_stay_as_they_are_whatever_the_dtype():
    each = with_outliers(tensor("each", (12, 8), Spec(3, scaled=True)), 7)
    weight, expected = packed(each), each.values()
    assert weight.to(torch.bfloat16).outliers.dtype == torch.float32
    assert torch.equal(weight.dense(), expected.bfloat16())
    assert torch.equal(weight.to(torch.float32).dense(), expected)
    assert packed(each).nbytes == packed(tensor("each", (12, 8), Spec(3, scaled=True))).nbytes + 14 * 12
    other = with_outliers(tensor("each", (12, 8), Spec(3, scaled=True)), 7)
    other.content.outliers.positions[0] = 1
    weight.load_state_dict(packed(other).state_dict())
    assert torch.equal(weight.dense(), other.values())
    with pytest.raises(RuntimeError, match="and the state is of another"):
        weight.load_state_dict(packed(with_outliers(tensor("each", (12, 8), Spec(3, scaled=True)), 9)).state_dict())


def test_a_state_dict_goes_into_an_equal_one_only():
    one, other = (tensor("x", (8, 16), Spec(2, group=group)) for group in (Group(4, 8), Group(8, 4)))
    values = skewed("x", (8, 16), Spec(2, group=Group(4, 8)))
    target = packed(one)
    target.load_state_dict(packed(values).state_dict())
    assert torch.equal(target.dense(), values.values())
    with pytest.raises(RuntimeError, match="2/1 per 4x8 of shape"):
        target.load_state_dict(packed(other).state_dict())
