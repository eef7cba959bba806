"""Target `safetensors`: every tensor dense, in its own dtype, for whatever reads safetensors files."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..formats.described import Codes
from ..foundation.errors import ExportError
from .target import Checked, Job, Row, Target, largest_difference, register


@register("safetensors")
@dataclass(frozen=True)
class Dense(Target):
    """Names are those of the plain model's state_dict.  A tied tensor is written once, under its first name; the
    metadata say under which names it is missing, as `safetensors.torch.load_model` wants it."""

    suffix: ClassVar[str] = ".safetensors"
    needs_model: ClassVar[bool] = False
    needs_example: ClassVar[bool] = False

    def write(self, job: Job, path: Path) -> list[Row]:
        values = {each.name: each.values().cpu().contiguous().clone() for each in job.tensors}
        ties = {alias: each.name for each in job.tensors for alias in each.aliases}
        try:
            save_file(values, path, {"format": "pt", **ties})
        except (SafetensorError, LookupError) as error:
            raise ExportError(f"safetensors cannot write the model: {error}") from error
        return [
            Row.of(
                each,
                str(each.dtype).removeprefix("torch."),
                values[each.name].nbytes,
                "this format has dense tensors only" if isinstance(each.content, Codes) else "",
            )
            for each in job.tensors
        ]

    def check(self, job: Job, path: Path) -> Checked:
        found = load_file(path)
        furthest = 0.0
        for each in job.tensors:
            own = each.values()
            same = own.dtype == found[each.name].dtype and torch.equal(own, found[each.name])
            furthest = max(furthest, 0.0 if same else largest_difference(found[each.name], own))
        return Checked(furthest, "values read back")
