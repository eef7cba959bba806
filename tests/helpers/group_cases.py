"""Groups of odd sizes, and the literal clustering of each: what every implementation of groups is tested against."""

import torch
from torch import Tensor

from dkm.clustering.groups import Group, Grouping
from dkm.clustering.kernels import reference
from dkm.clustering.options import ClusterOptions

# shape, group, dim
CASES = [
    ((6, 10), Group(1), 1),  # a row each
    ((7, 10), Group(3), 1),  # the last group has one row
    ((7, 10), Group(2), 4),  # vectors run over the ends of rows, and the last one is filled up
    ((8, 12), Group(4, 6), 1),  # tiles that fit
    ((9, 13), Group(4, 6), 2),  # tiles at both edges
    ((5, 7), Group(2, 3), 2),  # vectors run over the ends of the rows of a tile
    ((5, 7), Group(50, 70), 3),  # one tile, larger than the tensor
    ((4, 25), Group(None, 16), 1),  # consecutive weights, across rows, and a short group at the end
    ((100,), Group(None, 24), 4),
    ((4, 3, 3, 3), Group(2), 1),  # a convolution
    ((4, 3, 3, 3), Group(2, 9), 8),
]


def literal(
    W: Tensor, C: Tensor, tau: Tensor, grouping: Grouping, options: ClusterOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """W_tilde like W, the next centroids and the iterations: `reference.cluster` of one group after the other.

    By loops over indices, not by `Grouping.split`.
    """
    flat, out = W.reshape(-1), torch.zeros(W.numel(), dtype=C.dtype, device=W.device)
    found_C, found_iterations = [], []
    matrix = torch.arange(W.numel()).view(grouping.rows, grouping.columns)
    number = 0
    for top in range(0, grouping.rows, grouping.tile_rows):
        for left in range(0, grouping.columns, grouping.tile_columns):
            tile = torch.full((grouping.tile_rows, grouping.tile_columns), -1)
            part = matrix[top : top + grouping.tile_rows, left : left + grouping.tile_columns]
            tile[: part.shape[0], : part.shape[1]] = part
            places = tile.flatten().tolist()
            places += [-1] * (-len(places) % grouping.dim)
            vectors = [places[i : i + grouping.dim] for i in range(0, len(places), grouping.dim)]
            vectors = [v for v in vectors if max(v) >= 0]
            index = torch.tensor(vectors, device=W.device)
            V = torch.where(index >= 0, flat[index.clamp(min=0)].to(C.dtype), 0.0)
            V_tilde, C_next, iterations = reference.cluster(V, C[number], tau[number], options)
            out = out.index_put((index[index >= 0],), V_tilde[index >= 0])
            found_C.append(C_next)
            found_iterations.append(int(iterations))
            number += 1
    return out.view(W.shape), torch.stack(found_C), torch.tensor(found_iterations)


def problem(shape: tuple[int, ...], grouping: Grouping, k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W, C `(groups, k, d)`, tau `(groups,)` and a gradient of W_tilde, all in float64.

    The rows are of different scales, and so are the centroids and temperatures of the groups.
    """
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(shape, generator=generator, dtype=torch.float64)
    W = W * torch.linspace(0.5, 2, shape[0], dtype=torch.float64).view(-1, *(1,) * (len(shape) - 1))
    V = grouping.split(W)
    draw = torch.rand(grouping.count, grouping.vectors, generator=generator).argsort(1)[
        :, torch.arange(k) % grouping.vectors
    ]
    C = V.gather(1, draw[:, :, None].expand(-1, -1, grouping.dim))
    C = C + 0.3 * torch.randn(C.shape, generator=generator, dtype=torch.float64)
    tau = torch.linspace(0.1, 0.5, grouping.count, dtype=torch.float64) * grouping.dim
    return W, C, tau, torch.randn(shape, generator=generator, dtype=torch.float64)
