"""Which weights of a tensor share a codebook: the whole tensor, so many rows, so many consecutive weights, or tiles.

Every grouping is a division of a matrix into tiles.  The matrix is the tensor with one row per index of its first axis
or, for groups of consecutive weights, all of it in one row.  Each group is clustered as a tensor of its own.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
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
        below, beside = self.rows % self.tile_rows, self.columns % self.tile_columns  # of the tiles at the edges
        whole_down, whole_across = self.rows // self.tile_rows, self.columns // self.tile_columns
        total = whole_down * whole_across * self.vectors
        total += whole_down * self._counting(self.tile_rows, beside)
        return total + whole_across * self._counting(below, self.tile_columns) + self._counting(below, beside)

    def _counting(self, rows: int, columns: int) -> int:
        """How many vectors of a tile count of which only so many rows and columns belong to the tensor."""
        if columns == self.tile_columns or not rows or not columns:
            return -(-rows * columns // self.dim)
        places = np.arange(rows)[:, None] * self.tile_columns + np.arange(columns)
        return len(np.unique(places // self.dim))

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

    def counted(self, device: torch.device | str = "cpu") -> Tensor:
        """`(count, vectors)` bool: which vectors count."""
        if self.all_count:
            return torch.ones(self.count, self.vectors, dtype=torch.bool, device=device)
        return self.split(torch.ones(self.rows * self.columns, dtype=torch.bool, device=device)).any(-1)
