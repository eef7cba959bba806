"""The container of a .dkm file: any harm is noticed, and whatever is not such a file is refused."""

import hashlib
import json
import struct

import numpy as np
import pytest
import safetensors.torch
import torch
from dkm_files import header, net, trained

import dkm

BLANK = "0" * 64


def test_metadata(path):
    dkm.save(trained(), path)
    metadata = header(path.read_bytes())["__metadata__"]
    assert metadata.keys() == {"format", "version", "tensors", "ties", "checksum"}
    assert (metadata["format"], metadata["version"]) == ("dkm", "1")
    tensors = json.loads(metadata["tensors"])
    assert tensors.keys() == net().state_dict().keys()
    assert tensors["0.weight"] == {"shape": [7, 3, 3, 3], "dtype": "float32", "bits": 3, "dim": 2}
    assert tensors["1.running_mean"] == {"shape": [7], "dtype": "float32"}
    assert json.loads(metadata["ties"]) == {}


def test_the_checksum_is_of_the_file_with_the_checksum_blank(path):
    dkm.save(trained(), path)
    data = path.read_bytes()
    checksum = header(data)["__metadata__"]["checksum"]
    assert hashlib.sha256(data.replace(checksum.encode(), BLANK.encode())).hexdigest() == checksum


def test_nothing_in_the_file_is_executable(path):
    """Header and arrays fill the file to the last byte: no room for a pickle."""
    dkm.save(trained(), path)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = {name: entry for name, entry in header(data).items() if name != "__metadata__"}
    spans = sorted(entry["data_offsets"] for entry in entries.values())
    assert [a for a, _ in spans] == [0, *(b for _, b in spans[:-1])]
    assert spans[-1][1] == len(data) - 8 - length
    assert {entry["dtype"] for entry in entries.values()} <= {"U8", "F16", "F32", "I64"}


