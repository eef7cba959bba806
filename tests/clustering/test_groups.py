"""Which weights share a codebook."""

import pytest
import torch
from group_cases import CASES
from hypothesis import given, settings
from hypothesis import strategies as st

from dkm.clustering.groups import Group, Grouping
from dkm.clustering.spec import Spec

sizes = st.integers(1, 12)
groups = st.one_of(
    st.none(), st.builds(Group, sizes), st.builds(Group, sizes, sizes), st.builds(Group, st.none(), sizes)
)


@settings(deadline=None)
@given(shape=st.lists(sizes, min_size=1, max_size=3).map(tuple), group=groups, dim=st.integers(1, 9))
def test_split_and_join_lose_nothing(shape, group, dim):
    grouping = Grouping.of(shape, group, dim)
    weight = torch.randn(shape)
    V = grouping.split(weight)
    assert V.shape == (grouping.count, grouping.vectors, dim)
    assert torch.equal(grouping.join(V), weight.flatten())
    counted = grouping.counted()
    assert int(counted.sum()) == grouping.codes
    assert bool(counted.all()) == grouping.all_count or grouping.dim > 1
    assert float(V[~counted].abs().sum()) == 0


def test_tiles():
    grouping = Grouping.of((3, 5), Group(2, 3), 1)
    V = grouping.split(torch.arange(1, 16)).squeeze(2)
    assert V.tolist() == [[1, 2, 3, 6, 7, 8], [4, 5, 0, 9, 10, 0], [11, 12, 13, 0, 0, 0], [14, 15, 0, 0, 0, 0]]
    assert grouping.counted().sum(1).tolist() == [6, 4, 3, 2]


def test_rows_and_consecutive_weights():
    weight = torch.arange(12).view(3, 4)
    assert Grouping.of(weight.shape, Group(2), 1).split(weight).squeeze(2).tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [8, 9, 10, 11, 0, 0, 0, 0],
    ]
    assert Grouping.of(weight.shape, Group(None, 5), 1).split(weight).squeeze(2).tolist() == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
        [10, 11, 0, 0, 0],
    ]
    whole = Grouping.of(weight.shape, None, 5)
    assert (whole.count, whole.vectors, whole.codes) == (1, 3, 3)


@pytest.mark.parametrize(("shape", "group", "dim"), CASES)
def test_codes_are_counted_without_making_them(shape, group, dim):
    grouping = Grouping.of(shape, group, dim)
    assert grouping.codes == int(grouping.counted().sum())


@pytest.mark.parametrize("sizes", [(0,), (-1, 3), (None, 0), (True,), (1.5,), (None, None)])
def test_sizes_that_are_none(sizes):
    with pytest.raises(ValueError, match="group"):
        Group(*sizes)


class TestSpec:
    def test_label(self):
        assert Spec(4).label == "4/1"
        assert Spec(3, 2, scaled=True, group=Group(8, 64), float8=True).label == "3/2 scaled per 8x64 e4m3"
        assert Spec(2, group=Group(1)).label == "2/1 per row"
        assert Spec(2, group=Group(8)).label == "2/1 per 8 rows"
        assert Spec(2, group=Group(None, 96)).label == "2/1 per 96"

    def test_stored_bits(self):
        """The figures of the issue's table, for a matrix of 288 x 288."""
        shape, weights = (288, 288), 288 * 288
        assert Spec(3).stored_bits(shape) == weights * 3 + 8 * 16
        assert Spec(3, scaled=True).stored_bits(shape) == weights * 3 + 8 * 16 + 288 * 16
        assert Spec(3, group=Group(8, 32)).stored_bits(shape) / weights == 3.5
        assert Spec(3, group=Group(None, 96)).stored_bits(shape) / weights == pytest.approx(4.33, abs=0.01)
        assert Spec(3, group=Group(8, 64), float8=True).stored_bits((512, 512)) / 512**2 == 3.125

    def test_absurd(self):
        assert not Spec(8).is_absurd((4,))
        assert not Spec(3, group=Group(8, 64)).is_absurd((4096, 4096))
        assert Spec(8, group=Group(None, 4)).is_absurd((4096, 4096))
