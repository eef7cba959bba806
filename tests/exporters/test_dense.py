"""Target `safetensors`: dense weights, equal to those that dkm.load gives."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from samples import Tied, layers, tied

import dkm


def test_the_values_are_those_of_the_file(tmp_path: Path):
    model = layers()
    dkm.save(model, tmp_path / "model.dkm")
    expected = dkm.load(tmp_path / "model.dkm")
    for source, name in ((model, "a"), (tmp_path / "model.dkm", "b")):
        dkm.export(source, tmp_path / name, to="safetensors")
        found = load_file(tmp_path / name)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key].dtype == value.dtype
            assert torch.equal(found[key], value)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_tied_weights_are_written_once(tmp_path: Path):
    model = tied()
    dkm.export(model, tmp_path / "out", to="safetensors")
    assert load_file(tmp_path / "out").keys() == {"embedding.weight", "output.bias"}
    plain = Tied().bfloat16()
    load_model(plain, tmp_path / "out")
    x = torch.arange(11)
    assert plain.output.weight is plain.embedding.weight
    assert torch.equal(plain.embedding(x), dkm.snap_(model).embedding(x))


def test_no_example(tmp_path: Path):
    with pytest.raises(TypeError, match="leave example= out"):
        dkm.export(layers(), tmp_path / "out", to="safetensors", example=torch.ones(2, 5))
    assert not list(tmp_path.iterdir())
