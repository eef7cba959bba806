"""Histograms through time."""

import re

from dkm.app.report.reader import Histogram
from dkm.app.report.ridges import middle, ridges


def test_centroids_are_followed_by_their_number():
    """Two that pass each other cross; they do not bounce."""
    records = [
        Histogram(step, "w", edges=[-1, 0, 1], counts=[1, 1], centroids=centroids)
        for step, centroids in ((0, [-0.5, 0.5]), (1, [0.5, -0.5]))
    ]
    figure = ridges(records, str, "epoch", "w")
    ways = re.findall(r'class="way" d="M([\d.]+) [\d.]+L([\d.]+) ', figure.svg)
    assert len(ways) == 2
    assert ways[0] == ways[1][::-1]
    assert ways[0][0] != ways[0][1]


def test_one_far_weight_does_not_flatten_the_others():
    edges = [float(i) for i in range(1001)]
    counts = [500_000, 499_999, *[0] * 997, 1]
    assert middle(edges, counts) == (0.0, 2.0)
