"""The .dkm file: a safetensors container, and nothing that has to be executed to be read.

    codes/NAME       uint8 (bytes,)    a clustered tensor's indices, packed (see codec.py)
    centroids/NAME   16 bit (k, dim)   its centroids
    dense/NAME       any               a parameter or buffer that is not clustered

and, as the container's metadata, text:

    format      "dkm"
    version     "1"; a reader refuses a larger one
    tensors     JSON: NAME -> {"shape", "dtype"} and, where clustered, {"bits", "dim"}
    ties        JSON: NAME -> the NAME it shares its values with
    checksum    SHA-256, in hexadecimal, of the whole file with these 64 characters as zeros

A clustered tensor's values are `centroids[codes]`, flattened, cut to the number of elements of `shape`, and
cast to `dtype`, the dtype the model had.  NAMEs are the plain model's state_dict keys; every one of them is
either in `tensors` or in `ties`.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..clustering.precision import check_dtype, rounded, stored_dtype
from ..clustering.vectors import from_vectors
from ..foundation.atomic import write_atomically
from ..foundation.errors import FileError
from ..modelling.clustered import Clustered
from ..modelling.dtensors import is_first, on_first, reshard, whole
from ..modelling.parameters import clusterings, parameters, unwrapped
from ..plans.rows import Plan, Row
from ..plans.selection import kept_width
from .codec import pack, unpack

VERSION = 1
_BLANK = "0" * 64


def save(model: nn.Module, path: str | os.PathLike, *, dtype: torch.dtype = torch.float16) -> int:
    """Write a compressed model; returns the bytes written.

    Centroids take 16 bit.  Parameters that are not clustered take `dtype`; buffers keep theirs.  The file
    appears whole or not at all.

    Of a model that `fully_shard` has split, all ranks call this, and the first one writes.  One tensor at a time
    is gathered.
    """
    path = _as_path(path, "dkm.save(model, path)")
    if not path.name:
        raise FileError(f"cannot write {path}: it names a folder; add a file name")
    mesh = reshard(model)
    data = encode(model, dtype)
    return on_first(mesh, lambda: _write(path, data))


def _as_path(path: str | os.PathLike, call: str) -> Path:
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


def load(path: str | os.PathLike, into: nn.Module | None = None) -> nn.Module | dict[str, Tensor]:
    """Read a .dkm file: the dense state dict or, with `into`, that model with the weights in it.

    The model must have exactly the file's tensors, in its shapes, and no dkm on it; it stays untouched
    otherwise.
    """
    path = _as_path(path, "dkm.load(path, model)")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    state = decode(data, str(path))
    if into is None:
        return state
    model = unwrapped(into)
    _check_match(state, model, path)
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
        return f"{super().summary()}\nthe file takes {self.file_bytes:,} bytes ({self.file_bytes / 2**20:.2f} MB)"


def size(model: nn.Module, *, dtype: torch.dtype = torch.float16) -> Size:
    """What a compressed model takes: `.megabytes` as the paper counts, `.file_bytes` as `save` would write.

    Of a model that `fully_shard` has split, all ranks call this.
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


