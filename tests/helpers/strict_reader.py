"""A strict reader of .dkm files: docs/file-format.md in numpy and json, without PyTorch and without dkm."""

import hashlib
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np


class Refused(Exception):
    """The bytes are not a .dkm file of a known version."""


@dataclass
class Tensor:
    """A tensor of the model: its dtype there, and its values.  numpy has no bfloat16: those are in float32."""

    dtype: str
    values: np.ndarray


def float8(exponent_bits: int, bias: int, specials: dict[int, float]) -> np.ndarray:
    """The 256 values of an 8-bit float, by its bits."""
    fraction_bits = 7 - exponent_bits
    table = np.empty(256, np.float32)
    for byte in range(256):
        sign, exponent = -1.0 if byte >> 7 else 1.0, byte >> fraction_bits & (2**exponent_bits - 1)
        fraction = (byte & (2**fraction_bits - 1)) / 2**fraction_bits
        table[byte] = sign * ((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    for byte, value in specials.items():
        table[byte] = value
    return table


NAN = math.nan
IEEE = {0x7C: math.inf, 0xFC: -math.inf} | dict.fromkeys([0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF], NAN)
FLOAT8 = {
    "F8_E4M3": float8(4, 7, {0x7F: NAN, 0xFF: NAN}),
    "F8_E4M3FNUZ": float8(4, 8, {0x80: NAN}),
    "F8_E5M2": float8(5, 15, IEEE),
    "F8_E5M2FNUZ": float8(5, 16, {0x80: NAN}),
}
STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "C64": "<c8", "BOOL": "u1"}
STORED |= {f"{sign.upper()}{8 * size}": f"<{sign}{size}" for sign in "iu" for size in (1, 2, 4, 8)}
STORED |= dict.fromkeys(FLOAT8, "u1")
NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64", "BOOL": "bool"}
NAMES |= {f"I{8 * size}": f"int{8 * size}" for size in (1, 2, 4, 8)}
NAMES |= {f"U{8 * size}": f"uint{8 * size}" for size in (1, 2, 4, 8)}
NAMES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
NAMES |= {"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
WIDTHS = {NAMES[stored]: np.dtype(kind).itemsize for stored, kind in STORED.items()}


def need(condition: Any) -> None:
    if not condition:
        raise Refused


def parsed(text: str) -> Any:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len({key for key, _ in found}) == len(found))
        for key, _ in found:
            key.encode()
        return dict(found)

    def constant(_: str) -> None:
        raise Refused

    def number(text: str) -> int | None:
        return None if text == "-0" else int(text)

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_int=number)
    except (ValueError, RecursionError):
        raise Refused from None


