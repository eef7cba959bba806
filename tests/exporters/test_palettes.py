"""Clustered tensors as Core ML's palettes: which fit, what they decode to, why the others do not fit."""

import pytest
import torch
from dkm_files import tensor, with_outliers

from dkm.clustering.groups import Group
from dkm.clustering.spec import Spec
from dkm.exporters.palettes import Palette, palette

FIT = {  # shape, spec -> bits of an index, boxes along each axis, vector axis
    ((8, 6), Spec(2)): (2, (1, 1), None),
    ((8, 6), Spec(5)): (6, (1, 1), None),
    ((8, 6), Spec(7, 2)): (8, (1, 1), 1),
    ((8, 6), Spec(3, 3, scaled=True)): (3, (1, 1), 1),
    ((8, 6, 3, 3), Spec(1, 3)): (1, (1, 1, 1, 1), 3),
    ((8, 6, 1, 1), Spec(4, 2)): (4, (1, 1, 1, 1), 1),
    ((8, 6), Spec(2, 1, group=Group(2))): (2, (4, 1), None),
    ((8, 6), Spec(2, 3, scaled=True, group=Group(2, 3))): (2, (4, 2), 1),
    ((8, 6, 3, 3), Spec(2, 3, group=Group(4, 9))): (2, (2, 6, 1, 1), 3),
    ((8, 6, 3, 3), Spec(2, 3, group=Group(None, 108))): (2, (4, 1, 1, 1), 3),
    ((8, 6), Spec(2, 2, group=Group(None, 12))): (2, (4, 1), 1),
    ((8, 6, 4), Spec(2, 2, group=Group(2, 8))): (2, (4, 3, 1), 2),
    ((4, 1), Spec(2, 2)): (2, (1, 1), 0),
    ((8, 6), Spec(2, float8=True)): (2, (1, 1), None),
}


@pytest.mark.parametrize("case", FIT, ids=str)
def test_what_fits_decodes_to_the_values(case: tuple[tuple[int, ...], Spec]):
    shape, spec = case
    each = tensor("weight", shape, spec)
    found = palette(each, torch.float16)
    assert isinstance(found, Palette)
    assert (found.bits, found.table.shape[:-2], found.vector_axis) == FIT[case]
    assert torch.equal(found.values(), each.values())
    assert found.indices.dtype == torch.uint8


def test_the_index_of_a_vector_is_where_the_vector_is():
    found = palette(tensor("weight", (4, 6), Spec(2, 3, group=Group(2, 3))), torch.float16)
    assert isinstance(found, Palette)
    row, column = 3, 4  # in the last box: rows 2 and 3, columns 3 to 5
    entry = found.table[1, 1, int(found.indices[row, column // 3])]
    assert found.values()[row, column] == entry[column % 3]


NO_FIT = {
    ((8, 6), Spec(9)): "indices of at most 8 bits, and these have 9",
    ((48,), Spec(2)): "weights of 2 to 5 axes, and this one has 1",
    ((8, 6, 3, 3), Spec(2, 9)): "vectors along one axis only: those of 9 values in 8x6x3x3",
    ((8, 7), Spec(2, 2)): "vectors along one axis only",
    ((8, 6), Spec(2, 1, group=Group(3))): "tiles along axes only, all of one size: 2/1 per 3 rows of 8x6",
    ((8, 6), Spec(2, 1, group=Group(None, 4))): "tiles along axes only",
}


@pytest.mark.parametrize("case", NO_FIT, ids=str)
def test_what_does_not_fit_says_why(case: tuple[tuple[int, ...], Spec]):
    found = palette(tensor("weight", *case), torch.float16)
    assert isinstance(found, str)
    assert NO_FIT[case] in found


def test_outliers_do_not_fit():
    found = palette(with_outliers(tensor("weight", (8, 6), Spec(2)), 10), torch.float16)
    assert found == "Core ML's palettes store no value besides indices, and this has 5 outliers"


def test_values_that_the_precision_does_not_hold():
    small = tensor("weight", (8, 6), Spec(2), exponent=-40)
    assert palette(small, torch.float16) == "float16 does not hold its centroids"
    assert isinstance(palette(small, torch.float32), Palette)
    rounded = tensor("weight", (8, 6), Spec(2, scaled=True), dtype=torch.bfloat16)
    assert "its values are not those of bfloat16" in str(palette(rounded, torch.float16))