@torch.no_grad()
def encode(model: nn.Module, dtype: torch.dtype = torch.float16) -> bytes:
    """The bytes of the file.  Of a sharded model, all ranks call this and only the first gets them."""
    check_dtype(dtype)
    model = unwrapped(model)
    writes = is_first(reshard(model))
    entries: dict[str, dict] = {}
    ties: dict[str, str] = {}
    arrays: dict[str, Tensor] = {}
    owned_parameters = parameters(model)
    if all(owned.clustered is None for owned in owned_parameters):
        raise FileError("the model has no clustered tensor: call dkm.compress_(model, plan, ...) first")

    def keep(name: str, tensor: Tensor) -> None:
        # a copy each: safetensors refuses tensors that share memory, and ours may be views
        arrays[name] = tensor.detach().cpu().contiguous().clone()

    for owned in owned_parameters:
        name, *aliases = owned.names
        entries[name] = _entry(owned.tensor)
        ties |= dict.fromkeys(aliases, name)
        weight, clustered = whole(owned.tensor), owned.clustered
        # on every rank: where only one raised, the others would wait for it in the next collective
        _check_finite(name, weight, *([clustered.C.to(stored_dtype(weight.dtype))] if clustered else []))
        if not writes:
            continue
        if clustered is None:
            keep(f"dense/{name}", rounded(weight, dtype))
        else:
            entries[name] |= {"bits": clustered.bits, "dim": clustered.dim}
            C, codes = clustered.codes(weight)
            keep(f"codes/{name}", pack(codes, clustered.bits))
            keep(f"centroids/{name}", C)
    for name, tensor in _other_state(model, {name for owned in owned_parameters for name in owned.names}).items():
        entries[name] = _entry(tensor)
        keep(f"dense/{name}", whole(tensor))
    if not writes:
        return b""
    metadata = {
        "format": "dkm",
        "version": str(VERSION),
        "tensors": json.dumps(entries, sort_keys=True),
        "ties": json.dumps(ties, sort_keys=True),
        "checksum": _BLANK,
    }
    data = bytearray(_with_metadata(safetensors.torch.save(arrays), metadata))
    at = data.index(f'"checksum":"{_BLANK}"'.encode()) + len('"checksum":"')
    data[at : at + 64] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def _with_metadata(container: bytes, metadata: dict[str, str]) -> bytes:
    """The container with metadata in this order: safetensors itself writes it in a random one, and equal models
    shall give equal files."""
    length = int.from_bytes(container[:8], "little")
    header = {"__metadata__": metadata, **json.loads(container[8 : 8 + length])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + container[8 + length :]


def _entry(tensor: Tensor) -> dict:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _check_finite(name: str, *tensors: Tensor) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise FileError(f"{name} holds NaN, infinite or too large values: the training diverged; nothing was written")


def _other_state(model: nn.Module, known: set[str]) -> dict[str, Tensor]:
    """The state that is neither a parameter nor ours: buffers."""
    other = {}
    ours = tuple(
        f"{prefix}." for prefix, module in model.named_modules(remove_duplicate=False) if isinstance(module, Clustered)
    )
    for name, tensor in model.state_dict().items():
        plain = name.replace("parametrizations.", "").removesuffix(".original")
        if name in known or plain in known or name.startswith(ours):
            continue
        if not isinstance(tensor, Tensor):
            raise FileError(f"{name} in the model's state is a {type(tensor).__name__}: only tensors can be saved")
        if tensor.dtype not in safetensors.torch._SIZE:
            raise FileError(
                f"{name} is {tensor.dtype}, which safetensors cannot hold: convert it or make it not persistent"
            )
        other[name] = tensor
    return other


def decode(data: bytes, name: str = "the data") -> dict[str, Tensor]:
    """Bytes of a file -> the dense state dict."""
    metadata = verified_metadata(data, name)
    try:
        return _decode(metadata, safetensors.torch.load(data))
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        SafetensorError,
    ) as error:
        raise FileError(
            f"{name} is intact but contradicts itself ({error}): the program that wrote it is at fault"
        ) from error


def _decode(metadata: Mapping[str, str], arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    state = {}
    for key, entry in json.loads(metadata["tensors"]).items():
        shape, dtype = torch.Size(entry["shape"]), getattr(torch, entry["dtype"])
        if "bits" not in entry:
            state[key] = arrays[f"dense/{key}"].view(shape).to(dtype)
            continue
        count = -(-shape.numel() // entry["dim"])
        codes = unpack(arrays[f"codes/{key}"], entry["bits"], count)
        state[key] = from_vectors(arrays[f"centroids/{key}"][codes].to(dtype), shape).contiguous()
    for alias, key in json.loads(metadata["ties"]).items():
        state[alias] = state[key]
    return state


def verified_metadata(data: bytes, name: str) -> Mapping[str, str]:
    """The metadata of an unharmed file of a version we read; FileError otherwise."""
    broken = FileError(f"{name} is not an intact .dkm file: it is truncated, altered or something else; get it anew")
    try:
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        kind, version, checksum = metadata["format"], int(metadata["version"]), metadata["checksum"]
        at = data.index(f'"checksum":"{checksum}"'.encode()) + len('"checksum":"')
    except (ValueError, KeyError, TypeError, RecursionError):
        raise broken from None
    if kind != "dkm" or len(checksum) != 64:
        raise broken
    if version > VERSION:
        raise FileError(f"{name} has format version {version}, this dkm reads up to {VERSION}: upgrade torch-dkm")
    blanked = bytearray(data)
    blanked[at : at + 64] = _BLANK.encode()
    if hashlib.sha256(blanked).hexdigest() != checksum:
        raise broken
    return metadata


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
        f"the model ties {alias} to {owned.names[0]} and the file has different values for them"
        for owned in parameters(model)
        for alias in owned.names[1:]
        if not problems and not torch.equal(state[alias], state[owned.names[0]])
    ]
    if problems:
        more = f", and {len(problems) - 3} more differences" if len(problems) > 3 else ""
        raise FileError(f"{path} does not fit this model: {'; '.join(problems[:3])}{more}")
