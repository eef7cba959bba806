"""The container of a .dkm file: arrays and a few texts, protected by a checksum.  Bytes only, no model.

A safetensors file whose metadata holds

    format      "dkm"
    version     "1", or "2" to "4" where a tensor needs what came with it; a reader refuses any other
    tensors     JSON: NAME -> {"shape", "dtype"} and, where clustered, {"bits", "dim"} and perhaps those of KEYS
    ties        JSON: NAME -> the NAME it shares its values with
    checksum    SHA-256, in hexadecimal, of the whole file with these 64 characters as zeros

What the texts say, and whether the arrays agree with them, is checked in `rules.py`.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..clustering.precision import FLOAT8
from ..foundation.errors import FileError
from ..foundation.text import shown

KEYS: dict[str, set[str]] = {  # of a clustered tensor besides shape, dtype, bits and dim, in each version that is read
    "1": set(),
    "2": {"exponent", "group", "scaled"},
    "3": {"exponent", "group", "scaled", "coding"},
    "4": {"exponent", "group", "scaled", "coding", "outliers"},
}
BLANK = "0" * 64
HEADER_LIMIT = 100_000_000  # bytes: the limit that safetensors itself has
MOST_DIMENSIONS = 64  # PyTorch and numpy compute with no more
DTYPES: dict[str, torch.dtype] = {  # of arrays, by the name that safetensors gives them
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Contradiction(Exception):
    """What an intact file says contradicts the format.  The text says what, and of which tensor."""


@dataclass(frozen=True)
class Array:
    """A stored array, as it lies in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: np.ndarray  # its bytes, (n,) uint8, a view of the file's

    def tensor(self) -> Tensor:
        """A copy of the values."""
        if not len(self.data):
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(self.data.copy()).view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Container:
    """The parts of an unharmed container.  The checksum is right; nothing else is checked."""

    metadata: dict[str, Any]
    header: dict[str, Any]  # an entry for each array
    data: np.ndarray  # (n,) uint8: what follows the header


def to_bytes(entries: dict[str, dict[str, Any]], ties: dict[str, str], arrays: dict[str, Tensor]) -> bytes:
    """The bytes of a container with the metadata `tensors` and `ties`.  Equal contents give equal bytes."""
    float8 = any("bits" in entry and arrays[f"centroids/{name}"].dtype == FLOAT8 for name, entry in entries.items())
    keys = {key for entry in entries.values() for key in entry} - {"shape", "dtype", "bits", "dim"}
    metadata = {
        "format": "dkm",
        # the oldest version that can say it, for older readers
        "version": next(version for version in KEYS if keys <= KEYS[version] and (version != "1" or not float8)),
        "tensors": json.dumps(entries, sort_keys=True),
        "ties": json.dumps(ties, sort_keys=True),
        "checksum": BLANK,
    }
    try:
        plain = safetensors.torch.save(arrays)
    except (SafetensorError, LookupError) as error:  # an older safetensors knows fewer dtypes
        raise FileError(f"this version of safetensors cannot write the model ({error}): upgrade safetensors") from error
    data = bytearray(_with_metadata(plain, metadata))
    at = data.index(f'"checksum":"{BLANK}"'.encode()) + len('"checksum":"')
    data[at : at + 64] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def from_bytes(data: bytes, name: str) -> Container:
    """The parts of an unharmed container of a version that we read; FileError otherwise."""
    try:
        header = _header(data)
        metadata = header.pop("__metadata__", None)
        if not isinstance(metadata, dict) or metadata.get("format") != "dkm":
            if header:  # of tensors: someone else's file, and nothing is wrong with it
                raise FileError(
                    f"{name} is a safetensors file that dkm did not write: give a .dkm file, as dkm.save and dkm "
                    "compress write it"
                )
            raise ValueError("its metadata do not name the format dkm")
        version, checksum = metadata.get("version"), metadata.get("checksum")
        if not isinstance(version, str) or not re.fullmatch("[1-9][0-9]*", version):
            raise ValueError("its version is not a number")
        if version not in KEYS:
            raise FileError(
                f"{name} has format version {shown(version)}, this dkm reads up to {max(KEYS)}: upgrade torch-dkm"
            )
        if not isinstance(checksum, str) or not re.fullmatch("[0-9a-f]{64}", checksum):
            raise ValueError("it has no checksum")
        _verify(data, checksum)
    except FileError:
        raise
    except RecursionError:
        raise _broken(name, "its header is nested too deeply") from None
    except ValueError as error:
        raise _broken(name, str(error)) from None
    return Container(metadata, header, np.frombuffer(data, np.uint8)[_start(data) :])


