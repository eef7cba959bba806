"""Files with groups, scales and centroids of 8 bits, and with entropy-coded codes: written, read, counted and shown."""

import json
import re
from pathlib import Path

import ans
import numpy as np
import pytest
import strict_reader
import torch
from dkm_files import BLANK, apart, built, coded, empty_like, every_dtype, grouped, header, tensor
from memory_limit import limited_memory
from samples import GOLDEN, SAMPLES
from torch import nn

import dkm
from dkm.clustering.groups import Group
from dkm.clustering.spec import Spec
from dkm.formats.codec import pack
from dkm.formats.container import DTYPES
from dkm.formats.contents import describe
from dkm.formats.described import Codes, Described
from dkm.formats.dkm_file import decode, encode, encode_all

DOCUMENT = Path(__file__).parents[2] / "docs" / "file-format.md"


FILES = {"groups": (grouped, "packed"), "coded": (coded, "entropy"), "outliers": (apart, "entropy")}


@pytest.mark.parametrize("file", FILES)
def test_the_writer_writes_the_bytes_of_the_golden_file(file):
    make, coding = FILES[file]
    assert encode_all(make(), coding) == (GOLDEN / f"{file}.dkm").read_bytes()


@pytest.mark.parametrize("file", FILES)
def test_every_reader_reads_the_values_of_the_golden_file(file):
    data, expected = (GOLDEN / f"{file}.dkm").read_bytes(), np.load(GOLDEN / f"{file}.npz")
    loaded, strict = decode(data), strict_reader.read(data)
    names: dict = {}
    exec(re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[0], names)
    in_the_document = names["read_dkm"](GOLDEN / f"{file}.dkm")
    for key, weight in loaded.items():
        values = (weight.float() if weight.dtype == torch.bfloat16 else weight).numpy()
        np.testing.assert_array_equal(values, expected[key], strict=True)
        np.testing.assert_array_equal(strict[key].values, expected[key], strict=True)
        if weight.dtype != torch.bfloat16:  # which it leaves in float32
            np.testing.assert_array_equal(in_the_document[key], expected[key], strict=True)
        np.testing.assert_allclose(in_the_document[key], expected[key], rtol=2**-8)  # the rounding of bfloat16
    assert set(expected.files) == loaded.keys() == strict.keys() == in_the_document.keys()


def test_the_golden_file_with_every_dtype():
    data, expected = (GOLDEN / "dtypes.dkm").read_bytes(), np.load(GOLDEN / "dtypes.npz")
    assert encode_all(every_dtype()) == data
    loaded, strict = decode(data), strict_reader.read(data)
    assert set(expected.files) == loaded.keys() == strict.keys() == set(DTYPES)
    for name, dtype in DTYPES.items():
        assert loaded[name].dtype == dtype
        # numpy has no bfloat16 and no floats of 8 bits: those are in float32
        numpys = loaded[name].float() if dtype == torch.bfloat16 or "float8" in str(dtype) else loaded[name]
        np.testing.assert_array_equal(numpys.numpy(), expected[name], strict=True)
        np.testing.assert_array_equal(strict[name].values, expected[name], strict=True)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_reader_reads_the_older_golden_files(name):
    data, expected = (GOLDEN / f"{name}.dkm").read_bytes(), np.load(GOLDEN / f"{name}.npz")
    names: dict = {}
    exec(re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[0], names)
    in_the_document, strict = names["read_dkm"](GOLDEN / f"{name}.dkm"), strict_reader.read(data)
    assert set(expected.files) == strict.keys() == in_the_document.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(strict[key].values, values, strict=True)
        if strict[key].dtype != "bfloat16":  # which it leaves in float32
            np.testing.assert_array_equal(in_the_document[key], values, strict=True)


@pytest.mark.parametrize("file", FILES)
def test_a_file_loads_into_a_model(file):
    model = dkm.load(GOLDEN / f"{file}.dkm", into=empty_like(FILES[file][0]()))
    state = dkm.load(GOLDEN / f"{file}.dkm")
    assert all(torch.equal(parameter, state[name]) for name, parameter in model.named_parameters())


