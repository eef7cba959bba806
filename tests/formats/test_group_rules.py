"""What readers refuse in entries with groups, scales, centroids of 8 bits and entropy-coded codes."""

import ans
import pytest
import strict_reader
import torch
from dkm_files import built
from refusals import every_reader_refuses
from torch import Tensor

import dkm
from dkm.formats.contents import describe

# 3 x 5 weights in tiles of 2 x 4: four groups with 4 + 2 + 2 + 1 vectors of 2 that count
ENTRY = {"shape": [3, 5], "dtype": "float32", "bits": 1, "dim": 2, "group": [2, 4], "scaled": True}
CODES = torch.tensor([0b10110101, 0b1], dtype=torch.uint8)
CENTROIDS = (torch.arange(16.0).view(4, 2, 2) - 7).half()
SCALES = torch.tensor([0.5, 1.0, 2.0]).half()


def changed(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone().float()
    tensor.view(-1)[1] = value
    return tensor


def file(changes: dict | None = None, *, without: str = "", version: str = "2", **arrays: Tensor | None) -> bytes:
    """A file with one tensor, w, and the right checksum."""
    entry = {key: value for key, value in (ENTRY | (changes or {})).items() if key != without}
    own = {"codes": CODES, "centroids": CENTROIDS, "scales": SCALES} | arrays
    return built(
        {"w": entry}, {f"{kind}/w": array for kind, array in own.items() if array is not None}, version=version
    )


def eight(centroids: Tensor = CENTROIDS) -> Tensor:
    return centroids.to(torch.float8_e4m3fn)


def coded(data: bytes, changes: dict | None = None, **options: object) -> bytes:
    """The same with entropy-coded codes, of version 3."""
    codes = torch.tensor(list(data), dtype=torch.uint8)
    return file({"coding": "ans"} | (changes or {}), **{"version": "3", "codes": codes} | options)


RANKS = [0, 0, 0, 0, 0, 1, 0, 1, 0]  # of the nine vectors
ANS = ans.encoded(RANKS, 2)
ONE = CENTROIDS.reshape(8, 2)[:2]  # for a tensor without a group, whose 15 weights make 8 vectors
PLAIN = {"centroids": ONE, "codes": CODES[:1]}
VALID = {
    "nothing changed": file(),
    "8 bits": file(centroids=eight()),
    "8 bits alone": file({"shape": [3, 5]}, without="group", **PLAIN | {"centroids": eight(ONE)}),
    "scales alone": file(without="group", **PLAIN),
    "scales in bfloat16": file(scales=SCALES.bfloat16()),
    "groups alone": file(without="scaled", scales=None),
    "entropy-coded": coded(ANS),
    "entropy-coded without scales": coded(ANS, without="scaled", scales=None),
    "entropy-coded without a group": coded(ans.encoded(RANKS[:8], 2), without="group", centroids=ONE),
    "one centroid has all codes": coded(ans.encoded([0] * 9, 2)),
    "packed in version 3": file(version="3"),
    "an exponent as well": file({"exponent": 3}),
    "larger than the tensor": file(
        {"group": [2**60 - 1, 4]}, centroids=CENTROIDS[:2], codes=torch.tensor([0, 0]).byte()
    ),
    "consecutive weights": file({"group": [None, 4]}, codes=CODES[:1]),
}

GROUP = "the group of w is not two integers from 1 to 2\\^60 - 1, of which one may be null"
SHAPE = r"w has 4 groups, 1 bits and dim 2, and centroids of shape"
POSITIVE = "the scales of w are not all positive and finite"
KIND = r"the 3 scales of w are not float16 or bfloat16 of shape \(3,\)"
REFUSED = {
    **{
        f"group {group!r}": (file({"group": group}), GROUP)
        for group in (
            *([], [2], [2, 4, 1], [None, None], [0, 4], [2, 0], [-1, 4], [2.0, 4], [2, 4.0], [True, 4], ["2", 4]),
            *([2**60, 4], [None, 2**63], [2, 10**30], [[2], 4], {"rows": 2}, 2, None, "2x4", True),
        )
    },
    **{
        f"scaled {scaled!r}": (file({"scaled": scaled}), "w has a key scaled that is not true")
        for scaled in (False, 1, None, "true", [True], 0)
    },
    "a group in version 1": (file(without="scaled", scales=None, version="1"), "the entry of w is not"),
    "scales in version 1": (file(without="group", version="1", **PLAIN), "the entry of w is not"),
    "8 bits in version 1": (
        built(
            {"w": {key: ENTRY[key] for key in ("shape", "dtype", "bits", "dim")}},
            {"codes/w": CODES[:1], "centroids/w": eight(ONE)},
        ),
        "the centroids of w are 8-bit floats, which version 1 does not have",
    ),
    "a key more": (file({"scale": 2}), "the entry of w is not"),
    "a group that is not clustered": (
        built({"w": {"shape": [3], "dtype": "float32", "group": [1, None]}}, {"dense/w": torch.zeros(3)}, version="2"),
        "the entry of w is not",
    ),
    "scaled and not clustered": (
        built({"w": {"shape": [3], "dtype": "float32", "scaled": True}}, {"dense/w": torch.zeros(3)}, version="2"),
        "the entry of w is not",
    ),
    **{
        f"coding {coding!r}": (coded(ANS, {"coding": coding}), "the coding of w is not ans")
        for coding in ("packed", "ANS", "", 1, None, True, ["ans"])
    },
    "entropy-coded in version 2": (coded(ANS, version="2"), "the entry of w is not"),
    "entropy-coded in version 1": (
        coded(ANS[:-1], version="1", without="group", scales=None, centroids=ONE),
        "the entry of w is not",
    ),
    "entropy-coded and not clustered": (
        built({"w": {"shape": [3], "dtype": "float32", "coding": "ans"}}, {"dense/w": torch.zeros(3)}, version="3"),
        "the entry of w is not",
    ),
    "packed codes that say otherwise": (coded(bytes(CODES.tolist())), "the codes of w "),
    "entropy-coded codes that do not say so": (coded(ANS, without="coding"), "the 9 codes of w take 2 bytes"),
    "entropy-coded codes that are nothing": (coded(b""), "9 codes .* more than 64 times the 0 bytes"),
    "entropy-coded codes that are zeros": (coded(bytes(8)), "the codes of w have a table that breaks off"),
    "entropy-coded codes of another shape": (
        coded(ANS, codes=torch.tensor(list(ANS)).byte()[None]),
        "the codes of w are torch.uint8 of shape .*, and not bytes",
    ),
    "entropy-coded codes of another dtype": (coded(ANS, codes=torch.zeros(9)), "the codes of w are torch.float32"),
    "a code of an edge too few": (coded(ans.encoded(RANKS[:8], 2)), "the codes of w are 9, and the counts .* to 8"),
    "a code too many": (coded(ans.encoded([*RANKS, 0], 2)), "the codes of w are 9, and the counts .* to 10"),
    "words that end too early": (coded(ANS[:-4]), "the codes of w contradict the counts"),
    "words that do not end": (coded(ANS + b"\1\0\0\0"), "the codes of w contradict the counts"),
    "fewer groups": (file(centroids=CENTROIDS[:3]), SHAPE),
    "more groups": (file(centroids=CENTROIDS.repeat(2, 1, 1)), SHAPE),
    "centroids of no group": (file(centroids=CENTROIDS[0]), SHAPE),
    "groups in one table": (file(centroids=CENTROIDS.view(8, 2)), SHAPE),
    "centroids of another group": (file({"group": [1, 4]}), "w has 6 groups, 1 bits and dim 2, and"),
    "codes of another group": (file({"group": [None, 4]}), "the 8 codes of w take 1 bytes"),
    "centroids of groups without a group": (file(without="group", codes=CODES[:1]), r"w has 1 bits and dim 2, and"),
    "other 8 bits": (file(centroids=CENTROIDS.to(torch.float8_e5m2)), "nor bfloat16 nor float8_e4m3fn"),
    "a centroid of 8 bits is NaN": (file(centroids=eight(changed(CENTROIDS, float("nan")))), "are not finite"),
    "a centroid of a group is infinite": (file(centroids=changed(CENTROIDS, float("inf")).half()), "are not finite"),
    "a weight would be infinite": (
        file({"dtype": "float16"}, centroids=changed(CENTROIDS, 40_000).half()),
        "the centroids of w, times the largest scale, are not finite",
    ),
    "one code of the edge too few": (file(codes=CODES[:1]), "the 9 codes of w take 2 bytes"),
    "one byte of codes too many": (file(codes=CODES.repeat(2)[:3]), "the 9 codes of w take 2 bytes"),
    "bits after the codes": (file(codes=torch.tensor([0, 2]).byte()), "the unused bits after the codes of w"),
    "no scales": (file(scales=None), "w has no scales"),
    "scales that nothing asks for": (file(without="scaled"), "the array scales/w belongs to no tensor"),
    "fewer scales": (file(scales=SCALES[:2]), KIND),
    "more scales": (file(scales=SCALES.repeat(2)), KIND),
    "scales of another shape": (file(scales=SCALES[:, None]), KIND),
    "scales in float32": (file(scales=SCALES.float()), KIND),
    "scales of 8 bits": (file(scales=eight(SCALES)), KIND),
    **{
        f"a scale of {value}": (file(scales=changed(SCALES, value).half()), POSITIVE)
        for value in (0.0, -0.0, -1.0, float("nan"), float("inf"), -float("inf"))
    },
}


@pytest.mark.parametrize("case", VALID)
def test_valid_files(case, tmp_path):
    path = tmp_path / "model.dkm"
    path.write_bytes(VALID[case])
    assert torch.equal(dkm.load(path)["w"], torch.from_numpy(strict_reader.read(VALID[case])["w"].values))
    assert describe(path)


@pytest.mark.parametrize("case", REFUSED)
def test_every_reader_refuses_it_in_the_same_words(case, tmp_path):
    every_reader_refuses(*REFUSED[case], tmp_path / "model.dkm")