def integer(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def shape_of(value: Any) -> list[int]:
    need(isinstance(value, list) and all(integer(size, 0) for size in value) and len(value) <= 64)
    need(math.prod(size for size in value if size) < 2**60)
    return value


def read(data: bytes) -> dict[str, Tensor]:
    """The tensors of a file; Refused where the document says that a reader refuses it."""
    header, rest = opened(data)
    meta = header.pop("__metadata__")
    arrays = stored(header, rest)
    need(set(meta) == {"format", "version", "tensors", "ties", "checksum"})
    need(isinstance(meta["tensors"], str) and isinstance(meta["ties"], str))
    tensors, ties = parsed(meta["tensors"]), parsed(meta["ties"])
    need(isinstance(tensors, dict) and isinstance(ties, dict))
    for entry in tensors.values():
        need(isinstance(entry, dict))
        newer = {"1": set(), "2": {"exponent", "group", "scaled"}}
        newer["3"] = newer["2"] | {"coding"}
        newer["4"] = newer["3"] | {"outliers"}
        newer = newer[meta["version"]] if "bits" in entry else set()
        need(set(entry) - newer in ({"shape", "dtype"}, {"shape", "dtype", "bits", "dim"}))
    kinds = ("F16", "BF16") if meta["version"] == "1" else ("F16", "BF16", "F8_E4M3")
    for name, entry in tensors.items():
        need("bits" not in entry or (f"centroids/{name}" in arrays and arrays[f"centroids/{name}"][0] in kinds))
    state = {name: tensor(name, entry, arrays) for name, entry in tensors.items()}
    need(not arrays)
    for alias, name in ties.items():
        need(alias not in tensors and isinstance(name, str) and name in tensors)
    return state | {alias: state[name] for alias, name in ties.items()}


def opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and what follows it, once the checksum has been verified."""
    need(len(data) > 8)
    length = int.from_bytes(data[:8], "little")
    need(length <= min(len(data) - 8, 100_000_000))
    text = data[8 : 8 + length]
    need(text[:1] == b"{")
    try:
        header = parsed(text.decode("utf-8"))
    except UnicodeDecodeError:
        raise Refused from None
    meta = header.get("__metadata__")
    need(isinstance(meta, dict) and meta.get("format") == "dkm" and meta.get("version") in ("1", "2", "3", "4"))
    checksum = meta.get("checksum")
    need(isinstance(checksum, str) and re.fullmatch("[0-9a-f]{64}", checksum))
    quoted = f'"checksum":"{checksum}"'.encode()
    need(quoted in text)
    blank = text.replace(quoted, quoted.replace(checksum.encode(), b"0" * 64), 1)
    need(hashlib.sha256(data[:8] + blank + data[8 + length :]).hexdigest() == checksum)
    return header, data[8 + length :]


def stored(header: dict[str, Any], data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """name -> dtype, shape, bytes."""
    arrays, at = {}, 0
    for name, entry in header.items():
        need(isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"})
        offsets = entry["data_offsets"]
        need(isinstance(offsets, list) and len(offsets) == 2 and all(integer(offset, 0) for offset in offsets))
        need(isinstance(entry["dtype"], str) and entry["dtype"] in STORED)
        size = math.prod(shape_of(entry["shape"])) * np.dtype(STORED[entry["dtype"]]).itemsize
        need(offsets[1] - offsets[0] == size and offsets[1] <= len(data))
        arrays[name] = entry["dtype"], entry["shape"], data[offsets[0] : offsets[1]]
    for begin, end in sorted(entry["data_offsets"] for entry in header.values()):
        need(begin == at)
        at = end
    need(at == len(data))
    return arrays


def values_of(dtype: str, data: bytes) -> np.ndarray:
    raw = np.frombuffer(data, STORED[dtype])
    if dtype == "BF16":
        return (raw.astype("<u4") << 16).view("<f4")
    if dtype == "BOOL":
        need((raw <= 1).all())
        return raw.astype(bool)
    return FLOAT8[dtype][raw] if dtype in FLOAT8 else raw


def cast(values: np.ndarray, dtype: str) -> np.ndarray:
    """To a dtype that is at least as wide, or from float16 to bfloat16 and back: to the nearest, ties to even."""
    with np.errstate(all="ignore"):  # values beyond the range become infinite, and numpy warns of some kinds of NaN
        if dtype != "bfloat16":
            return values.astype("float32" if dtype.startswith("float8") else dtype)
        wide = values.astype("<f4")
        bits = wide.view("<u4").astype(np.uint64)
        nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype("<u4").view("<f4")
        return np.where(np.isnan(wide), wide, nearest)


def tensor(name: str, entry: Any, arrays: dict[str, tuple[str, list[int], bytes]]) -> Tensor:
    shape, dtype = shape_of(entry["shape"]), entry["dtype"]
    need(isinstance(dtype, str) and dtype in WIDTHS)
    if "bits" in entry:
        values = clustered(name, entry, arrays)
        if "outliers" in entry:
            values = outliers(name, entry, arrays, values)
    else:
        need(f"dense/{name}" in arrays)
        kind, stored_shape, data = arrays.pop(f"dense/{name}")
        own = NAMES[kind]
        narrower = "float" in own and "float" in dtype and WIDTHS[own] < WIDTHS[dtype]
        need(stored_shape == shape and (own == dtype or narrower))
        values = values_of(kind, data)
    return Tensor(dtype, cast(values, dtype).reshape(shape))


def clustered(name: str, entry: dict[str, Any], arrays: dict[str, tuple[str, list[int], bytes]]) -> np.ndarray:
    bits, dim, N = entry["bits"], entry["dim"], math.prod(entry["shape"])
    need(integer(bits, 1) and bits <= 12 and integer(dim, 1) and N > 0)
    need(entry["dtype"] in ("float64", "float32", "float16", "bfloat16"))
    need(f"codes/{name}" in arrays)
    exponent, wide = entry.get("exponent", 0), "<f8" if entry["dtype"] == "float64" else "<f4"
    need("exponent" not in entry or (type(exponent) is int and 1 <= abs(exponent) <= 120))
    R, K, r, c = tiling(entry["shape"], entry.get("group"), "group" in entry)
    groups = -(-R // r) * -(-K // c)
    kind, shape, data = arrays.pop(f"centroids/{name}")
    need(shape == [groups] * ("group" in entry) + [2**bits, dim])
    with np.errstate(invalid="ignore"):  # some kinds of NaN
        centroids = values_of(kind, data).reshape(groups, 2**bits, dim).astype(wide)
    kind, shape, data = arrays.pop(f"codes/{name}")
    need(entry.get("coding", "ans") == "ans" and kind == "U8" and len(shape) == 1)
    most = 64 if "coding" in entry else 1
    need(8 * most * len(data) // bits * dim >= N)  # or there are more vectors than codes
    vectors = list(counting(R, K, r, c, dim))
    n = len(vectors)
    if "coding" in entry:
        need(-(-n * bits // 8) <= 64 * len(data))
        codes = decoded(data, 2**bits, n)
    else:
        need(shape == [-(-n * bits // 8)])
        number = int.from_bytes(data, "little")
        need(number < 1 << n * bits)
        codes = [number >> (i * bits) & (2**bits - 1) for i in range(n)]
    matrix = np.empty((R, K), wide)
    for code, (group, places) in zip(codes, vectors, strict=True):
        for j, row, column in places:
            matrix[row, column] = centroids[group, code, j]
    scales = scales_of(name, entry, arrays).astype(wide)
    power = np.array([2.0**exponent], wide)
    with np.errstate(all="ignore"):
        largest = abs(centroids).max(keepdims=True) * scales.max() * power
        need(np.isfinite(centroids).all() and np.isfinite(cast(largest, entry["dtype"])).all())
        return cast(matrix.reshape(len(scales), -1) * scales[:, None] * power, entry["dtype"]).reshape(-1)


def outliers(name: str, entry: dict[str, Any], arrays: dict[str, Any], values: np.ndarray) -> np.ndarray:
    """The values of a clustered tensor, with those that it has of its own in their places."""
    N, count = math.prod(entry["shape"]), entry["outliers"]
    need(integer(count, 1) and f"positions/{name}" in arrays and f"outliers/{name}" in arrays)
    kind, shape, data = arrays.pop(f"positions/{name}")
    need(kind == ("U32" if N <= 2**32 else "I64") and shape == [count])
    positions = values_of(kind, data).tolist()
    need(all(one < other for one, other in pairwise(positions)) and positions[0] >= 0 and positions[-1] < N)
    kind, shape, data = arrays.pop(f"outliers/{name}")
    need(NAMES[kind] == entry["dtype"] and shape == [count])
    own = values_of(kind, data)
    need(np.isfinite(own).all())
    values = np.array(values, own.dtype)
    values[positions] = own
    return values


def decoded(data: bytes, k: int, n: int) -> list[int]:
    """n codes from entropy-coded bytes."""
    counts, at = counts_of(data, k)
    used = [count for count in counts if count]
    need(sum(counts) == n and (len(data) - at) % 4 == 0)
    frequencies = [1 + count * (2**24 - len(used)) // n for count in used]
    frequencies[0] += 2**24 - sum(frequencies)
    ends = list(accumulate(frequencies))
    words = [int.from_bytes(data[i : i + 4], "little") for i in range(at, len(data), 4)]
    need(not words or words[-1] != 0)
    state, codes = 0, []
    for _ in range(n):
        while state < 2**32 and words:
            state = (state << 32) + words.pop()
        below = state % 2**24
        code = bisect_right(ends, below)
        codes.append(code)
        state = state // 2**24 * frequencies[code] + below - (ends[code] - frequencies[code])
    need(state == 0 and not words and [codes.count(code) for code in range(len(used))] == used)
    return codes


def counts_of(data: bytes, k: int) -> tuple[list[int], int]:
    """The table at the beginning of entropy-coded bytes, and the length of it."""
    number, length, counts, at = int.from_bytes(data[: 16 * k], "little"), 8 * len(data), [0], 0
    for _ in range(k):
        zeros = 0
        while not number >> (at + zeros) & 1:
            zeros += 1
            need(zeros <= 60 and at + zeros < length)
        lower = number >> (at + zeros + 1) & ((1 << zeros) - 1)
        at += 2 * zeros + 1
        need(at <= length)
        counts.append(counts[-1] + (1 << zeros) + lower - 1)
    need(number >> at & ((1 << -at % 8) - 1) == 0)
    return counts[:0:-1], -(-at // 8)


def scales_of(name: str, entry: dict[str, Any], arrays: dict[str, tuple[str, list[int], bytes]]) -> np.ndarray:
    """One for each row; a tensor that has none has a single one, 1."""
    if "scaled" not in entry:
        return np.ones(1, "<f4")
    need(entry["scaled"] is True and f"scales/{name}" in arrays)
    kind, shape, data = arrays.pop(f"scales/{name}")
    need(kind in ("F16", "BF16") and shape == (entry["shape"][:1] or [1]))
    scales = values_of(kind, data)
    need(np.isfinite(scales).all() and (scales > 0).all())
    return scales


def tiling(shape: list[int], group: Any, grouped: bool) -> tuple[int, int, int, int]:
    """The rows and columns of the matrix, and those of a tile."""
    N = math.prod(shape)
    if not grouped:
        return 1, N, 1, N
    need(isinstance(group, list) and len(group) == 2 and group != [None, None])
    rows, columns = group
    for size in group:
        need(size is None or (integer(size, 1) and size < 2**60))
    if rows is None:
        return 1, N, 1, min(columns, N)
    R = shape[0] if shape else 1
    return R, N // R, min(rows, R), N // R if columns is None else min(columns, N // R)


def counting(R: int, K: int, r: int, c: int, dim: int) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    """The vectors that count, in order: the group, and (position in the vector, row, column) of what is in the
    matrix."""
    corners = [(top, left) for top in range(0, R, r) for left in range(0, K, c)]
    for group, (top, left) in enumerate(corners):
        for first in range(0, r * c, dim):
            ends = range(first, min(first + dim, r * c))
            places = [(p - first, top + p // c, left + p % c) for p in ends]
            if inside := [(j, row, column) for j, row, column in places if row < R and column < K]:
                yield group, inside
