"""A clustered tensor as an entry of JSON and a few arrays of bytes, for containers that are not .dkm files.

The entry is that of a .dkm file and, besides, `centroids` and `scales`: the dtypes of those, and `checksum`: SHA-256 of
the bytes.  The arrays are bytes, so that no reader converts them to the dtype of a model on their way.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..clustering.decode import position_dtype
from ..foundation.errors import FileError
from ..foundation.text import shown
from .container import Array, Contradiction
from .described import Codes, Described
from .rules import NAMES, layout, tensor

KINDS = ("codes", "centroids", "scales", "positions", "outliers")
BESIDES = {"centroids", "scales", "checksum"}  # keys that an entry of a .dkm file has not


def entry_of(each: Described) -> dict[str, Any]:
    """What a .dkm file says about a tensor in its metadata."""
    entry: dict[str, Any] = {"shape": list(each.shape), "dtype": _name(each.dtype)}
    if isinstance(own := each.content, Codes):
        entry |= {"bits": own.bits, "dim": own.dim}
        entry |= {"exponent": own.exponent} if own.exponent else {}
        entry |= {"group": [own.group.rows, own.group.columns]} if own.group is not None else {}
        entry |= {"scaled": True} if own.scales is not None else {}
        entry |= {"outliers": len(own.outliers.values)} if own.outliers is not None else {}
    return entry


def to_parts(each: Described) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The entry of a clustered tensor, and its bytes: of codes, of centroids and, where there are any, of scales and of
    outliers."""
    own = each.content
    assert isinstance(own, Codes)
    given = {"codes": own.packed, "centroids": own.centroids, "scales": own.scales}
    if own.outliers is not None:
        given |= {"positions": own.outliers.stored_positions(each.numel), "outliers": own.outliers.values}
    parts = {kind: _bytes(value) for kind, value in given.items() if value is not None}
    dtypes = {kind: _name(value.dtype) for kind, value in given.items() if kind in BESIDES and value is not None}
    return entry_of(each) | dtypes | {"checksum": _checksum(parts)}, parts


def sizes(name: str, entry: Any, file: str) -> dict[str, int]:
    """How many bytes each part of a clustered tensor has; FileError where an entry cannot be right."""
    try:
        _, shapes, dtypes = _split(name, entry)
    except Contradiction as error:
        raise _contradicts(file, error) from None
    return {kind: torch.Size(shape).numel() * dtypes[kind].itemsize for kind, shape in shapes.items()}


def from_parts(name: str, entry: Any, parts: Mapping[str, Tensor], file: str) -> Described:
    """The tensor that `to_parts` took apart; FileError where entry and bytes do not fit each other or the rules."""
    try:
        own, shapes, dtypes = _split(name, entry)
        if shapes.keys() != parts.keys():
            raise Contradiction(f"{shown(name)} has {', '.join(parts)} and should have {', '.join(shapes)}")
        if _checksum(parts) != entry["checksum"]:
            raise FileError(f"{file} is not intact: {shown(name)} has a wrong checksum; get it anew")
        arrays = {kind: Array(dtypes[kind], shapes[kind], parts[kind].cpu().numpy()) for kind in shapes}
        for kind, array in arrays.items():
            if len(array.data) != torch.Size(array.shape).numel() * array.dtype.itemsize:
                raise Contradiction(f"the {kind} of {shown(name)} are {len(array.data)} bytes")
        return tensor(name, own, arrays)
    except Contradiction as error:
        raise _contradicts(file, error) from None


def checksum(value: Tensor) -> str:
    """SHA-256 of the bytes of a tensor, of any dtype."""
    return _checksum({"codes": _bytes(value)})


def _split(name: str, entry: Any) -> tuple[dict[str, Any], dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
    """The entry of a .dkm file, and the shapes and dtypes of the parts."""
    scales = {"scales"} if isinstance(entry, dict) and "scaled" in entry else set()
    if not isinstance(entry, dict) or BESIDES & entry.keys() != {"centroids", "checksum"} | scales:
        raise Contradiction(f"the entry of {shown(name)} is not that of a clustered tensor")
    dtypes = {"codes": torch.uint8}
    for kind in sorted({"centroids"} | scales):
        if not isinstance(entry[kind], str) or entry[kind] not in NAMES:
            raise Contradiction(f"the {kind} of {shown(name)} have an unknown dtype")
        dtypes[kind] = NAMES[entry[kind]]
    own = {key: value for key, value in entry.items() if key not in BESIDES}
    shapes = layout(name, own)
    if "outliers" in shapes:
        numel = torch.Size(entry["shape"]).numel()
        dtypes |= {"positions": position_dtype(numel), "outliers": NAMES[entry["dtype"]]}
    return own, shapes, dtypes


def _bytes(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8).clone()


def _checksum(parts: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for kind in KINDS:
        if kind in parts:
            digest.update(parts[kind].cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _contradicts(file: str, error: Contradiction) -> FileError:
    return FileError(f"{file} contradicts itself ({error}): the program that wrote it is at fault")
