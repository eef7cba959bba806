"""The tensors of a compressed model as plain data: what every file format, export and packed module starts from.

`describe.py` makes them from a model, and `rules.py` from the bytes of a file.  Whoever uses them knows nothing of
modules or files: codes and centroids of what is clustered, values of what is not, and the names that share a tensor.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..clustering.decode import Outliers, decode
from ..clustering.groups import Group, Grouping
from ..clustering.precision import FLOAT8
from ..clustering.spec import Spec
from .codec import unpack_range


@dataclass(frozen=True)
class Codes:
    """A clustered tensor; `clustering/decode.py` says which values these stand for."""

    bits: int
    dim: int
    exponent: int  # 0 but for tensors of an extreme scale
    packed: Tensor  # (bytes,) uint8, see codec.py: codes of the vectors that count, group after group
    centroids: Tensor  # (2^bits, dim) or, where there is a group, (groups, 2^bits, dim); 16 bit or E4M3
    group: Group | None = None  # which weights share a codebook; None: all of the tensor
    scales: Tensor | None = None  # (shape[0],), 16 bit: what the rows were divided by
    outliers: Outliers | None = None  # weights with values of their own; their codes say nothing

    @property
    def spec(self) -> Spec:
        """How finely the tensor is clustered."""
        return Spec(self.bits, self.dim, self.scales is not None, self.group, self.centroids.dtype == FLOAT8)

    def codes(self, start: int, stop: int) -> Tensor:
        """`(stop - start,)` int64: the codes of these places."""
        return unpack_range(self.packed.cpu().numpy(), self.bits, start, stop)


@dataclass(frozen=True)
class Described:
    """One tensor of a model, under the name it has in the plain model's state_dict."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # the model's own; `content` may hold the values in fewer bits
    content: Codes | Tensor
    aliases: tuple[str, ...] = ()  # other names of the same tensor

    @property
    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def device(self) -> torch.device:
        """Where the codes or values are."""
        return self.content.packed.device if isinstance(self.content, Codes) else self.content.device

    @property
    def grouping(self) -> Grouping:
        """The groups of a clustered tensor."""
        assert isinstance(self.content, Codes)
        return Grouping.of(self.shape, self.content.group, self.content.dim)

    def values(self) -> Tensor:
        """The dense tensor.  Besides it, memory is taken by a piece of the codes only."""
        own = self.content
        if isinstance(own, Tensor):
            return own.to(self.dtype)
        return decode(
            codes=own.codes,
            centroids=own.centroids,
            scales=own.scales,
            exponent=own.exponent,
            group=own.group,
            shape=self.shape,
            dim=own.dim,
            dtype=self.dtype,
            outliers=own.outliers,
        )
