"""How the vectors and groups of a weight that FSDP2 has split by rows are divided among the ranks."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..clustering.groups import Grouping


class Layout:
    """Which rank computes which weights of a sharded tensor.

    Shards are consecutive rows, so consecutive weights.  A unit is so many consecutive weights that one rank must
    have: a vector or, where there are groups, a whole group or a whole row of tiles.  It belongs to the rank that holds
    its first weight.  Its weights on later ranks are sent to that rank, and their results are sent back.

    first     the position of this rank's first weight
    rows      which rows of the tensor this rank holds
    groups    which groups belong to this rank; without groups, all of the one there is
    grouping  how the weights that belong to this rank are divided into groups
    """

    def __init__(self, parameter: Any, whole: Grouping, grouped: bool):
        from torch.distributed.tensor import Shard

        split = [i for i, placement in enumerate(parameter.placements) if not placement.is_replicate()]
        if len(split) > 1 or any(type(p) is not Shard or p.dim for p in (parameter.placements[i] for i in split)):
            raise NotImplementedError(
                f"a clustered weight can be sharded along its rows only, got {parameter.placements}: leave it out of "
                "tensor parallelism and of shard_placement_fn"
            )
        mesh = parameter.device_mesh
        self.group = mesh.get_group(split[0]) if split and mesh.size(split[0]) > 1 else None
        ranks = mesh.size(split[0]) if self.group else 1
        self.rank = mesh.get_local_rank(split[0]) if self.group else 0
        self.chunk = -(-parameter.shape[0] // ranks)
        N, width = parameter.numel(), parameter.numel() // parameter.shape[0]
        unit = _unit(whole, grouped)
        bounds = [min(rank * self.chunk * width, N) for rank in range(ranks + 1)]
        # of each rank: how many of its first weights belong to an earlier rank, and to which
        self.heads = [min(-first % unit, last - first) for first, last in pairwise(bounds)]
        self.owners = [max(r for r in range(ranks) if bounds[r] <= first // unit * unit) for first in bounds[:-1]]
        self.first, last = bounds[self.rank : self.rank + 2]
        self.rows = slice(self.first // width, last // width)
        begin = self.first + self.heads[self.rank]
        weights = last - begin + sum(self._lent())
        self.groups, self.grouping = slice(None), replace(whole, columns=weights, tile_columns=weights)
        if grouped:
            in_one_row = whole.rows == 1
            size = dict(columns=weights) if in_one_row else dict(rows=weights // whole.columns)
            self.grouping = replace(whole, **size)
            before = -(-begin // unit) * (1 if in_one_row else whole.across)
            self.groups = slice(before, before + self.grouping.count)

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over the ranks."""
        if self.group is not None:
            tensor = tensor.contiguous()
            torch.distributed.all_reduce(tensor, group=self.group)
        return tensor

    def to_owners(self, values: Tensor) -> Tensor:
        """From the values of this rank's rows to the values of its units, both flat."""
        if not any(self.heads):
            return values
        head = self.heads[self.rank]
        return torch.cat([values[head:], self._exchange(values[:head], self._borrowed(), self._lent())])

    def to_rows(self, values: Tensor) -> Tensor:
        """The inverse of `to_owners`."""
        if not any(self.heads):
            return values
        lent, own = self._lent(), len(values) - sum(self._lent())
        return torch.cat([self._exchange(values[own:], lent, self._borrowed()), values[:own]])

    def _lent(self) -> list[int]:
        """How many weights of each rank belong to this one."""
        return [head if owner == self.rank else 0 for head, owner in zip(self.heads, self.owners, strict=True)]

    def _borrowed(self) -> list[int]:
        """How many weights of this rank belong to each rank."""
        head, owner = self.heads[self.rank], self.owners[self.rank]
        return [head if rank == owner else 0 for rank in range(len(self.heads))]

    def _exchange(self, values: Tensor, to: list[int], of: list[int]) -> Tensor:
        """Send so many values to each rank, and return so many of each, in the order of the ranks."""
        result = values.new_empty(sum(of))
        torch.distributed.all_to_all_single(result, values.contiguous(), of, to, group=self.group)
        return result

    def padded(self, rows: Tensor) -> Tensor:
        """The rows, with zeros after them up to as many as the first rank has: FSDP2 gathers equally many from all."""
        if len(rows) == self.chunk:
            return rows
        result = rows.new_zeros(self.chunk, *rows.shape[1:])
        result[: len(rows)] = rows
        return result


def _unit(whole: Grouping, grouped: bool) -> int:
    """How many consecutive weights one rank must have."""
    if not grouped:
        return whole.dim
    return whole.tile_columns if whole.rows == 1 else whole.tile_rows * whole.columns
