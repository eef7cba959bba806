"""A clustered tensor as an entry and bytes, and back."""

import json

import pytest
import torch
from samples import layers
from torch import nn

import dkm
from dkm.formats.describe import describe
from dkm.formats.described import Codes, Described
from dkm.formats.parts import from_parts, sizes, to_parts


def samples() -> list[Described]:
    model = nn.Sequential(nn.Linear(12, 10), nn.Linear(10, 6).bfloat16(), nn.Conv2d(2, 4, 3).double())
    with torch.no_grad():
        model[2].weight.mul_(1e-20)
    dkm.compress_(model, "0:3/5 scaled, 1:4/2 per 4x4 e4m3, 2:5/9", tau=1.0)
    found = [*describe(layers()), *describe(model)]
    return [each for each in found if isinstance(each.content, Codes)]


SAMPLES = samples()


@pytest.mark.parametrize("each", SAMPLES, ids=lambda each: each.content.spec.label)
def test_there_and_back(each: Described):
    entry, parts = to_parts(each)
    entry = json.loads(json.dumps(entry))
    assert all(part.dtype == torch.uint8 and part.ndim == 1 for part in parts.values())
    assert sizes("a", entry, "file") == {kind: len(part) for kind, part in parts.items()}
    found = from_parts(each.name, entry, parts, "file")
    assert found.dtype == each.dtype
    assert torch.equal(found.values(), each.values())


NEVER = (None, [], {}, "x", -1, 0, 2**70, 1.5, True)
WRONG = {
    "shape": (*NEVER, [2**40, 2**40], [3], [-1]),
    "dtype": (*NEVER, "int8"),
    "bits": (*NEVER, 13),
    "dim": (*NEVER, 7, 2**59),
    "centroids": (*NEVER, "float32", "float64", "uint8"),
    "checksum": (*NEVER, "0" * 64),
    "group": (*NEVER, [None, None], [0, 1], [1.0, 1], [1, 1]),
    "exponent": (None, [], {}, "x", 0, 2**70, 1.5, True),
    "other": NEVER,
}


@pytest.mark.parametrize("key", WRONG)
@pytest.mark.parametrize("each", SAMPLES, ids=lambda each: each.content.spec.label)
def test_a_wrong_entry_is_refused(each: Described, key: str):
    """Whatever stands in an entry: one sentence, and nothing is allocated for what it claims."""
    entry, parts = to_parts(each)
    for value in WRONG[key]:
        with pytest.raises(dkm.FileError, match=r"^file "):
            from_parts("a", entry | {key: value}, parts, "file")


def test_a_part_too_few_and_too_many():
    entry, parts = to_parts(SAMPLES[0])
    with pytest.raises(dkm.FileError, match="has centroids and should have codes, centroids"):
        from_parts("a", entry, {"centroids": parts["centroids"]}, "file")
    with pytest.raises(dkm.FileError, match="should have codes, centroids"):
        from_parts("a", entry, {**parts, "scales": parts["codes"]}, "file")
    with pytest.raises(dkm.FileError, match="wrong checksum"):
        from_parts("a", entry, {**parts, "codes": parts["codes"][1:]}, "file")
