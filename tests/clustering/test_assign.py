"""The index of the nearest centroid."""

import pytest
import torch

from dkm import assign
from dkm.clustering.kernels import blocked


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("k", [1, 3, 300])
def test_assign_finds_the_nearest(k, d, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 1000)
    W, C = torch.randn(501, d, dtype=torch.float64), torch.randn(k, d, dtype=torch.float64)
    distance = torch.cdist(W, C)
    torch.testing.assert_close(distance.gather(1, assign(W, C)[:, None])[:, 0], distance.amin(1))


def test_assign_takes_the_same_one_of_equal_centroids():
    C = torch.tensor([[0.5], [0.1], [0.5], [0.1]])
    assert set(assign(torch.randn(100, 1), C).tolist()) == {0, 1}
