"""How the vectors of a weight that FSDP2 has split by rows are divided among the ranks."""

from typing import Any

import torch
from torch import Tensor


class Layout:
    """Which rank computes which vectors of a sharded weight.

    Shards are consecutive rows, so consecutive values.  A vector belongs to the rank that holds its first value.
    Its values on later ranks, fewer than `dim`, are sent to that rank, and their results are sent back.
    """

    def __init__(self, parameter: Any, dim: int):
        from torch.distributed.tensor import Shard

        split = [i for i, placement in enumerate(parameter.placements) if not placement.is_replicate()]
        if len(split) > 1 or any(type(p) is not Shard or p.dim for p in (parameter.placements[i] for i in split)):
            raise NotImplementedError(
                f"a clustered weight can be sharded along its rows only, got {parameter.placements}: leave it out of "
                "tensor parallelism and of shard_placement_fn"
            )
        mesh = parameter.device_mesh
        self.dim = dim
        self.group = mesh.get_group(split[0]) if split and mesh.size(split[0]) > 1 else None
        self.ranks = mesh.size(split[0]) if self.group else 1
        self.rank = mesh.get_local_rank(split[0]) if self.group else 0
        self.chunk = -(-parameter.shape[0] // self.ranks)
        N, width = parameter.numel(), parameter.numel() // parameter.shape[0]
        self.bounds = [min(rank * self.chunk * width, N) for rank in range(self.ranks + 1)]
        first, last = self.bounds[self.rank : self.rank + 2]
        self.first = first  # the position of our first value
        begin = min(-(-first // dim) * dim, last)
        end = min(-(-last // dim) * dim, N) if begin < last else last
        self.head = begin - first  # our first values, which belong to a vector of an earlier rank
        self.tail = end - last  # the values of our last vector that are on later ranks
        self.straddled = any(bound % dim for bound in self.bounds if bound < N)  # whether any vector is on two ranks

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over the ranks."""
        if self.group is not None:
            tensor = tensor.contiguous()
            torch.distributed.all_reduce(tensor, group=self.group)
        return tensor

    def vectors(self, values: Tensor) -> Tensor:
        """From the values of this rank's rows to the values of its vectors, both flat."""
        if not self.straddled:
            return values
        heads = self._exchange(values[: self.dim - 1])
        sizes = [last - first for first, last in zip(self.bounds, self.bounds[1:], strict=False)]
        later = [heads[rank, : sizes[rank]] for rank in range(self.rank + 1, self.ranks)]
        return torch.cat([values[self.head :], *later])[: len(values) - self.head + self.tail]

    def rows(self, values: Tensor) -> Tensor:
        """The inverse of `vectors`."""
        if not self.straddled:
            return values
        own = len(values) - self.tail
        tails = self._exchange(values[own:])
        first = self.bounds[self.rank]
        owner = max(rank for rank in range(self.ranks) if self.bounds[rank] <= first // self.dim * self.dim)
        behind = first - self.bounds[owner + 1] if self.head else 0
        return torch.cat([tails[owner, behind : behind + self.head], values[:own]])

    def _exchange(self, values: Tensor) -> Tensor:
        """Every rank gives up to `dim - 1` values and gets those of all ranks, `(ranks, dim - 1)`."""
        mine = values.new_zeros(self.dim - 1)
        mine[: len(values)] = values
        everyone = values.new_empty(self.ranks * (self.dim - 1))
        torch.distributed.all_gather_into_tensor(everyone, mine, group=self.group)
        return everyone.view(self.ranks, self.dim - 1)

    def padded(self, rows: Tensor) -> Tensor:
        """The rows, with zeros after them up to as many as the first rank has: FSDP2 gathers equally many from all."""
        if len(rows) == self.chunk:
            return rows
        result = rows.new_zeros(self.chunk, *rows.shape[1:])
        result[: len(rows)] = rows
        return result
