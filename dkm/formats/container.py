"""The container of a .dkm file: arrays and a few texts, protected by a checksum.  Bytes only, no model.

A safetensors file whose metadata holds

    format      "dkm"
    version     "1"; a reader refuses a larger one
    tensors     JSON: NAME -> {"shape", "dtype"} and, where clustered, {"bits", "dim"}
    ties        JSON: NAME -> the NAME it shares its values with
    checksum    SHA-256, in hexadecimal, of the whole file with these 64 characters as zeros
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
from torch import Tensor

from ..foundation.errors import FileError

VERSION = 1
BLANK = "0" * 64


@dataclass(frozen=True)
class Contents:
    """What a container holds."""

    entries: dict[str, dict[str, Any]]  # the metadata `tensors`
    ties: dict[str, str]
    arrays: dict[str, Tensor]


def to_bytes(contents: Contents) -> bytes:
    """The bytes of a container; equal contents give equal bytes."""
    metadata = {
        "format": "dkm",
        "version": str(VERSION),
        "tensors": json.dumps(contents.entries, sort_keys=True),
        "ties": json.dumps(contents.ties, sort_keys=True),
        "checksum": BLANK,
    }
    data = bytearray(_with_metadata(safetensors.torch.save(contents.arrays), metadata))
    at = data.index(f'"checksum":"{BLANK}"'.encode()) + len('"checksum":"')
    data[at : at + 64] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def from_bytes(data: bytes, name: str) -> Contents:
    """The contents of an unharmed container of a version that we read; FileError otherwise."""
    metadata = _verified_metadata(data, name)
    return Contents(json.loads(metadata["tensors"]), json.loads(metadata["ties"]), safetensors.torch.load(data))


def _with_metadata(container: bytes, metadata: dict[str, str]) -> bytes:
    """The container with metadata in this order.  safetensors itself writes metadata in a random order, and equal
    models shall give equal files."""
    length = int.from_bytes(container[:8], "little")
    header = {"__metadata__": metadata, **json.loads(container[8 : 8 + length])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + container[8 + length :]


def _verified_metadata(data: bytes, name: str) -> Mapping[str, str]:
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
    blanked[at : at + 64] = BLANK.encode()
    if hashlib.sha256(blanked).hexdigest() != checksum:
        raise broken
    return metadata
