"""A .dkm file taken apart, as data that tests can alter and put together again, with the right checksum."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from dkm_files import BLANK


class Pairs(list):
    """A JSON object as (key, value) pairs: it may have a key twice."""


class Raw(str):
    """A piece of JSON as it shall be written."""


def written(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{written(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


@dataclass
class File:
    """A .dkm file in parts."""

    meta: Pairs
    tensors: Any
    ties: Any
    arrays: Pairs  # name -> Pairs
    data: list[bytes]  # of the arrays

    def lay_out(self) -> None:
        """Make the offsets right."""
        at = 0
        for (_, entry), data in zip(self.arrays, self.data, strict=True):
            for i, (key, _) in enumerate(entry):
                if key == "data_offsets":
                    entry[i] = (key, [at, at + len(data)])
            at += len(data)

    def to_bytes(self) -> bytes:
        texts = {"tensors": written(self.tensors), "ties": written(self.ties)}
        meta = Pairs((key, texts.get(key) if value is None else value) for key, value in self.meta)
        header = written(Pairs([("__metadata__", meta), *self.arrays])).encode()
        header += b" " * (-len(header) % 8)
        return sealed(len(header).to_bytes(8, "little") + header + b"".join(self.data))


def sealed(data: bytes) -> bytes:
    """With the right checksum, where there is a place for it."""
    place = f'"checksum":"{BLANK}"'.encode()
    at = data.find(place)
    if at < 0:
        return data
    at += len('"checksum":"')
    return data[:at] + hashlib.sha256(data).hexdigest().encode() + data[at + 64 :]


def as_pairs(value: Any) -> Any:
    return Pairs((key, as_pairs(item)) for key, item in value.items()) if isinstance(value, dict) else value


def taken_apart(data: bytes) -> File:
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    meta = header.pop("__metadata__")
    tensors, ties = (as_pairs(json.loads(meta[key])) for key in ("tensors", "ties"))
    spans = [entry["data_offsets"] for entry in header.values()]
    pairs = Pairs(meta.items())
    pairs = Pairs((key, {"tensors": None, "ties": None, "checksum": BLANK}.get(key, value)) for key, value in pairs)
    return File(pairs, tensors, ties, as_pairs(header), [data[start + a : start + b] for a, b in spans])
