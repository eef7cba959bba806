"""Which examples each step sees."""

from dkm.app.run.order import Order


def test_the_order_has_everything_once_per_epoch_and_can_begin_anywhere():
    mine, others = Order(20, 3, 2, rank=0, seed=0), Order(20, 3, 2, rank=1, seed=0)
    whole, other = list(mine.keys(0, 6)), list(others.keys(0, 6))
    first = [index for keys in (*whole[:3], *other[:3]) for _, index in keys]
    assert len(set(first)) == 18
    assert list(mine.keys(4, 6)) == whole[4:]
    assert [index for _, index in whole[0]] != [index for _, index in whole[3]]
    assert len({seed for keys in (*whole, *other) for seed, _ in keys}) == 36
