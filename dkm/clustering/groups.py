"""Which weights of a tensor share a codebook: the whole tensor, so many rows, so many consecutive weights, or tiles.

Every grouping is a division of a matrix into tiles.  The matrix is the tensor with one row per index of its first axis
or, for groups of consecutive weights, all of it in one row.  Each group is clustered as a tensor of its own.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Group:
    """What a plan says about groups: `Group(8)` 8 rows, `Group(8, 64)` tiles of 8 x 64, `Group(None, 96)` 96
    consecutive weights."""

    rows: int | None
    columns: int | None = None

    def __post_init__(self) -> None:
        if self.rows is None and self.columns is None:
            raise ValueError("a group needs rows, columns or both")
        for size in (self.rows, self.columns):
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"the size of a group must be an integer of at least 1, got {size!r}")

    def __str__(self) -> str:
        if self.rows is None:
            return str(self.columns)
        if self.columns is None:
            return "row" if self.rows == 1 else f"{self.rows} rows"
        return f"{self.rows}x{self.columns}"


class _Edges(NamedTuple):
    """How many vectors count, of a tile at the edges of the matrix."""

    right: int
    bottom: int
    both: int


@dataclass(frozen=True)
class Grouping:
    """The groups of a tensor: a matrix of `rows` x `columns` weights in tiles, of which each is a group.

    A tile is flattened row by row into `vectors` vectors of `dim` values.  Tiles at the edges, and vectors at the end
    of a tile, are filled up with zeros.  A vector of which no value belongs to the tensor does not count: it is not
    clustered, and it has no code in a file.
    """

    rows: int
    columns: int
    tile_rows: int
    tile_columns: int
    dim: int

    @classmethod
    def of(cls, shape: tuple[int, ...] | torch.Size, group: Group | None, dim: int) -> "Grouping":
        """The groups of a tensor of this shape; without a `group`, all of it is one."""
        weights = math.prod(shape)
        rows, columns = (1, weights) if group is None or group.rows is None or not shape else (shape[0], 0)
        columns = columns or weights // rows
        if group is None:
            return cls(rows, columns, rows, columns, dim)
        return cls(rows, columns, min(group.rows or 1, rows), min(group.columns or columns, columns), dim)

    @property
    def across(self) -> int:
        """How many tiles are side by side."""
        return -(-self.columns // self.tile_columns)

    @property
    def down(self) -> int:
        """How many tiles are one below the other."""
        return -(-self.rows // self.tile_rows)

    @property
    def count(self) -> int:
        """How many groups there are."""
        return self.down * self.across

    @property
    def weights(self) -> int:
        """How many weights a whole group has."""
        return self.tile_rows * self.tile_columns

    @property
    def vectors(self) -> int:
        """How many vectors a whole group has."""
        return -(-self.weights // self.dim)

    @property
    def all_count(self) -> bool:
        """Whether every vector of every group counts, because the tiles fit."""
        return not (self.rows % self.tile_rows or self.columns % self.tile_columns)

    @cached_property
    def codes(self) -> int:
        """How many vectors count, over all groups."""
        edges, (down, across) = self._at_edges(), (self.down - 1, self.across - 1)
        return down * across * self.vectors + down * edges.right + across * edges.bottom + edges.both

    def codes_per_group(self) -> Tensor:
        """`(count,)` int64: how many vectors of each group count."""
        codes, edges = torch.full((self.down, self.across), self.vectors), self._at_edges()
        codes[:, -1] = edges.right
        codes[-1] = edges.bottom
        codes[-1, -1] = edges.both
        return codes.view(-1)

    def _at_edges(self) -> "_Edges":
        below = self.rows - (self.down - 1) * self.tile_rows
        beside = self.columns - (self.across - 1) * self.tile_columns
        return _Edges(
            self._counting(self.tile_rows, beside),
            self._counting(below, self.tile_columns),
            self._counting(below, beside),
        )

    def _counting(self, rows: int, columns: int) -> int:
        """How many vectors of a tile count of which only so many rows and columns belong to the tensor."""
        if self.tile_columns - columns < self.dim:  # no vector fits into what is missing between two rows: all count
            return ((rows - 1) * self.tile_columns + columns - 1) // self.dim + 1
        # no two rows share a vector; from the first vector of a row to its last
        last = _sum_of_floors(rows, self.tile_columns, columns - 1, self.dim)
        return last - _sum_of_floors(rows, self.tile_columns, 0, self.dim) + rows

    def split(self, X: Tensor) -> Tensor:
        """A tensor with all its weights, of any shape -> `(count, vectors, dim)`."""
        X = X.reshape(self.rows, self.columns)
        below, beside = -self.rows % self.tile_rows, -self.columns % self.tile_columns
        if below or beside:
            X = pad(X, (0, beside, 0, below))
        X = X.view(self.down, self.tile_rows, self.across, self.tile_columns).transpose(1, 2)
        X = X.reshape(self.count, self.weights)
        if missing := self.vectors * self.dim - self.weights:
            X = pad(X, (0, missing))
        return X.view(self.count, self.vectors, self.dim)

    def join(self, V: Tensor) -> Tensor:
        """The inverse of `split`: `(count, vectors, dim)` -> `(rows * columns,)`."""
        X = V.reshape(self.count, self.vectors * self.dim)[:, : self.weights]
        X = X.reshape(self.down, self.across, self.tile_rows, self.tile_columns).transpose(1, 2)
        X = X.reshape(self.down * self.tile_rows, self.across * self.tile_columns)
        return X[: self.rows, : self.columns].reshape(-1)

    def place(self, vectors: Tensor) -> Tensor:
        """`(codes, dim)`, the vectors that count, group after group -> `(rows * columns,)`."""
        if self.all_count:
            return self.join(vectors.view(self.count, self.vectors, self.dim))
        V = vectors.new_zeros(self.count, self.vectors, self.dim)
        V[self.counted(vectors.device)] = vectors
        return self.join(V)

    def group_of_codes(self, device: torch.device | str = "cpu") -> Tensor:
        """`(codes,)` int64: the group of each vector that counts."""
        groups = torch.arange(self.count, device=device)[:, None].expand(-1, self.vectors)
        return groups[self.counted(device)]

    def counted(self, device: torch.device | str = "cpu") -> Tensor:
        """`(count, vectors)` bool: which vectors count."""
        if self.all_count:
            return torch.ones(self.count, self.vectors, dtype=torch.bool, device=device)
        return self.split(torch.ones(self.rows * self.columns, dtype=torch.bool, device=device)).any(-1)


def _sum_of_floors(n: int, a: int, b: int, m: int) -> int:
    """The sum of `(a * i + b) // m` over i from 0 to n - 1, in a number of steps logarithmic in m."""
    total = 0
    while n:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        # what is left counts the points below a line; the same points counted along the other axis
        n, b = divmod(a * n + b, m)
        a, m = m, a
    return total