def test_a_value_by_hand():
    """Tiles of 1 x 2 in a matrix of 2 x 3: in the second tile of a row, only the first value is a weight."""
    C = torch.arange(8.0).view(4, 2, 1).half()
    codes = torch.tensor([0, 1, 1, 0, 0, 1])
    content = Codes(1, 1, 1, pack(codes, 1), C, Group(1, 2), torch.tensor([0.5, 3.0]).half())
    state = decode(encode_all([Described("w", (2, 3), torch.float32, content)]))
    assert state["w"].tolist() == [[0.0, 1.0, 3.0], [24.0, 24.0, 42.0]]


VERSIONS = {
    "plain": (Spec(2), 0, "1"),
    "exponent": (Spec(2), 4, "2"),
    "group": (Spec(2, group=Group(2)), 0, "2"),
    "scaled": (Spec(2, scaled=True), 0, "2"),
    "float8": (Spec(2, float8=True), 0, "2"),
}


@pytest.mark.parametrize("case", VERSIONS)
def test_the_oldest_version_that_can_say_it(case):
    spec, exponent, version = VERSIONS[case]
    meta = header(encode_all([tensor("w", (4, 6), spec, exponent=exponent)]))["__metadata__"]
    assert meta["version"] == version
    keys = (
        {"exponent": 4} if exponent else {"group": [2, None]} if spec.group else {"scaled": True} if spec.scaled else {}
    )
    assert json.loads(meta["tensors"])["w"] == {"shape": [4, 6], "dtype": "float32", "bits": 2, "dim": 1} | keys


def test_dense_values_of_8_bits_need_no_new_version():
    data = encode_all([Described("w", (2,), torch.float8_e4m3fn, torch.ones(2).to(torch.float8_e4m3fn))])
    assert header(data)["__metadata__"]["version"] == "1"


# --- what is printed and counted -----------------------------------------------------------------


def test_inspect_shows_groups_and_counts_their_bytes(tmp_path):
    path, spec = tmp_path / "model.dkm", Spec(3, 1, scaled=True, group=Group(8, 64), float8=True)
    path.write_bytes(encode_all([tensor("w", (96, 512), spec), tensor("v", (4, 4), Spec(2))]))
    printed = describe(path, 120)
    codes, centroids, scales = 96 * 512 * 3 // 8, 96 * 8, 96 * 2
    row = next(line for line in printed.splitlines() if line.startswith("w"))
    assert f"3/1 scaled per 8x64 e4m3 8 x 96 {codes + centroids + scales:,} " in re.sub(" +", " ", row)
    total = f"codes {codes + 4:,} bytes, centroids {centroids + 8} bytes, scales {scales} bytes\n"
    assert re.search(total, printed)


def test_entropy_and_use_are_those_of_the_groups(tmp_path):
    """Two groups of four: one uses both centroids alike, the other a single one."""
    codes, C = torch.tensor([0, 1, 0, 1, 1, 1, 1, 1]), torch.tensor([[[0.0], [1.0]], [[3.0], [2.0]]]).half()
    path = tmp_path / "model.dkm"
    path.write_bytes(encode_all([Described("w", (2, 4), torch.float32, Codes(1, 1, 0, pack(codes, 1), C, Group(1)))]))
    *_, used, entropy, bars = describe(path).splitlines()[1].split()
    assert (used, entropy) == ("3/4", "0.50")
    assert bars == "█▃"  # of the ranks: 2 + 4 of the smaller centroids, 2 of the larger ones


def compressed() -> tuple[nn.Module, Described]:
    """A model whose clustering says what one with groups says, and its tensor."""
    spec = Spec(2, 2, scaled=True, group=Group(2, 4), float8=True)
    model = nn.Sequential(nn.Linear(6, 5))
    dkm.compress_(model, "0.weight:2/2", tau=1.0)
    known = tensor("0.weight", (5, 6), spec)
    clustered = model[0].parametrizations.weight[0]
    clustered.spec, clustered.stored_scales = spec, lambda weight: known.content.scales
    clustered.codes = lambda weight: (known.content.centroids, known.content.codes(0, known.grouping.codes))
    return model, known


