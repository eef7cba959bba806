"""The .dkm file: a safetensors container, and nothing that has to be executed to be read.

    codes/NAME       uint8 (bytes,)    a clustered tensor's indices, packed (see codec.py)
    centroids/NAME   16 bit (k, dim)   its centroids
    dense/NAME       any               a parameter or buffer that is not clustered

`container.py` says what else the container holds.  A clustered tensor's values are `centroids[codes]`, flattened, cut
to the number of elements of its shape, and cast to the dtype that the model had.  NAMEs are the keys of the plain
model's state_dict; every one of them is either in the container's `tensors` or in its `ties`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..clustering.vectors import from_vectors
from ..foundation.atomic import write_atomically
from ..foundation.errors import FileError
from ..modelling.dtensors import on_first, reshard
from ..modelling.parameters import clusterings, parameters, unwrapped
from ..plans.rows import Plan, Row
from ..plans.selection import kept_width
from .codec import pack, unpack
from .container import Contents, from_bytes, to_bytes
from .describe import Codes, describe


def save(model: nn.Module, path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float16) -> int:
    """Write a compressed model; returns the number of bytes written.

    Centroids take 16 bit.  Parameters that are not clustered take `dtype`; buffers keep theirs.  The file
    appears whole or not at all.

    For a model that `fully_shard` has split, all ranks call this, and the first one writes.  One tensor at a time
    is gathered.
    """
    target = _as_path(path, "dkm.save(model, path)")
    if not target.name:
        raise FileError(f"cannot write {target}: it names a folder; add a file name")
    mesh = reshard(model)
    data = encode(model, dtype)
    return on_first(mesh, lambda: _write(target, data))


def load(path: str | os.PathLike[str], into: nn.Module | None = None) -> nn.Module | dict[str, Tensor]:
    """Read a .dkm file: the dense state dict or, with `into`, that model with the weights in it.

    The model must have exactly the file's tensors, in its shapes, and no dkm on it; it stays untouched
    otherwise.
    """
    source = _as_path(path, "dkm.load(path, model)")
    state = decode(read_bytes(source), str(source))
    if into is None:
        return state
    model = unwrapped(into)
    _check_match(state, model, source)
    on_meta = any(tensor.is_meta for tensor in model.state_dict().values())
    shared = [owned.owners for owned in parameters(model)]
    model.load_state_dict(state, assign=on_meta)
    for (module, attribute), *others in shared if on_meta else ():  # assign makes a parameter for every name
        for other, alias in others:
            setattr(other, alias, getattr(module, attribute))
    return into


@dataclass(frozen=True)
class Size(Plan):
    """A compressed model's size: the plan's rows and figures, and the file's own bytes."""

    file_bytes: int = 0

    def summary(self) -> str:
        """The size in three lines."""
        return f"{super().summary()}\nthe file takes {self.file_bytes:,} bytes ({self.file_bytes / 2**20:.2f} MB)"


def size(model: nn.Module, *, dtype: torch.dtype = torch.float16) -> Size:
    """What a compressed model takes: `.megabytes` as the paper counts, `.file_bytes` as `save` would write.

    For a model that `fully_shard` has split, all ranks call this.
    """
    mesh = reshard(model)
    rows = []
    for owned in parameters(model):
        tensor, clustered = owned.tensor, owned.clustered
        bits, dim = (None, 1) if clustered is None else (clustered.bits, clustered.dim)
        reason = "kept" if clustered is None else "clustered"
        rows.append(Row(owned.name, tuple(tensor.shape), "", bits, dim, reason, owned.aliases, kept_width(tensor)))
    data = encode(model, dtype)
    return Size(tuple(rows), on_first(mesh, lambda: len(data)))


def encode(model: nn.Module, dtype: torch.dtype = torch.float16) -> bytes:
    """The bytes of the file.  For a sharded model, all ranks call this and only the first one gets them."""
    entries: dict[str, dict[str, Any]] = {}
    ties: dict[str, str] = {}
    arrays: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> None:
        # a copy of each: safetensors refuses tensors that share memory, and ours may be views
        arrays[name] = tensor.detach().cpu().contiguous().clone()

    for each in describe(model, dtype):
        entry = entries[each.name] = {"shape": list(each.shape), "dtype": str(each.dtype).removeprefix("torch.")}
        ties |= dict.fromkeys(each.aliases, each.name)
        if isinstance(each.content, Codes):
            entry |= {"bits": each.content.bits, "dim": each.content.dim}
            keep(f"codes/{each.name}", pack(each.content.codes, each.content.bits))
            keep(f"centroids/{each.name}", each.content.centroids)
        else:
            keep(f"dense/{each.name}", each.content)
    return to_bytes(Contents(entries, ties, arrays)) if entries else b""


def decode(data: bytes, name: str = "the data") -> dict[str, Tensor]:
    """The dense state dict in the bytes of a file."""
    broken = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, SafetensorError)
    try:
        return _dense(from_bytes(data, name))
    except FileError:
        raise
    except broken as error:
        raise FileError(
            f"{name} is intact but contradicts itself ({error}): the program that wrote it is at fault"
        ) from error


def read_bytes(path: Path) -> bytes:
    """The bytes of a file; FileError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error


def _dense(contents: Contents) -> dict[str, Tensor]:
    state = {}
    for name, entry in contents.entries.items():
        shape, dtype = torch.Size(entry["shape"]), getattr(torch, entry["dtype"])
        if "bits" not in entry:
            state[name] = contents.arrays[f"dense/{name}"].view(shape).to(dtype)
            continue
        codes = unpack(contents.arrays[f"codes/{name}"], entry["bits"], -(-shape.numel() // entry["dim"]))
        state[name] = from_vectors(contents.arrays[f"centroids/{name}"][codes].to(dtype), shape).contiguous()
    for alias, name in contents.ties.items():
        state[alias] = state[name]
    return state


def _as_path(path: str | os.PathLike[str], call: str) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{call}: the path must be a string or a pathlib.Path, got {type(path).__name__}")
    return Path(path)


def _write(path: Path, data: bytes) -> int:
    try:
        return write_atomically(path, data)
    except OSError as error:
        raise FileError(
            f"cannot write {path}: {error.strerror or error}; choose a file in a folder that exists and is writable"
        ) from error


def _check_match(state: Mapping[str, Tensor], model: nn.Module, path: Path) -> None:
    if clusterings(model):
        raise FileError(f"{path} holds dense weights and the model is compressed: load into a plain model")
    own = model.state_dict()
    problems = [f"the model has no {name}" for name in state if name not in own]
    problems += [f"the file has no {name}" for name in own if name not in state]
    problems += [
        f"{name} is {tuple(tensor.shape)} in the file and {tuple(own[name].shape)} in the model"
        for name, tensor in state.items()
        if name in own and own[name].shape != tensor.shape
    ]
    problems += [
        f"the model ties {alias} to {owned.name} and the file has different values for them"
        for owned in parameters(model)
        for alias in owned.aliases
        if not problems and not torch.equal(state[alias], state[owned.name])
    ]
    if problems:
        more = f", and {len(problems) - 3} more differences" if len(problems) > 3 else ""
        raise FileError(f"{path} does not fit this model: {'; '.join(problems[:3])}{more}")
