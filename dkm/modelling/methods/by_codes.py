"""What the methods that compute a code for each weight share: quantisers of single weights, in plain PyTorch."""

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...clustering.options import MethodOptions
from ...clustering.vectors import compute_dtype
from ..dtensors import whole
from .by_vectors import ByVectors


class Coded(NamedTuple):
    """What weights become."""

    C: Tensor  # (k, 1): the value of each code
    codes: Tensor  # (n,) int64


class ByCodes(ByVectors):
    """A method that computes the codes and their values from the weight, instead of looking for the nearest value."""

    Options: ClassVar[type[MethodOptions]] = MethodOptions  # no `init`: the weights say where the values start
    only_scalars: ClassVar[bool] = True

    @abstractmethod
    def coded(self, w: Tensor) -> Coded:
        """`(n,)` scaled weights, in at least float32 -> their codes.  Changes nothing."""

    def initial_centroids(self, W: Tensor) -> Tensor:
        """`(n, 1) -> (k, 1)`: where the centroids start."""
        return self.coded(W[:, 0].to(compute_dtype(W.dtype))).C

    @torch.no_grad()
    def codes(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The values in the precision of the file, `(k, 1)`, and each weight's code, `(n,)` int64."""
        weight = whole(weight)
        C, codes = self.coded(self.scaled(weight).reshape(-1).to(compute_dtype(weight.dtype)))
        return self.stored(C, weight.dtype), codes