def test_save_takes_group_and_scales_from_the_model():
    model, known = compressed()
    bias = Described("0.bias", (5,), torch.float32, model[0].bias.detach().half())
    assert encode(model) == encode_all([known, bias])


def test_size_counts_and_shows_them():
    model, known = compressed()
    size = dkm.size(model)
    groups, k, dim = known.content.centroids.shape
    assert size["0.weight"].label == "2/2 scaled per 2x4 e4m3"
    assert size["0.weight"].stored_bits == known.grouping.codes * 2 + groups * k * dim * 8 + 5 * 16
    assert size.file_bytes == len(encode(model))
    assert "2/2 scaled per 2x4 e4m3" in size.table(120)


@pytest.mark.parametrize(
    ("scale", "words"), [(0.0, "zero or negative"), (-1.0, "zero or negative"), (1e9, "too large")]
)
def test_save_refuses_scales_that_no_reader_takes(scale, words, tmp_path):
    model, known = compressed()
    scales = known.content.scales.clone()
    scales[1] = scale
    model[0].parametrizations.weight[0].stored_scales = lambda weight: scales
    with pytest.raises(dkm.FileError, match=f"0.weight .*{words}"):
        dkm.save(model, tmp_path / "model.dkm")
    assert not list(tmp_path.iterdir())


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [Group(512, 512), Group(8), Group(None, 1000)], ids=str)
def test_decoding_takes_little_more_than_the_values(group):
    shape = (2**12, 2**13)
    data = encode_all([tensor("w", shape, Spec(1, 1, scaled=True, group=group))])
    with limited_memory(4 * 2**25 + 150 * 2**20):
        values = decode(data)["w"]
    assert values.shape == shape


HOSTILE = {
    "a tile of 2^57 weights": ([2**29, 2**29 - 100], [2**29, 2**28 - 3]),
    "2^59 groups": ([2**30, 2**29], [1, 1]),
    "2^59 runs": ([2**59], [None, 1]),
    "a group beyond all": ([2**59], [2**60 - 1, 2**60 - 1]),
}
IDENTICAL = {"a billion": 10**9, "2^39": 2**39, "2^59": 2**59}


@pytest.mark.parametrize("case", HOSTILE)
def test_claims_take_no_memory(case, tmp_path):
    shape, group = HOSTILE[case]
    entry = {"shape": shape, "dtype": "float32", "bits": 1, "dim": 7, "group": group}
    count = min(4, Spec(1, 7, group=Group(*group)).grouping(tuple(shape)).count)
    arrays = {"codes/w": torch.zeros(8, dtype=torch.uint8), "centroids/w": torch.zeros(count, 2, 7).half()}
    path = tmp_path / "model.dkm"
    path.write_bytes(built({"w": entry}, arrays, version="2", checksum=BLANK))
    for read in (dkm.load, describe):
        with limited_memory(64 * 2**20), pytest.raises(dkm.FileError, match=r"contradicts itself .*(codes|centroids)"):
            read(path)


@pytest.mark.parametrize("case", IDENTICAL)
def test_a_few_bytes_do_not_stand_for_any_number_of_identical_codes(case, tmp_path):
    """An entropy coder needs nothing for them, and the table is right."""
    n = IDENTICAL[case]
    entry = {"shape": [n], "dtype": "float32", "bits": 1, "dim": 1, "coding": "ans"}
    codes = torch.tensor(list(ans.table([n, 0])), dtype=torch.uint8)
    path = tmp_path / "model.dkm"
    path.write_bytes(built({"w": entry}, {"codes/w": codes, "centroids/w": torch.zeros(2, 1).half()}, version="3"))
    for read in (dkm.load, describe):
        with limited_memory(64 * 2**20), pytest.raises(dkm.FileError, match=r"more than 64 times the .* bytes"):
            read(path)
