"""What a .dkm file must be: the one check for `load`, `inspect` and everything else that reads a file.

`docs/file-format.md` lists these rules.  `read` decodes nothing, and allocates nothing beyond copies of one table of
centroids: what a file claims is compared with the bytes that it has.  Whether entropy-coded codes are right shows when
`Contents.tensors` decodes them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..clustering.decode import Outliers, all_finite, position_dtype
from ..clustering.groups import Group, Grouping
from ..clustering.precision import FLOAT8, LARGEST_EXPONENT, MAX_BITS
from ..foundation.errors import FileError
from ..foundation.text import shown
from .codec import packed_size, padding_is_zero
from .container import (
    DTYPES,
    KEYS,
    Array,
    Container,
    Contradiction,
    checked_shape,
    from_bytes,
    is_size,
    stored_arrays,
    strict_json,
)
from .described import Codes, Described
from .entropy import LARGEST_GAIN, decode

METADATA = {"format", "version", "tensors", "ties", "checksum"}
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}  # of a tensor's dtype in the model
PACKED_KEYS = KEYS[max(KEYS)] - {"coding"}  # of a clustered tensor with packed codes, besides those of all versions
CLUSTERED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # what can be clustered
SIXTEEN = (torch.float16, torch.bfloat16)  # of scales, and of centroids
LARGEST_GROUP = 2**60  # rows and columns of a group are less


@dataclass(frozen=True)
class Packed:
    """A clustered tensor as it lies in the file."""

    bits: int
    dim: int
    exponent: int
    group: Group | None
    coded: bool  # whether the codes are entropy-coded
    codes: Array  # uint8 (bytes,): see codec.py or, where they are coded, entropy.py
    centroids: Array  # 16 bit or E4M3 (2^bits, dim), or (groups, 2^bits, dim) where there is a group
    scales: Array | None  # 16 bit (shape[0],)
    positions: Array | None = None  # (m,): of outliers
    outliers: Array | None = None  # (m,), of the tensor's dtype

    def read(self, shape: tuple[int, ...]) -> Codes:
        """A copy of it, apart from the file; ValueError for entropy-coded codes that nothing is coded as."""
        n = Grouping.of(shape, self.group, self.dim).codes
        return Codes(
            bits=self.bits,
            dim=self.dim,
            exponent=self.exponent,
            packed=decode(self.codes.data, self.bits, n) if self.coded else self.codes.tensor(),
            centroids=self.centroids.tensor(),
            group=self.group,
            scales=None if self.scales is None else self.scales.tensor(),
            outliers=None if self.outliers is None else self.read_outliers(),
        )

    def read_outliers(self) -> Outliers:
        """A copy of them."""
        assert self.positions is not None
        assert self.outliers is not None
        return Outliers(self.positions.tensor().to(torch.int64), self.outliers.tensor())


@dataclass(frozen=True)
class Entry:
    """A tensor of the model, and what the file stores of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    content: Packed | Array

    @property
    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Contents:
    """What a file holds: everything in it obeys the rules, but for entropy-coded codes, which `tensors` checks."""

    file: str  # its name, for messages
    entries: dict[str, Entry]
    ties: dict[str, str]  # another name of a tensor -> its name in `entries`

    def tensors(self) -> Iterator[Described]:
        """The tensors, one after another: each is a copy, so memory is bounded by the largest of them.

        FileError where a tensor's codes are entropy-coded and wrong.
        """
        aliases: dict[str, list[str]] = {}
        for alias, name in self.ties.items():
            aliases.setdefault(name, []).append(alias)
        for name, entry in self.entries.items():
            stored = entry.content
            try:
                content = stored.read(entry.shape) if isinstance(stored, Packed) else stored.tensor()
            except FileError:
                raise
            except ValueError as error:
                raise _contradicts(self.file, f"the codes of {shown(name)} {error}") from None
            except (MemoryError, RuntimeError) as error:
                raise _too_large(self.file, error) from error
            yield Described(name, entry.shape, entry.dtype, content, tuple(aliases.get(name, ())))


def read(data: bytes, name: str) -> Contents:
    """The contents of a file's bytes; FileError, with what is wrong, for all bytes that are not a .dkm file."""
    try:
        return _checked(from_bytes(data, name), name)
    except Contradiction as error:
        raise _contradicts(name, str(error)) from None
    except (MemoryError, RuntimeError) as error:  # PyTorch raises a RuntimeError where memory runs out
        raise _too_large(name, error) from error


