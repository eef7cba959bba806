"""Where the bounds between clusters of sorted values are best, for many sets of values at a time.

Dynamic programming over a histogram.  Each bound stays within a window around its present place, and that is repeated
from the bounds that were found.  It begins with few bins, so that the windows are wide, and goes on with more of them.

The costs of the intervals are matrices: rows are the places of the left bound, columns those of the right one.  The
best bounds are their product, with minimum for sum and sum for product.  It is computed as a tree, whose depth is the
logarithm of the number of clusters; one interval after the other would be a launch on a GPU for each.
"""

import torch
from torch import Tensor

LEAST_BINS, BINS_PER_CLUSTER = 1 << 10, 16  # of the finest histogram
WINDOW = 24  # how many bins a bound may move to either side per round
ROUNDS = 6  # per histogram, at most
BLOCK = 1 << 23  # so many sums of two costs are in memory together


def best_bounds(sums: Tensor, position: Tensor, first: Tensor, bounds: Tensor) -> Tensor:
    """Better bounds, `(g, k - 1) -> (g, k - 1)`: how many values lie before each.

    sums: `(3, g, n + 1)`, prefix sums of the numbers 1, the values and their squares.
    position: `(g, n)`, ascending integers: in proportion to it, the bins are equally wide.
    first: `(g, n)`, whether a value is the first one of its kind; bins do not part equal values.
    """
    k = bounds.shape[1] + 1
    bins = 4 * k
    while True:
        edges = _edges(sums, position, first, bins)
        at_edges = sums.gather(2, edges.expand(3, -1, -1))
        place = torch.searchsorted(edges, bounds)
        for _ in range(ROUNDS):
            moved = _improved(at_edges, place)
            if torch.equal(moved, place):
                break
            place = moved
        bounds = edges.gather(1, place)
        if bins >= max(LEAST_BINS, BINS_PER_CLUSTER * k):
            return bounds
        bins *= 4


def _edges(sums: Tensor, position: Tensor, first: Tensor, bins: int) -> Tensor:
    """`(g, bins + 1)`: how many values lie before each edge of a bin.  Some bins may be empty.

    Where there are no more different values than bins, each of them has its own.
    """
    counts = sums[0, :, -1:].long()
    places = torch.arange(bins, device=position.device) * (position[:, -1:].double() / bins)
    even = torch.searchsorted(position, places.ceil().long())
    rank = first.long().cumsum(1)
    own = torch.searchsorted(rank, torch.arange(1, bins + 1, device=rank.device).expand(len(rank), -1).contiguous())
    edges = torch.where(rank[:, -1:] <= bins, own, even)
    return torch.cat([torch.minimum(edges, counts), counts], 1)


def _improved(sums: Tensor, place: Tensor) -> Tensor:
    """`(3, g, bins + 1)` prefix sums at the edges, `(g, k - 1)` edges -> the best edges within the windows."""
    bins = sums.shape[2] - 1
    offsets = torch.arange(-WINDOW, WINDOW + 1, device=place.device)
    places = torch.nn.functional.pad((place[..., None] + offsets).clamp(0, bins), (0, 0, 1, 1))  # (g, k + 1, w)
    places[:, -1] = bins
    ends = sums.gather(2, places.flatten(1).expand(3, -1, -1)).view(3, *places.shape)
    mass, total, squares = ends[:, :, 1:, None, :] - ends[:, :, :-1, :, None]
    # An interval without values costs nothing; one that ends before it begins must not be.
    cost = torch.where(mass < 0, torch.inf, squares - total.square() / mass.clamp(min=1))
    choices = []
    while cost.shape[1] > 1:
        pairs = cost.shape[1] // 2
        joined, choice = _joined(cost[:, 0 : 2 * pairs : 2], cost[:, 1 : 2 * pairs : 2])
        choices.append(choice)
        cost = torch.cat([joined, cost[:, 2 * pairs :]], 1)
    # from the two ends, where all choices are the same place, to what lies between them
    chosen = place.new_zeros(len(place), 2)
    for choice in reversed(choices):
        pairs, width = choice.shape[1:3]
        pair = chosen[:, :pairs] * width + chosen[:, 1 : pairs + 1]
        between = choice.flatten(2).gather(2, pair[..., None])[..., 0]
        chosen = torch.cat([torch.stack([chosen[:, :pairs], between], 2).flatten(1), chosen[:, pairs:]], 1)
    return places.gather(2, chosen[..., None])[:, 1:-1, 0].contiguous()


def _joined(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Costs `(g, p, w, w)` of p intervals and of those that follow them -> of both together, and where they meet."""
    width = left.shape[2]
    pairs = max(1, BLOCK // (len(left) * width**3))
    found = [
        (a[..., None] + b[..., None, :, :]).min(3)
        for a, b in zip(left.split(pairs, 1), right.split(pairs, 1), strict=True)
    ]
    return torch.cat([cost for cost, _ in found], 1), torch.cat([choice for _, choice in found], 1)
