"""What every reader of .dkm files refuses, and in which words; golden files; what save refuses."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import strict_reader
import torch
from dkm_files import BLANK, built, raw
from memory_limit import limited_memory
from samples import GOLDEN, SAMPLES
from torch import Tensor, nn

import dkm
from dkm.formats.contents import describe
from dkm.formats.dkm_file import decode, encode

ENTRY = {"shape": [2, 4], "dtype": "float32", "bits": 2, "dim": 1}
CENTROIDS = torch.tensor([[-1.0], [0.0], [0.5], [1.0]]).half()
CODES = torch.tensor([0b11100100, 0b00011011], dtype=torch.uint8)
ARRAYS = {"codes/w": CODES, "centroids/w": CENTROIDS}
DENSE = {"shape": [3], "dtype": "float32"}


def clustered(changes: dict | None = None, **arrays: Tensor) -> bytes:
    """A file with one clustered tensor, w."""
    own = {"codes/w": arrays.get("codes", CODES), "centroids/w": arrays.get("centroids", CENTROIDS)}
    return built({"w": ENTRY | (changes or {})}, own)


def dense(values: Tensor, **changes: object) -> bytes:
    """A file with one tensor that is not clustered, w."""
    return built({"w": DENSE | changes}, {"dense/w": values})


def with_centroid(value: float, dtype: torch.dtype = torch.float16) -> Tensor:
    centroids = CENTROIDS.to(dtype).clone()
    centroids[1] = value
    return centroids


def test_the_files_of_these_tests_are_valid_where_nothing_is_changed():
    assert decode(clustered())["w"].tolist() == [[-1.0, 0.0, 0.5, 1.0], [1.0, 0.5, 0.0, -1.0]]
    assert decode(dense(torch.arange(3.0)))["w"].tolist() == [0.0, 1.0, 2.0]
    assert decode(dense(torch.arange(3).half()))["w"].dtype == torch.float32
    assert decode(clustered(centroids=CENTROIDS.bfloat16()))["w"].dtype == torch.float32
    assert decode(built({}, {})) == {}


# --- what contradicts the format -----------------------------------------------------------------

BITS = "the bits of w are not an integer from 1 to 12"
DIM = "the dim of w is not an integer of at least 1"
SHAPE = "the shape of w is not a list of integers of at least 0"
VECTORS = torch.zeros(4, 4).half()
CONTRADICTIONS = {
    "bits 0": (clustered({"bits": 0}), BITS),
    "bits 17": (clustered({"bits": 17}), BITS),
    "bits 13": (clustered({"bits": 13}), BITS),
    "bits -1": (clustered({"bits": -1}), BITS),
    "bits true": (clustered({"bits": True}), BITS),
    "bits 2.0": (clustered({"bits": 2.0}), BITS),
    "bits as text": (clustered({"bits": "2"}), BITS),
    "bits and fewer centroids": (clustered(centroids=CENTROIDS[:3]), "2 bits and dim 1, and centroids of shape"),
    "bits and more centroids": (clustered({"bits": 1}), "1 bits and dim 1, and centroids of shape"),
    "dim 0": (clustered({"dim": 0}), DIM),
    "dim 1.5": (clustered({"dim": 1.5}), DIM),
    "dim 1 and centroids of 4": (clustered(centroids=VECTORS), r"dim 1, and centroids of shape \(4, 4\)"),
    "centroids without dim": (clustered(centroids=CENTROIDS[:, 0]), "and centroids of shape"),
    "centroids in float32": (clustered(centroids=CENTROIDS.float()), "neither float16 nor bfloat16"),
    "centroids in int64": (clustered(centroids=CENTROIDS.long()), "neither float16 nor bfloat16"),
    "a centroid is NaN": (clustered(centroids=with_centroid(float("nan"))), "the centroids of w are not finite"),
    "a centroid is infinite": (clustered(centroids=with_centroid(-float("inf"))), "are not finite"),
    "a centroid is infinite in the model": (
        clustered({"dtype": "float16"}, centroids=with_centroid(1e30, torch.bfloat16)),
        "are not finite",
    ),
    "too few codes": (clustered({"shape": [2, 5]}), "the 10 codes of w take 3 bytes at 2 bits"),
    "too many codes": (clustered({"shape": [2, 2]}), "the 4 codes of w take 1 bytes at 2 bits"),
    "codes in another shape": (clustered(codes=CODES[None]), "the 8 codes of w"),
    "codes of another dtype": (clustered(codes=CODES.bool()), "the 8 codes of w"),
    "padding": (
        clustered({"shape": [7]}, codes=torch.full_like(CODES, 255)),
        "the unused bits after the codes of w are not zero",
    ),
    "clustered integers": (clustered({"dtype": "int64"}), "w is torch.int64, which cannot be clustered"),
    "clustered and empty": (clustered({"shape": [0]}, codes=CODES[:0]), "w is clustered and has no values"),
    "a negative shape": (clustered({"shape": [-2, -4]}), SHAPE),
    "shape [-1, 3]": (dense(torch.zeros(2, 3), shape=[-1, 3]), SHAPE),
    "a shape of floats": (dense(torch.zeros(3), shape=[3.0]), SHAPE),
    "a shape of truth": (dense(torch.zeros(1), shape=[True]), SHAPE),
    "a shape that is a number": (dense(torch.zeros(3), shape=3), SHAPE),
    "a shape of -0": (built('{"w":{"shape":[-0],"dtype":"float32"}}', {"dense/w": torch.zeros(0)}), SHAPE),
    "65 dimensions": (dense(torch.zeros(1), shape=[1] * 65), "w has 65 dimensions"),
    "an absurd shape": (clustered({"shape": [2**40, 2**40]}), "the shape of w is too large"),
    "an absurd shape of nothing": (dense(torch.zeros(0), shape=[0, 2**62, 2**62]), "the shape of w is too large"),
    "an unknown dtype": (dense(torch.zeros(3), dtype="float33"), "w has an unknown dtype"),
    "a name of torch that is no dtype": (dense(torch.zeros(3), dtype="nn"), "w has an unknown dtype"),
    "a dtype that is no text": (dense(torch.zeros(3), dtype=["float32"]), "w has an unknown dtype"),
    "dense of another shape": (dense(torch.zeros(3, 1)), r"w has shape \(3,\), and values of shape \(3, 1\)"),
    "dense and wider": (dense(torch.zeros(3).double()), "w is torch.float32, and its values are torch.float64"),
    "dense and other 16 bits": (dense(torch.zeros(3).half(), dtype="bfloat16"), "its values are torch.float16"),
    "dense integers for floats": (dense(torch.zeros(3).long()), "its values are torch.int64"),
    "dense floats for integers": (dense(torch.zeros(3), dtype="int64"), "its values are torch.float32"),
    "truth that is 2": (
        dense(torch.tensor([0, 1, 2], dtype=torch.uint8).view(torch.bool), dtype="bool"),
        "truth values that are neither 0 nor 1",
    ),
    "no array": (built({"w": DENSE}, {}), "w has no dense"),
    "no centroids": (built({"w": ENTRY}, {"codes/w": CODES}), "w has no centroids"),
    "an array more": (built({"w": ENTRY}, {**ARRAYS, "dense/w": CODES}), "the array dense/w belongs to no tensor"),
    "an array of another kind": (built({"w": ENTRY}, {**ARRAYS, "v": CODES}), "the array v belongs to no tensor"),
    "bits without dim": (built({"w": DENSE | {"bits": 2}}, ARRAYS), "the entry of w is not"),
    "a key more": (clustered({"scale": 2}), "the entry of w is not"),
    "an entry that is a list": (built({"w": []}, {}), "the entry of w is not"),
    "tensors in a list": (built([], {}), "the metadata tensors are not a JSON object"),
    "tensors that are no JSON": (built("{", {}), "the metadata tensors are not valid"),
    "ties in a list": (built({}, {}, "[]"), "the metadata ties are not a JSON object"),
    "ties that are nested deeply": (built({}, {}, "[" * 100_000), "the metadata ties are not valid"),
    "tensors as no text": (built({}, {}, tensors={}), "the metadata tensors are not a JSON object in a text"),
    "metadata more": (built({}, {}, author="me"), "the metadata are not checksum, format, tensors, ties, version"),
    "a name twice": (
        built(f'{{"w": {json.dumps(ENTRY)}, "w": {json.dumps(ENTRY)}}}', ARRAYS),
        "the metadata tensors are not valid: w appears twice",
    ),
    "a key of an entry twice": (
        built('{"w": {"shape": [2, 4], "dtype": "float32", "bits": 2, "bits": 2, "dim": 1}}', ARRAYS),
        "bits appears twice",
    ),
    "a tie twice": (built({"w": ENTRY}, ARRAYS, '{"v": "w", "v": "w"}'), "v appears twice"),
    "a tie over a tensor": (built({"w": ENTRY}, ARRAYS, {"w": "w"}), "w is a tensor and is tied to another one"),
    "a tie to nothing": (built({"w": ENTRY}, ARRAYS, {"v": "u"}), "v is tied to something that is not a tensor"),
    "a tie to a tie": (built({"w": ENTRY}, ARRAYS, {"v": "w", "u": "v"}), "u is tied to something"),
    "a tie to a number": (built({"w": ENTRY}, ARRAYS, {"v": 1}), "v is tied to something"),
}


def header(entries: str = "", meta: str = "") -> str:
    """The text of a header: no tensors, and what is given."""
    own = '"format":"dkm","version":"1","tensors":"{}","ties":"{}"'
    return f'{{"__metadata__":{{{meta or own},"checksum":"{BLANK}"}}{entries}}}'


def version(text: str) -> bytes:
    return raw(header(meta=f'"format":"dkm","version":{text},"tensors":"{{}}","ties":"{{}}"'))


NOT_INTACT = {
    "version 1e999": (version("1e999"), "its version is not a number"),
    "version 1": (version("1"), "its version is not a number"),
    "version 0": (version('"0"'), "its version is not a number"),
    "version -1": (version('"-1"'), "its version is not a number"),
    "version +1": (version('"+1"'), "its version is not a number"),
    "version 01": (version('"01"'), "its version is not a number"),
    "version 1 with a space": (version('" 1"'), "its version is not a number"),
    "version 1 with a line": (version(r'"1\n"'), "its version is not a number"),
    "version in Arabic digits": (version('"١"'), "its version is not a number"),
    "checksum 5": (raw(header().replace(f'"{BLANK}"', "5")), "it has no checksum"),
    "no checksum": (raw('{"__metadata__":{"format":"dkm","version":"1"}}'), "it has no checksum"),
    "a checksum with a space": (raw(header().replace('"checksum":', '"checksum": ')), "written as a reader must find"),
    "metadata twice": (raw(header(',"__metadata__":{}')), "__metadata__ appears twice"),
    "an array twice": (raw(header(',"a":{},"a":{}')), "a appears twice"),
    "a number that is none": (raw(header(',"a":NaN')), "NaN is not JSON"),
    "half of a surrogate pair": (raw(header(r',"\ud800":{}')), "surrogates not allowed"),
    "a header in UTF-16": (raw(header().encode("utf-16-le").decode("latin-1")), "it does not begin|codec|Expecting"),
    "a header after a space": (raw(" " + header()), "it does not begin with a header"),
}
LAYOUTS = {
    "a gap": ([[0, 4], [5, 9]], 9, "the arrays overlap or leave gaps"),
    "an overlap": ([[0, 4], [3, 7]], 7, "the arrays overlap or leave gaps"),
    "the same bytes": ([[0, 4], [0, 4]], 4, "the arrays overlap or leave gaps"),
    "bytes at the end": ([[0, 4], [4, 8]], 9, "the arrays do not fill the file"),
    "beyond the end": ([[0, 4], [4, 8]], 7, "the data_offsets of b do not fit"),
    "backwards": ([[4, 0], [4, 8]], 8, "the data_offsets of a do not fit"),
    "negative": ([[-4, 0], [0, 4]], 4, "the data_offsets of a are not two numbers"),
    "three": ([[0, 4, 4], [4, 8]], 8, "the data_offsets of a are not two numbers"),
}
for case, (offsets, length, words) in LAYOUTS.items():
    entries = [
        f',"{name}":{{"dtype":"U8","shape":[4],"data_offsets":{at}}}' for name, at in zip("ab", offsets, strict=True)
    ]
    CONTRADICTIONS[case] = (raw(header("".join(entries)), bytes(length)), words)
REFUSED = {case: (data, f"intact but contradicts itself .*{words}") for case, (data, words) in CONTRADICTIONS.items()}
REFUSED |= {case: (data, f"not an intact .dkm file .*({words})") for case, (data, words) in NOT_INTACT.items()}
REFUSED["version 5"] = (version('"5"'), "format version 5, this dkm reads up to 4: upgrade torch-dkm")
REFUSED["version of 5000 digits"] = (version('"' + "9" * 5000 + '"'), "format version 999.*: upgrade torch-dkm")


@pytest.mark.parametrize("case", REFUSED)
def test_every_reader_refuses_it_in_the_same_words(case, tmp_path):
    data, words = REFUSED[case]
    path = tmp_path / "model.dkm"
    path.write_bytes(data)
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2, 4))
    readers = (lambda: dkm.load(path), lambda: dkm.load(path, into=model), lambda: describe(path))
    messages = set()
    for read in readers:
        with pytest.raises(dkm.FileError, match=f"{re.escape(str(path))}.*{words}") as caught:
            read()
        messages.add(str(caught.value))
    assert len(messages) == 1
    with pytest.raises(dkm.FileError, match=words):
        decode(data)
    with pytest.raises(strict_reader.Refused):
        strict_reader.read(data)


# --- names on the terminal -----------------------------------------------------------------------


def test_names_are_escaped(tmp_path):
    name = "\x1b[2J\u202e\x00\r\n\x9bevil\u2066\u200b\\"
    path = tmp_path / "model.dkm"
    path.write_bytes(built({name: ENTRY}, {f"codes/{name}": CODES, f"centroids/{name}": CENTROIDS}))
    assert dkm.load(path).keys() == {name}
    printed = describe(path, columns=200)
    assert all(line.isprintable() for line in printed.splitlines())
    assert r"\x1b[2J\u202e\x00\r\n\x9bevil\u2066\u200b\\ " in printed
    with pytest.raises(dkm.FileError, match="does not fit this model") as caught:
        dkm.load(path, into=nn.Linear(2, 2))
    assert str(caught.value).isprintable()


def test_long_names_are_cut_in_messages():
    with pytest.raises(dkm.FileError) as caught:
        decode(built({"n" * 100_000: 1}, {}))
    assert len(str(caught.value)) < 500


# --- memory --------------------------------------------------------------------------------------


def bomb() -> bytes:
    """134 kB that stand for 8.6 billion values."""
    n, dim = 2**19, 2**14
    arrays = {"codes/weight": torch.zeros(n // 8, dtype=torch.uint8), "centroids/weight": torch.zeros(2, dim).half()}
    bias = {"shape": [2], "dtype": "float32"}
    weight = {"shape": [n, dim], "dtype": "float32", "bits": 1, "dim": dim}
    return built({"weight": weight, "bias": bias}, {**arrays, "dense/bias": torch.zeros(2)})


def test_a_small_file_of_a_large_model_does_not_load_into_a_small_one(tmp_path):
    path, model = tmp_path / "model.dkm", nn.Linear(2, 2)
    path.write_bytes(bomb())
    assert path.stat().st_size < 140_000
    words = r"weight is \(524288, 16384\) in the file and \(2, 2\) in the model"
    with limited_memory(256 * 2**20), pytest.raises(dkm.FileError, match=words):
        dkm.load(path, into=model)


def test_bits_of_0_ask_for_no_memory():
    with limited_memory(256 * 2**20), pytest.raises(dkm.FileError, match=BITS):
        decode(clustered({"bits": 0, "shape": [2**40]}, codes=CODES[:0]))


def test_decoding_takes_little_more_than_the_values():
    """Codes are unpacked piece by piece: as one tensor of integers they would take twice the memory of the values."""
    n = 2**25
    data = built(
        {"w": {"shape": [n], "dtype": "float32", "bits": 1, "dim": 1}},
        {"codes/w": torch.full((n // 8,), 0b10101010, dtype=torch.uint8), "centroids/w": CENTROIDS[:2]},
    )
    with limited_memory(4 * n + 100 * 2**20):
        values = decode(data)["w"]
    assert values[:4].tolist() == [-1.0, 0.0, -1.0, 0.0]


def test_values_that_the_model_cannot_hold(tmp_path):
    path = tmp_path / "model.dkm"
    path.write_bytes(dense(torch.tensor([0.5, 1.5, 2.5])))
    model = nn.Module()
    model.register_buffer("w", torch.zeros(3, dtype=torch.int64))
    with pytest.raises(dkm.FileError, match=r"w is torch\.float32 in the file and torch\.int64 in the model"):
        dkm.load(path, into=model)
    assert model.w.tolist() == [0, 0, 0]


def test_a_model_that_has_no_shape_yet(tmp_path):
    path = tmp_path / "model.dkm"
    path.write_bytes(built({"weight": ENTRY}, {"codes/weight": CODES, "centroids/weight": CENTROIDS}))
    with pytest.raises(dkm.FileError, match="weight of the model has no values yet, or is not a tensor"):
        dkm.load(path, into=nn.LazyLinear(2, bias=False))


def test_a_wider_file_takes_the_models_dtype(tmp_path):
    path = tmp_path / "model.dkm"
    path.write_bytes(
        built({"weight": ENTRY | {"dtype": "float64"}}, {"codes/weight": CODES, "centroids/weight": CENTROIDS})
    )
    model = dkm.load(path, into=nn.Linear(4, 2, bias=False))
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight.double(), dkm.load(path)["weight"])


# --- golden files --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_golden_files_load(name):
    state = dkm.load(GOLDEN / f"{name}.dkm")
    expected = np.load(GOLDEN / f"{name}.npz")
    assert state.keys() == set(expected.files)
    for key, tensor in state.items():
        values = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        np.testing.assert_array_equal(values, expected[key], strict=True)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_writer_writes_the_bytes_of_the_golden_files(name):
    assert encode(SAMPLES[name]()) == (GOLDEN / f"{name}.dkm").read_bytes()


def test_arrays_may_lie_at_any_offset():
    """Other writers need not align anything."""
    arrays = {"codes/w": CODES[:1], "centroids/w": CENTROIDS, "dense/v": torch.arange(3.0).double()}
    data = built({"w": ENTRY | {"shape": [4]}, "v": DENSE | {"dtype": "float64"}}, arrays)
    assert decode(data)["v"].tolist() == [0.0, 1.0, 2.0]
    assert decode(data)["w"].tolist() == [-1.0, 0.0, 0.5, 1.0]


def test_a_loaded_tensor_does_not_hold_on_to_the_file():
    values = decode(dense(torch.arange(3.0)))["w"]
    assert values.untyped_storage().nbytes() == 12
    values.zero_()


# --- what save refuses ---------------------------------------------------------------------------


def sparse() -> Tensor:
    return torch.eye(3).to_sparse()


BUFFERS = {
    "sparse": (sparse, "extra is sparse_coo, and a file holds dense tensors only"),
    "compressed sparse": (lambda: torch.eye(3).to_sparse_coo().to_sparse_csc(), "extra is sparse_csc"),
    "meta": (lambda: torch.zeros(3, device="meta"), "extra has no values"),
    "lazy": (lambda: nn.parameter.UninitializedBuffer(), "extra has no values"),
    "complex128": (
        lambda: torch.zeros(3, dtype=torch.complex128),
        "extra is torch.complex128, which a file cannot hold",
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("case", BUFFERS)
def test_buffers_that_a_file_cannot_hold(case, tmp_path):
    make, words = BUFFERS[case]
    model = nn.Sequential(nn.Linear(4, 4))
    dkm.compress_(model, "0.weight:2", tau=1.0)
    model.register_buffer("extra", make())
    with pytest.raises(dkm.FileError, match=words):
        dkm.save(model, tmp_path / "model.dkm")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", ["sparse", "meta"])
def test_parameters_that_a_file_cannot_hold(case, tmp_path):
    make, words = BUFFERS[case]
    model = nn.Sequential(nn.Linear(4, 4))
    dkm.compress_(model, "0.weight:2", tau=1.0)
    model.extra = nn.Parameter(make())
    with pytest.raises(dkm.FileError, match=words):
        dkm.save(model, tmp_path / "model.dkm")
    assert not list(tmp_path.iterdir())


NO_NAME = r"has a NUL character in it|cannot be the name of a file"


@pytest.mark.parametrize("path", ["a\0b.dkm", "\0", "\ud800.dkm"], ids=ascii)
def test_paths_that_no_file_can_have(path):
    with pytest.raises(dkm.FileError, match=NO_NAME) as caught:
        dkm.save(SAMPLES["layers"](), path)
    assert str(caught.value).isprintable()
    with pytest.raises(dkm.FileError, match=NO_NAME):
        dkm.load(path)
    with pytest.raises(dkm.FileError, match="cannot read"):
        describe(Path(path))


@pytest.mark.parametrize("exponent", [0, 121, -121, 1.0, True, "3", None, [1]])
def test_an_exponent_that_is_none_is_refused(exponent):
    with pytest.raises(dkm.FileError, match=r"exponent of .* is not an integer from -120 to 120 without 0"):
        decode(with_exponent(exponent, "2"))


def test_an_exponent_needs_version_2():
    assert decode(with_exponent(3, "2"))["0.weight"].isfinite().all()
    with pytest.raises(dkm.FileError, match=r"the entry of 0\.weight is not"):
        decode(with_exponent(3, "1"))


def with_exponent(exponent: object, version: str) -> bytes:
    """The golden file of extreme scales with another exponent, and the right checksum."""
    data = (GOLDEN / "extreme.dkm").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    meta = header["__metadata__"]
    tensors = json.loads(meta["tensors"])
    tensors["0.weight"]["exponent"] = exponent
    meta |= {"tensors": json.dumps(tensors), "version": version, "checksum": BLANK}
    return raw(json.dumps(header, separators=(",", ":")), data[start:])
