"""Outliers in files: what readers refuse, what a file takes, what inspect and parts say."""

import pytest
import strict_reader
import torch
from dkm_files import apart, built, header, skewed, with_outliers
from refusals import every_reader_refuses
from torch import Tensor

import dkm
from dkm.clustering.spec import Spec
from dkm.formats.contents import describe, figures
from dkm.formats.described import Codes
from dkm.formats.dkm_file import decode, encode_all
from dkm.formats.parts import from_parts, sizes, to_parts

# 3 x 5 weights with 1 bit each, of which three are outliers
ENTRY = {"shape": [3, 5], "dtype": "float32", "bits": 1, "dim": 1, "outliers": 3}
CODES = torch.tensor([0b10110101, 0b1000011], dtype=torch.uint8)
CENTROIDS = torch.tensor([[-1.0], [1.0]]).half()
POSITIONS = torch.tensor([0, 7, 14]).to(torch.uint32)
VALUES = torch.tensor([2.5, -3.0, 1e-30])


def file(changes: dict | None = None, *, without: str = "", version: str = "4", **arrays: Tensor | None) -> bytes:
    """A file with one tensor, w, and the right checksum."""
    entry = {key: value for key, value in (ENTRY | (changes or {})).items() if key != without}
    own = {"codes": CODES, "centroids": CENTROIDS, "positions": POSITIONS, "outliers": VALUES} | arrays
    return built(
        {"w": entry}, {f"{kind}/w": array for kind, array in own.items() if array is not None}, version=version
    )


def at(*positions: int) -> Tensor:
    return torch.tensor(positions).to(torch.uint32)


VALID = {
    "nothing changed": file(),
    "one": file({"outliers": 1}, positions=at(14), outliers=VALUES[:1]),
    "all": file({"outliers": 15}, positions=at(*range(15)), outliers=torch.arange(15.0)),
    "scaled": file({"scaled": True}, scales=torch.tensor([0.5, 1.0, 2.0]).half()),
    "float16": file({"dtype": "float16"}, outliers=VALUES.half()),
    "bfloat16": file({"dtype": "bfloat16"}, outliers=VALUES.bfloat16()),
    "float64": file({"dtype": "float64"}, outliers=VALUES.double()),
    "larger than every centroid can be": file(outliers=torch.tensor([3e38, -3e38, 0.0])),
    "none": file(without="outliers", positions=None, outliers=None),
}
COUNT = "the outliers of w are not an integer from 1 to 15"
PLACES = "the positions of the outliers of w do not rise from 0 to less than 15"
SHAPE = r"the 3 positions of the outliers of w are not torch.uint32 of shape \(3,\), but "
KIND = r"the 3 values of the outliers of w are not torch.float32 of shape \(3,\), but "
REFUSED = {
    **{f"outliers {value!r}": (file({"outliers": value}), COUNT) for value in (0, -1, 16, 2**70, 3.0, "3", None, True)},
    **{f"outliers {value!r}": (file({"outliers": value}), COUNT) for value in ([3], {}, False)},
    "fewer than it says": (file({"outliers": 2}), "the 2 positions .* shape .2,., but torch.uint32 of shape .3,."),
    "more than it says": (file({"outliers": 4}), "the 4 positions"),
    "not said": (file(without="outliers"), "belongs to no tensor"),
    "in version 3": (file(version="3"), "the entry of w is not"),
    "in version 1": (file(version="1"), "the entry of w is not"),
    "of a tensor that is not clustered": (
        built({"w": {"shape": [3], "dtype": "float32", "outliers": 1}}, {"dense/w": torch.zeros(3)}, version="4"),
        "the entry of w is not",
    ),
    "no positions": (file(positions=None), "w has no positions"),
    "no values": (file(outliers=None), "w has no outliers"),
    "fewer positions": (file(positions=POSITIONS[:2]), SHAPE),
    "more positions": (file(positions=at(0, 1, 2, 3)), SHAPE),
    "positions of another shape": (file(positions=POSITIONS[:, None]), SHAPE),
    "positions in 64 bits": (file(positions=POSITIONS.long()), SHAPE),
    "positions of another kind": (file(positions=torch.zeros(3)), SHAPE),
    "fewer values": (file(outliers=VALUES[:2]), KIND),
    "more values": (file(outliers=VALUES.repeat(2)), KIND),
    "values in 16 bits": (file(outliers=VALUES.half()), KIND),
    "values in 64 bits": (file(outliers=VALUES.double()), KIND),
    "values of a tensor of 16 bits": (file({"dtype": "float16"}), "are not torch.float16 of shape"),
    "a position at the end": (file(positions=at(0, 7, 15)), PLACES),
    "a position far out": (file(positions=at(0, 7, 2**32 - 1)), PLACES),
    "a position twice": (file(positions=at(0, 7, 7)), PLACES),
    "positions that fall": (file(positions=at(7, 0, 14)), PLACES),
    **{
        f"a value of {value}": (file(outliers=torch.tensor([1.0, value, 2.0])), "the outliers of w are not all finite")
        for value in (float("nan"), float("inf"), -float("inf"))
    },
}