def layout(name: str, entry: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the packed codes, of the centroids and, where there are any, of the scales and the outliers of a
    clustered tensor with this entry; Contradiction where there can be no such tensor."""
    keys = entry.keys() - PACKED_KEYS if isinstance(entry, dict) else set()
    if keys != {"shape", "dtype", "bits", "dim"}:
        raise Contradiction(f"the entry of {shown(name)} is not that of a clustered tensor")
    shape, facts = checked_shape(entry["shape"], name), _facts(name, entry)
    if not math.prod(shape):
        raise Contradiction(f"{shown(name)} is clustered and has no values")
    grouping = Grouping.of(shape, facts["group"], facts["dim"])
    groups = [] if facts["group"] is None else [grouping.count]
    found = {
        "codes": [packed_size(grouping.codes, facts["bits"])],
        "centroids": [*groups, 2 ** facts["bits"], facts["dim"]],
    }
    found |= {"scales": [shape[0] if shape else 1]} if "scaled" in entry else {}
    if "outliers" in entry:
        _dtype(name, entry)
        count = _outlier_count(name, entry, math.prod(shape))
        found |= {"positions": [count], "outliers": [count]}
    return {kind: checked_shape(own, name) for kind, own in found.items()}


def tensor(name: str, entry: dict[str, Any], arrays: Mapping[str, Array]) -> Described:
    """The clustered tensor of an entry that `layout` has checked, and its `arrays`, by their kinds; Contradiction where
    they do not obey the rules."""
    checked = _entry(name, entry, {f"{kind}/{name}": array for kind, array in arrays.items()}, max(KEYS))
    assert isinstance(checked.content, Packed)
    return Described(name, checked.shape, checked.dtype, checked.content.read(checked.shape))


def _contradicts(file: str, reason: str) -> FileError:
    return FileError(f"{file} is intact but contradicts itself ({reason}): the program that wrote it is at fault")


def _too_large(file: str, error: Exception) -> FileError:
    return FileError(f"{file} does not fit into the memory ({error})")


def _checked(container: Container, file: str) -> Contents:
    if container.metadata.keys() != METADATA:
        raise Contradiction(f"the metadata are not {', '.join(sorted(METADATA))}")
    arrays = stored_arrays(container)
    tensors, ties = _object(container.metadata, "tensors"), _object(container.metadata, "ties")
    version = container.metadata["version"]
    entries = {name: _entry(name, entry, arrays, version) for name, entry in tensors.items()}
    _check_no_others(arrays, entries)
    _check_ties(ties, entries)
    return Contents(file, entries, ties)


def _object(metadata: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The JSON object in a text of the metadata."""
    try:
        value = strict_json(metadata[key]) if isinstance(metadata[key], str) else None
    except (ValueError, RecursionError) as error:
        raise Contradiction(f"the metadata {key} are not valid: {error}") from None
    if not isinstance(value, dict):
        raise Contradiction(f"the metadata {key} are not a JSON object in a text")
    return value


def _entry(name: str, entry: Any, arrays: Mapping[str, Array], version: str) -> Entry:
    keys = entry.keys() if isinstance(entry, dict) else set()
    if "bits" in keys:
        keys = keys - KEYS[version]
    if keys not in ({"shape", "dtype"}, {"shape", "dtype", "bits", "dim"}):
        raise Contradiction(f"the entry of {shown(name)} is not shape and dtype, or shape, dtype, bits and dim")
    shape, dtype = checked_shape(entry["shape"], name), _dtype(name, entry)
    if "bits" in entry:
        packed = _packed(name, entry, arrays)
        _check_packed(name, Entry(shape, dtype, packed), packed)
        if "outliers" in entry:
            _check_outliers(name, packed, _outlier_count(name, entry, math.prod(shape)), math.prod(shape), dtype)
        if version == "1" and packed.centroids.dtype == FLOAT8:
            raise Contradiction(f"the centroids of {shown(name)} are 8-bit floats, which version 1 does not have")
        return Entry(shape, dtype, packed)
    array = _array("dense", name, arrays)
    _check_dense(name, shape, dtype, array)
    return Entry(shape, dtype, array)


def _dtype(name: str, entry: Mapping[str, Any]) -> torch.dtype:
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in NAMES:
        raise Contradiction(f"{shown(name)} has an unknown dtype")
    return NAMES[entry["dtype"]]


def _outlier_count(name: str, entry: Mapping[str, Any], numel: int) -> int:
    count = entry["outliers"]
    if not is_size(count) or not 1 <= count <= numel:
        raise Contradiction(f"the outliers of {shown(name)} are not an integer from 1 to {numel}")
    return int(count)


def _packed(name: str, entry: Mapping[str, Any], arrays: Mapping[str, Array]) -> Packed:
    facts = _facts(name, entry)
    if entry.get("coding", "ans") != "ans":
        raise Contradiction(f"the coding of {shown(name)} is not ans")
    return Packed(
        **facts,
        coded="coding" in entry,
        codes=_array("codes", name, arrays),
        centroids=_array("centroids", name, arrays),
        scales=_array("scales", name, arrays) if "scaled" in entry else None,
        positions=_array("positions", name, arrays) if "outliers" in entry else None,
        outliers=_array("outliers", name, arrays) if "outliers" in entry else None,
    )


def _facts(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """What the entry of a clustered tensor says about its codes."""
    bits, dim, exponent = entry["bits"], entry["dim"], entry.get("exponent", 0)
    if not is_size(bits) or not 1 <= bits <= MAX_BITS:
        raise Contradiction(f"the bits of {shown(name)} are not an integer from 1 to {MAX_BITS}")
    if not is_size(dim) or dim < 1:
        raise Contradiction(f"the dim of {shown(name)} is not an integer of at least 1")
    if "exponent" in entry and (type(exponent) is not int or not 1 <= abs(exponent) <= LARGEST_EXPONENT):
        raise Contradiction(
            f"the exponent of {shown(name)} is not an integer from {-LARGEST_EXPONENT} to {LARGEST_EXPONENT} without 0"
        )
    if "scaled" in entry and entry["scaled"] is not True:
        raise Contradiction(f"{shown(name)} has a key scaled that is not true")
    group = _group(name, entry["group"]) if "group" in entry else None
    return dict(bits=bits, dim=dim, exponent=exponent, group=group)


def _group(name: str, value: Any) -> Group:
    sizes = value if isinstance(value, list) and len(value) == 2 and value != [None, None] else [0]
    if not all(size is None or (is_size(size) and 1 <= size < LARGEST_GROUP) for size in sizes):
        raise Contradiction(
            f"the group of {shown(name)} is not two integers from 1 to 2^60 - 1, of which one may be null"
        )
    return Group(*sizes)


def _check_packed(name: str, entry: Entry, packed: Packed) -> None:
    bits, dim, centroids = packed.bits, packed.dim, packed.centroids
    if entry.dtype not in CLUSTERED:
        raise Contradiction(f"{shown(name)} is {entry.dtype}, which cannot be clustered")
    if entry.numel == 0:
        raise Contradiction(f"{shown(name)} is clustered and has no values")
    grouping = Grouping.of(entry.shape, packed.group, dim)
    if centroids.dtype not in (*SIXTEEN, FLOAT8):
        raise Contradiction(f"the centroids of {shown(name)} are neither float16 nor bfloat16 nor float8_e4m3fn")
    if centroids.shape != (() if packed.group is None else (grouping.count,)) + (2**bits, dim):
        groups = "" if packed.group is None else f"{grouping.count} groups, "
        raise Contradiction(
            f"{shown(name)} has {groups}{bits} bits and dim {dim}, and centroids of shape {centroids.shape}"
        )
    _check_codes(name, packed, grouping.codes)
    scales = None if packed.scales is None else _checked_scales(name, entry.shape, packed.scales)
    if not all_finite(centroids.tensor(), scales, packed.exponent, entry.dtype):
        times = "" if scales is None else ", times the largest scale,"
        raise Contradiction(f"the centroids of {shown(name)}{times} are not finite")


def _check_codes(name: str, packed: Packed, n: int) -> None:
    bits, codes, size = packed.bits, packed.codes, packed_size(n, packed.bits)
    if packed.coded:
        if codes.dtype != torch.uint8 or len(codes.shape) != 1:
            raise Contradiction(f"the codes of {shown(name)} are {codes.dtype} of shape {codes.shape}, and not bytes")
        if size > LARGEST_GAIN * len(codes.data):
            raise Contradiction(
                f"the {n} codes of {shown(name)} take {size} bytes at {bits} bits, which is more than {LARGEST_GAIN} "
                f"times the {len(codes.data)} bytes that they take in the file"
            )
        return
    if codes.dtype != torch.uint8 or codes.shape != (size,):
        raise Contradiction(
            f"the {n} codes of {shown(name)} take {size} bytes at {bits} bits, "
            f"and the file has {codes.dtype} of shape {codes.shape}"
        )
    if not padding_is_zero(codes.data, bits, n):
        raise Contradiction(f"the unused bits after the codes of {shown(name)} are not zero")


def _checked_scales(name: str, shape: tuple[int, ...], array: Array) -> Tensor:
    rows = shape[0] if shape else 1
    if array.dtype not in SIXTEEN or array.shape != (rows,):
        raise Contradiction(
            f"the {rows} scales of {shown(name)} are not float16 or bfloat16 of shape ({rows},), "
            f"but {array.dtype} of shape {array.shape}"
        )
    scales = array.tensor()
    if not bool(((scales > 0) & scales.isfinite()).all()):
        raise Contradiction(f"the scales of {shown(name)} are not all positive and finite")
    return scales


def _check_outliers(name: str, packed: Packed, count: int, numel: int, dtype: torch.dtype) -> None:
    kinds = {"positions": (packed.positions, position_dtype(numel)), "outliers": (packed.outliers, dtype)}
    for kind, (array, wanted) in kinds.items():
        assert array is not None
        if array.dtype != wanted or array.shape != (count,):
            raise Contradiction(
                f"the {count} {'values' if kind == 'outliers' else kind} of the outliers of {shown(name)} are not "
                f"{wanted} of shape ({count},), but {array.dtype} of shape {array.shape}"
            )
    found = packed.read_outliers()
    if not bool(found.values.isfinite().all()):
        raise Contradiction(f"the outliers of {shown(name)} are not all finite")
    positions = found.positions
    if int(positions[0]) < 0 or int(positions[-1]) >= numel or not bool((positions.diff() > 0).all()):
        raise Contradiction(f"the positions of the outliers of {shown(name)} do not rise from 0 to less than {numel}")


def _check_dense(name: str, shape: tuple[int, ...], dtype: torch.dtype, array: Array) -> None:
    if array.shape != shape:
        raise Contradiction(f"{shown(name)} has shape {shape}, and values of shape {array.shape}")
    narrower = array.dtype.is_floating_point and dtype.is_floating_point and array.dtype.itemsize < dtype.itemsize
    if array.dtype != dtype and not narrower:
        raise Contradiction(f"{shown(name)} is {dtype}, and its values are {array.dtype}")
    if dtype == torch.bool and bool((array.data > 1).any()):
        raise Contradiction(f"{shown(name)} has truth values that are neither 0 nor 1")


def _array(kind: str, name: str, arrays: Mapping[str, Array]) -> Array:
    array = arrays.get(f"{kind}/{name}")
    if array is None:
        raise Contradiction(f"{shown(name)} has no {kind}")
    return array


def _check_no_others(arrays: Mapping[str, Array], entries: Mapping[str, Entry]) -> None:
    needed = set()
    for name, entry in entries.items():
        kinds = {"codes", "centroids"} if isinstance(entry.content, Packed) else {"dense"}
        if isinstance(entry.content, Packed):
            kinds |= {"scales"} if entry.content.scales is not None else set()
            kinds |= {"positions", "outliers"} if entry.content.outliers is not None else set()
        needed |= {f"{kind}/{name}" for kind in kinds}
    for name in arrays.keys() - needed:
        raise Contradiction(f"the array {shown(name)} belongs to no tensor")


def _check_ties(ties: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
    for alias, name in ties.items():
        if alias in entries:
            raise Contradiction(f"{shown(alias)} is a tensor and is tied to another one")
        if not isinstance(name, str) or name not in entries:
            raise Contradiction(f"{shown(alias)} is tied to something that is not a tensor of the file")
