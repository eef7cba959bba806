"""How many bytes the file of a plan will have, before there is one: all of a file but its values is known then."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from ..clustering.precision import FLOAT8, PLAIN_EXPONENTS, exponent_of, rounded, stored_dtype
from ..modelling.parameters import parameters, unwrapped
from ..plans.rows import Row
from .codec import packed_size
from .describe import other_state
from .described import Codes, Described
from .dkm_file import encode_all


class FileCount:
    """Counts the bytes of the file that `save` would write of a model, with packed codes.

    It is exact: a file with zeros in the place of all values is made, in memory.  Entropy-coded files are no larger.  A
    training can change this only where it takes all values of a kept tensor out of the range of float16, and by the
    outliers of a method that has any, of which a plan knows nothing.
    """

    name = "in the file"

    def __init__(self, model: nn.Module):
        self.model = model
        self._exponents: dict[str, int] = {}

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return {owned.name: owned.tensor.detach() for owned in parameters(self.model)}

    @cached_property
    def _kept(self) -> dict[str, torch.dtype]:
        return {name: rounded(tensor, torch.float16).dtype for name, tensor in self._tensors.items()}

    @cached_property
    def _buffers(self) -> list[Described]:
        known = {name for owned in parameters(self.model) for name in owned.names}
        return [
            Described(name, tuple(tensor.shape), tensor.dtype, torch.zeros_like(tensor))
            for name, tensor in other_state(unwrapped(self.model), known).items()
        ]

    def of_row(self, row: Row) -> int:
        """Bits of a file with this tensor alone."""
        return 8 * len(encode_all([self._described(row)]))

    def of_plan(self, rows: Sequence[Row]) -> int:
        """Bits of the file."""
        return 8 * len(encode_all([*map(self._described, rows), *self._buffers]))

    def _described(self, row: Row) -> Described:
        dtype = self._tensors[row.name].dtype
        content = torch.zeros(row.shape, dtype=self._kept[row.name]) if row.spec is None else self._codes(row)
        return Described(row.name, row.shape, dtype, content, row.aliases)

    def _codes(self, row: Row) -> Codes:
        spec = row.spec
        assert spec is not None
        exponent = self._exponents.get(row.name)
        if exponent is None:
            exponent = self._exponents[row.name] = exponent_of(self._tensors[row.name])
        grouping, k = spec.grouping(row.shape), 2**spec.bits
        shape = (k, spec.dim) if spec.group is None else (grouping.count, k, spec.dim)
        kind = FLOAT8 if spec.float8 else stored_dtype(self._tensors[row.name].dtype)
        scales: Tensor | None = torch.zeros(row.shape[:1] or 1, dtype=torch.float16) if spec.scaled else None
        return Codes(
            bits=spec.bits,
            dim=spec.dim,
            exponent=0 if exponent in PLAIN_EXPONENTS and not spec.float8 else exponent,
            packed=torch.zeros(packed_size(grouping.codes, spec.bits), dtype=torch.uint8),
            centroids=torch.zeros(shape, dtype=kind),
            group=spec.group,
            scales=scales,
        )