@pytest.mark.parametrize("case", VALID)
def test_valid_files(case, tmp_path):
    path = tmp_path / "model.dkm"
    path.write_bytes(VALID[case])
    loaded, strict = dkm.load(path)["w"], strict_reader.read(VALID[case])["w"].values
    assert torch.equal(loaded.double(), torch.from_numpy(strict).double())
    assert describe(path)


def test_outliers_replace_what_the_codes_say():
    expected = torch.tensor([[2.5, -1, 1, -1, 1], [1, -1, -3, 1, 1], [-1, -1, -1, -1, 1e-30]])
    assert torch.equal(decode(file())["w"], expected)
    assert torch.equal(decode(VALID["scaled"])["w"].view(-1)[[0, 7, 14]], VALUES)  # no scale is theirs


@pytest.mark.parametrize("case", REFUSED)
def test_every_reader_refuses_it_in_the_same_words(case, tmp_path):
    every_reader_refuses(*REFUSED[case], tmp_path / "model.dkm")


def test_only_files_with_outliers_have_the_new_version():
    for coding, version in (("packed", "1"), ("entropy", "3")):
        each = skewed("w", (30, 41), Spec(3))
        assert header(encode_all([each], coding))["__metadata__"]["version"] == version
        assert header(encode_all([with_outliers(each, 100)], coding))["__metadata__"]["version"] == "4"


def test_inspect_shows_them(tmp_path):
    path = tmp_path / "model.dkm"
    path.write_bytes(encode_all([with_outliers(skewed("w", (30, 41), Spec(3)), 100), skewed("v", (9, 9), Spec(2))]))
    assert "centroids 24 bytes, 13 outliers 104 bytes\n" in describe(path)
    found = {line["name"]: line for line in figures(path)["clustered"]}
    assert (found["w"]["outliers"], found["w"]["outlier_bytes"]) == (13, 104)
    assert (found["v"]["outliers"], found["v"]["outlier_bytes"]) == (0, 0)
    assert found["w"]["bytes"] == found["w"]["code_bytes"] + found["w"]["centroid_bytes"] + 104


CLUSTERED = [each for each in apart() if isinstance(each.content, Codes)]


@pytest.mark.parametrize("each", CLUSTERED, ids=lambda each: each.name)
def test_parts(each):
    entry, parts = to_parts(each)
    assert sizes("a", entry, "file") == {kind: len(part) for kind, part in parts.items()}
    assert torch.equal(from_parts(each.name, entry, parts, "file").values(), each.values())
    if each.content.outliers is None:
        return
    for value in (None, 0, -1, 2**70, 1.5, True, "3", [], entry["outliers"] + 1):
        with pytest.raises(dkm.FileError, match=r"^file contradicts itself"):
            from_parts("a", entry | {"outliers": value}, parts, "file")
    with pytest.raises(dkm.FileError, match="wrong checksum"):
        from_parts("a", entry, parts | {"outliers": parts["outliers"].flip(0) + 1}, "file")
