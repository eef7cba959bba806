"""How finely a tensor is clustered, as a plan says it: bits, dim, scales and groups."""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from .groups import Group, Grouping
from .precision import check_bits_dim


@dataclass(frozen=True)
class Spec:
    """How a tensor is clustered.  As text: `3/1 scaled per 8x64 e4m3`."""

    bits: int
    dim: int = 1
    scaled: bool = False  # each row, an index of the first axis, is divided by a scale of its own
    group: Group | None = None  # which weights share a codebook; None: all of the tensor
    float8: bool = False  # the file holds centroids in 8 bits, E4M3, instead of 16

    def __post_init__(self) -> None:
        check_bits_dim(self.bits, self.dim)

    @property
    def arguments(self) -> dict[str, Any]:
        """The fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def label(self) -> str:
        """The spec as plans and tables write it."""
        words = [f"{self.bits}/{self.dim}"]
        words += ["scaled"] if self.scaled else []
        words += [f"per {self.group}"] if self.group is not None else []
        words += ["e4m3"] if self.float8 else []
        return " ".join(words)

    def grouping(self, shape: tuple[int, ...] | torch.Size) -> Grouping:
        """The groups of a tensor of this shape."""
        return Grouping.of(shape, self.group, self.dim)

    def stored_bits(self, shape: tuple[int, ...] | torch.Size) -> int:
        """Codes, all centroids and scales of a tensor of this shape: the paper's count."""
        grouping = self.grouping(shape)
        centroids = grouping.count * 2**self.bits * self.dim * (8 if self.float8 else 16)
        scales = (shape[0] if shape else 1) * 16 if self.scaled else 0
        return grouping.codes * self.bits + centroids + scales

    def is_absurd(self, shape: tuple[int, ...] | torch.Size) -> bool:
        """Whether the centroids would take far more memory than the weights that they stand for, and more than a
        little."""
        centroids = self.grouping(shape).count * 2**self.bits * self.dim
        return centroids > max(4 * math.prod(shape), 2**22)
