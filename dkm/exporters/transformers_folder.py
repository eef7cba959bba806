"""Target `transformers`: a folder with packed codes, which `from_pretrained` reads where dkm is imported.

A clustered tensor NAME is stored as bytes: its packed codes as NAME, `NAME_centroids`, and perhaps `NAME_scales`,
`NAME_positions` and `NAME_outliers`; the `quantization_config` says what they are, see `formats/parts.py`.  The codes
have one dimension more than the weight, so a transformers without dkm finds a tensor of another shape than it expects,
and refuses the folder.  Their first dimension is that of the weight, because transformers fits the bias of a head to it
where it ties the weight.  What is not clustered is stored under its own name, and its checksum is in the configuration.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import pad

from ..formats.described import Codes, Described
from ..formats.parts import checksum, from_parts, sizes, to_parts
from ..foundation.errors import FileError
from ..foundation.text import shown, size_text
from .pretrained import read_quantization, read_weights, write_folder
from .target import Checked, Job, Row, Target, largest_difference, register

VERSION = 1  # of the folder


@register("transformers")
@dataclass(frozen=True)
class Transformers(Target):
    """Every clustered tensor as in the .dkm file; what is not clustered in 16 bits, as there."""

    suffix: ClassVar[str] = ".transformers"
    needs_example: ClassVar[bool] = False
    max_shard_size: str = "5GB"  # of a file with weights

    def write(self, job: Job, path: Path) -> list[Row]:
        state: dict[str, Tensor] = {}
        entries: dict[str, dict[str, Any]] = {}
        ties: dict[str, str] = {}
        dense: dict[str, str] = {}
        rows = []
        for each in job.tensors:
            ties |= dict.fromkeys(each.aliases, each.name)
            if isinstance(each.content, Tensor):
                value = each.content.cpu().contiguous().clone()
                state[each.name], dense[each.name] = value, checksum(value)
                rows.append(Row.of(each, str(value.dtype).removeprefix("torch."), value.nbytes))
                continue
            entries[each.name], stored = to_stored(each)
            state |= stored
            rows.append(Row.of(each, "packed codes and centroids", sum(part.nbytes for part in stored.values())))
        quantization = {"quant_method": "dkm", "version": VERSION, "tensors": entries, "ties": ties, "dense": dense}
        write_folder(job.plain_model, path, state, quantization, self.max_shard_size)
        (path / "README.md").write_text(_card(path.name, job.plain_model, job.tensors, rows), encoding="utf-8")
        return rows

    def check(self, job: Job, path: Path) -> Checked:
        entries, state = read_quantization(path)["tensors"], read_weights(path)
        furthest = 0.0
        for each in job.tensors:
            own = each.values()
            if isinstance(each.content, Tensor):
                found = state[each.name].to(own.dtype)
            else:
                kinds = sizes(each.name, entries[each.name], str(path))
                parts = {kind: state[part_name(each.name, kind)] for kind in kinds}
                parts["codes"] = parts["codes"].view(-1)[: len(each.content.packed)]
                found = from_parts(each.name, entries[each.name], parts, str(path)).values()
            if found.shape != own.shape:
                return Checked(math.inf, f"{each.name} has another shape in the folder")
            furthest = max(furthest, 0.0 if torch.equal(found, own) else largest_difference(found, own))
        return Checked(furthest, "weights read back")


def part_name(name: str, kind: str) -> str:
    """Under which name a part of a clustered tensor is stored."""
    return name if kind == "codes" else f"{name}_{kind}"


def to_stored(each: Described) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The entry of a clustered tensor in the configuration, and what is stored of it, by name."""
    entry, parts = to_parts(each)
    shape = codes_shape(each.shape, len(parts["codes"]))
    parts["codes"] = pad(parts["codes"], (0, math.prod(shape) - len(parts["codes"]))).view(shape)
    return entry, {part_name(each.name, kind): part for kind, part in parts.items()}


def check_dense(
    files: Iterable[str | Path], checksums: Mapping[str, str], ties: Mapping[str, str], folder: str
) -> None:
    """FileError unless each tensor that has a checksum is in one of these files as it was written.

    transformers casts what it reads, so this reads the files.  Of tied names, one is enough.
    """
    found = set()
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in checksums.keys() & set(tensors.keys()):
                if checksum(tensors.get_tensor(name)) != checksums[name]:
                    raise FileError(f"{folder} is not intact: {shown(name)} has a wrong checksum; get it anew")
                found.add(str(ties.get(name, name)))
    lost = [name for name in checksums if str(ties.get(name, name)) not in found]
    if lost:
        raise FileError(f"{folder} is not intact: {shown(lost[0])} is not in its files; get it anew")


def codes_shape(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """The shape of the codes of a tensor, which take this many bytes; what is too much is filled up with zeros."""
    rows = shape[0] if shape else 1
    return (rows, -(-size // rows), *[1] * max(0, len(shape) - 1))


CARD = """---
library_name: transformers
tags:
- dkm
---

# {name}

A {model} of transformers whose weights are clustered: the weights of a tensor share the values of a small table, and
the files hold the tables and a short code for each weight, or for each vector of a few weights.

## How to load it

It needs dkm: `pip install torch-dkm`.

```python
import dkm.integrations.transformers  # without this line, transformers refuses the folder
from transformers import {auto}

model = {auto}.from_pretrained("{name}")
```

## What it holds

"4/4" are codes of 4 bits for vectors of 4 weights.

| stored as | tensors | weights | bytes |
| --- | ---: | ---: | ---: |
{table}

The weights take {packed:,} bytes ({packed_text}) here, and {dense:,} bytes ({dense_text}) as {dtype}: {ratio:.1f} times
as much.

## How it was made

dkm clustered the weights of a trained model and wrote this folder. It implements differentiable k-means clustering
(Cho et al., *DKM: Differentiable k-Means Clustering Layer for Neural Network Compression*, ICLR 2022) and other
methods. What the model was trained on and how well it does were not recorded here.
"""


def _card(name: str, model: nn.Module, tensors: Iterable[Described], rows: Iterable[Row]) -> str:
    kinds: dict[str, list[int]] = {}
    packed = dense = 0
    for each, row in zip(tensors, rows, strict=True):
        label = row.source if isinstance(each.content, Codes) else f"not clustered, {row.source}"
        own = kinds.setdefault(label, [0, 0, 0])
        kinds[label] = [own[0] + 1, own[1] + each.numel, own[2] + row.bytes]
        packed, dense = packed + row.bytes, dense + each.numel * each.dtype.itemsize
    kind = type(model)
    return CARD.format(
        name=name,
        model=kind.__name__,
        auto=kind.__name__ if kind.__module__.startswith("transformers.") else "AutoModel",
        table="\n".join(f"| {label} | {a:,} | {b:,} | {c:,} |" for label, (a, b, c) in kinds.items()),
        packed=packed,
        packed_text=size_text(packed),
        dense=dense,
        dense_text=size_text(dense),
        dtype=" and ".join(sorted({str(each.dtype).removeprefix("torch.") for each in tensors})),
        ratio=dense / packed,
    )