def stored_arrays(container: Container) -> dict[str, Array]:
    """The arrays of a container; Contradiction unless they fill the data without gaps and overlaps."""
    arrays, spans = {}, []
    for name, entry in container.header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise Contradiction(f"the header of {shown(name)} is not dtype, shape and data_offsets")
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
            raise Contradiction(f"{shown(name)} has an unknown dtype")
        dtype, shape, offsets = DTYPES[entry["dtype"]], checked_shape(entry["shape"], name), entry["data_offsets"]
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)):
            raise Contradiction(f"the data_offsets of {shown(name)} are not two numbers")
        begin, end = offsets
        if end - begin != math.prod(shape) * dtype.itemsize or end > len(container.data):
            raise Contradiction(f"the data_offsets of {shown(name)} do not fit its shape and dtype, or the file")
        arrays[name] = Array(dtype, shape, container.data[begin:end])
        spans.append((begin, end))
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise Contradiction("the arrays overlap or leave gaps")
        at = end
    if at != len(container.data):
        raise Contradiction("the arrays do not fill the file")
    return arrays


def array_sizes(data: bytes) -> dict[str, int]:
    """The bytes of each array of a file, and those of all else as its `header`: together they are the whole file."""
    sizes = {name: len(array.data) for name, array in stored_arrays(from_bytes(data, "the file")).items()}
    return {**sizes, "header": len(data) - sum(sizes.values())}  # names of arrays have a slash in them


def checked_shape(shape: Any, name: str) -> tuple[int, ...]:
    """The shape that a JSON value says; Contradiction unless a tensor can have it."""
    if not isinstance(shape, list) or not all(map(is_size, shape)):
        raise Contradiction(f"the shape of {shown(name)} is not a list of integers of at least 0")
    if len(shape) > MOST_DIMENSIONS:
        raise Contradiction(f"{shown(name)} has {len(shape)} dimensions, more than {MOST_DIMENSIONS}")
    if math.prod(max(1, size) for size in shape) * 8 >= 2**63:  # strides and byte counts are signed integers of 64 bit
        raise Contradiction(f"the shape of {shown(name)} is too large")
    return tuple(shape)


def is_size(value: Any) -> bool:
    """Whether a JSON value is an integer of at least 0; true and 2.0 are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def strict_json(text: str) -> Any:
    """The value of a JSON text.  ValueError also for a key that an object has twice, for NaN and Infinity, and for
    names that are not Unicode."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_integer)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        key.encode()  # refuses half of a surrogate pair
        if key in found:
            raise ValueError(f"{shown(key)} appears twice")
        found[key] = value
    return found


def _integer(text: str) -> int | float:
    """No integer of the format is negative; -0, which some readers of JSON take for a float, is none either."""
    return -0.0 if text == "-0" else int(text)


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _with_metadata(container: bytes, metadata: dict[str, str]) -> bytes:
    """The container with metadata in this order.  safetensors itself writes metadata in a random order, and equal
    models shall give equal files."""
    length = int.from_bytes(container[:8], "little")
    header = {"__metadata__": metadata, **json.loads(container[8 : 8 + length])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + container[8 + length :]


def _broken(name: str, reason: str) -> FileError:
    return FileError(
        f"{name} is not an intact .dkm file ({reason}): it is truncated, altered or something else; get it anew"
    )


def _start(data: bytes) -> int:
    """Where the data of the arrays begin."""
    return 8 + int.from_bytes(data[:8], "little")


def _header(data: bytes) -> dict[str, Any]:
    start = _start(data)
    if len(data) < 8 or not 8 < start <= min(len(data), 8 + HEADER_LIMIT) or data[8:9] != b"{":
        raise ValueError("it does not begin with a header")
    return strict_json(data[8:start].decode())


def _verify(data: bytes, checksum: str) -> None:
    """ValueError unless this is the checksum of the data."""
    before = f'"checksum":"{checksum}"'.encode()
    at = data.find(before, 8, _start(data))
    if at < 0:
        raise ValueError("its checksum is not written as a reader must find it")
    at += len(before) - 65
    rest = memoryview(data)
    digest = hashlib.sha256(rest[:at])
    digest.update(BLANK.encode())
    digest.update(rest[at + 64 :])
    if digest.hexdigest() != checksum:
        raise ValueError("its checksum is wrong")