def refused(path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(dkm.FileError) as caught:
        dkm.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_every_changed_byte_is_noticed(good, path):
    rng = np.random.default_rng(0)
    in_header = rng.integers(0, 8 + struct.unpack("<Q", good[:8])[0], 100)
    anywhere = rng.integers(0, len(good), 100)
    for at in [*range(8), *in_header.tolist(), *anywhere.tolist()]:
        data = bytearray(good)
        data[at] ^= int(rng.integers(1, 256))
        refused(path, bytes(data))


def test_every_changed_bit_of_the_checksum_is_noticed(good, path):
    checksum = header(good)["__metadata__"]["checksum"].encode()
    for i in range(64):
        changed = checksum[:i] + (b"0" if checksum[i : i + 1] != b"0" else b"1") + checksum[i + 1 :]
        refused(path, good.replace(checksum, changed))


def test_a_checksum_in_capitals_is_another_one(good, path):
    checksum = header(good)["__metadata__"]["checksum"]
    refused(path, good.replace(checksum.encode(), checksum.upper().encode()))


def test_every_truncation_is_noticed(good, path):
    rng = np.random.default_rng(0)
    for length in [*range(10), len(good) - 1, *rng.integers(0, len(good), 200).tolist()]:
        refused(path, good[:length])


@pytest.mark.parametrize(
    "extra", [b"\0", b" ", b"\0" * 8, b"PK\x03\x04", b"x" * 1000], ids=lambda extra: repr(extra[:8])
)
def test_appended_bytes_are_noticed(extra, good, path):
    refused(path, good + extra)


def foreign() -> dict[str, bytes]:
    def container(metadata):
        return safetensors.torch.save({"a": torch.zeros(3)}, metadata)

    def json_only(value) -> bytes:
        text = json.dumps(value).encode()
        return struct.pack("<Q", len(text)) + text

    return {
        "nothing": b"",
        "random": np.random.default_rng(0).bytes(5000),
        "text": b"# a readme\n" * 100,
        "zeros": bytes(1000),
        "safetensors": container(None),
        "safetensors with metadata": container({"format": "pt"}),
        "another format": container({"format": "other", "version": "1", "checksum": BLANK}),
        "no checksum": container({"format": "dkm", "version": "1"}),
        "a short checksum": container({"format": "dkm", "version": "1", "checksum": "0"}),
        "no number": container({"format": "dkm", "version": "one", "checksum": BLANK}),
        "a list": json_only([1]),
        "a number": json_only({"__metadata__": 3}),
        "null": json_only({"__metadata__": None}),
        "numbers": json_only({"__metadata__": {"format": "dkm", "version": 1, "checksum": 0}}),
        "deep": struct.pack("<Q", 200_000) + b"[" * 200_000,
    }


@pytest.mark.parametrize("case", foreign())
def test_a_foreign_file(case, path):
    whole = case in ("safetensors", "safetensors with metadata", "another format")
    sentence = "a safetensors file that dkm did not write" if whole else "not an intact .dkm file"
    assert sentence in refused(path, foreign()[case])


def sealed(arrays: dict[str, torch.Tensor], **metadata: str) -> bytes:
    """A file with a correct checksum, whatever is in it."""
    metadata = {"format": "dkm", "version": "1", "ties": "{}", "checksum": BLANK} | metadata
    data = safetensors.torch.save(arrays, metadata)
    return data.replace(BLANK.encode(), hashlib.sha256(data).hexdigest().encode())


CODES = {"codes/w": torch.zeros(2, dtype=torch.uint8), "centroids/w": torch.zeros(4, 1).half()}


ENTRY = {"shape": [2, 4], "dtype": "float32", "bits": 2, "dim": 1}


INCONSISTENT = {
    "no tensors": ({}, None, {}),
    "tensors that are no JSON": ({}, "{", {}),
    "a list of tensors": ({}, "[]", {}),
    "an array is missing": ({}, {"w": ENTRY}, {}),
    "too few codes": (CODES, {"w": ENTRY | {"shape": [2, 5]}}, {}),
    "a dtype that does not exist": (CODES, {"w": ENTRY | {"dtype": "float33"}}, {}),
    "a dtype that is something else": (CODES, {"w": ENTRY | {"dtype": "nn"}}, {}),
    "a dim that does not fit": (CODES, {"w": ENTRY | {"dim": 2}}, {}),
    "dim 0": (CODES, {"w": ENTRY | {"dim": 0}}, {}),
    "bits as text": (CODES, {"w": ENTRY | {"bits": "2"}}, {}),
    "a negative shape": (CODES, {"w": ENTRY | {"shape": [-2, -4]}}, {}),
    "codes beyond the centroids": (
        {"codes/w": torch.full((2,), 255, dtype=torch.uint8), "centroids/w": torch.zeros(3, 1).half()},
        {"w": ENTRY},
        {},
    ),
    "a dense tensor of another shape": ({"dense/w": torch.zeros(3)}, {"w": {"shape": [4], "dtype": "float32"}}, {}),
    "a tie to nothing": (CODES, {"w": ENTRY}, {"v": "u"}),
}


def test_a_sealed_file_loads(path):
    path.write_bytes(sealed(CODES, tensors=json.dumps({"w": ENTRY}), ties=json.dumps({"v": "w"})))
    assert dkm.load(path)["v"].shape == (2, 4)


@pytest.mark.parametrize("case", INCONSISTENT)
def test_an_inconsistent_file(case, path):
    arrays, tensors, ties = INCONSISTENT[case]
    text = {} if tensors is None else {"tensors": tensors if isinstance(tensors, str) else json.dumps(tensors)}
    refused(path, sealed(arrays, **text, ties=json.dumps(ties)))


def test_a_newer_version_says_upgrade(path):
    path.write_bytes(sealed(CODES, version="5", tensors=json.dumps({"w": ENTRY})))
    with pytest.raises(dkm.FileError, match="version 5, this dkm reads up to 4: upgrade torch-dkm") as caught:
        dkm.load(path)
    assert str(path) in str(caught.value)
