"""Target `coreml`: what a package holds, read back; what is dense; what coremltools cannot convert."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import dkm
from dkm.exporters.coreml import read_palettes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("coremltools", reason="coremltools is not installed")
import coremltools
from coremltools.optimize import _utils

PLANS = {
    "5 and 7 bits": "0:5, 4:7",
    "vectors": "0:2/3, 2:2/2, 4:3/4",
    "groups": "0:2 per 4 rows, 2:3/2 per 4x4, 4:2 per 64",
    "scales": "0:3 scaled, 4:2 scaled per 5 rows",
    "float8": "0:3 e4m3, 4:2",
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 1), nn.Flatten(), nn.Linear(256, 10)
    )


def compressed(plan: str, model: nn.Module | None = None) -> nn.Module:
    model = network() if model is None else model
    dkm.compress_(model, plan, tau=1.0)
    return model


EXAMPLE = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """coremltools' search for the nearest entries, which takes much memory, is not needed."""

    def refuse(*_: object) -> None:
        raise AssertionError("searched for the nearest entries")

    monkeypatch.setattr(_utils, "find_indices_for_lut", refuse)


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("plan", PLANS)
def test_a_package_holds_the_weights_bit_for_bit(plan: str, tmp_path: Path):
    model = compressed(PLANS[plan])
    report = dkm.export(model, tmp_path / "model.mlpackage", to="coreml", example=EXAMPLE)
    assert not report.dense
    weights = dkm.snap_(model).state_dict()
    found = [own.values() for own in read_palettes(tmp_path / "model.mlpackage")]
    names = [row.name for row in report.rows if "codes" in row.written]
    assert len(found) == len(names) == PLANS[plan].count(":")
    for name in names:
        assert sum(own.shape == weights[name].shape and torch.equal(own, weights[name]) for own in found) == 1
    assert "only a Mac" in report.summary()


def test_the_package_is_a_package_of_coremltools_and_small(tmp_path: Path):
    model = compressed("0:2", nn.Sequential(nn.Linear(512, 512)))
    report = dkm.export(model, tmp_path / "model.mlpackage", to="coreml", example=torch.ones(1, 512))
    spec = coremltools.models.MLModel(str(tmp_path / "model.mlpackage"), skip_model_load=True).get_spec()
    assert spec.WhichOneof("Type") == "mlProgram"
    codes = 512 * 512 * 2 // 8
    assert [row.bytes for row in report.rows if "codes" in row.written] == [codes + 4 * 2]
    assert codes < report.bytes < codes + 10_000


def test_scaled_vectors_need_ios_26(tmp_path: Path):
    model = compressed("4:2/2 scaled")
    report = dkm.export(model, tmp_path / "a.mlpackage", to="coreml", example=EXAMPLE)
    assert [(row.name, row.why) for row in report.dense] == [
        ("4.weight", "coremltools writes vectors with scales for iOS 26 only: ios=26")
    ]
    assert not read_palettes(tmp_path / "a.mlpackage")
    report = dkm.export(model, tmp_path / "b.mlpackage", to="coreml", example=EXAMPLE, ios=26)
    assert not report.dense
    (own,) = read_palettes(tmp_path / "b.mlpackage")
    assert torch.equal(own.values(), dkm.snap_(model)[4].weight)


def test_scales_that_cost_more_than_dense_weights_are_listed(tmp_path: Path):
    model = compressed("0:6 scaled", nn.Sequential(nn.Linear(8, 40)))
    report = dkm.export(model, tmp_path / "model.mlpackage", to="coreml", example=torch.ones(1, 8))
    assert "a table for each row" in report.dense[0].why


def test_what_does_not_fit_is_dense_and_listed(tmp_path: Path):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.matrix = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) @ self.matrix

    torch.manual_seed(0)
    model = compressed("layer:9/4, matrix:2", Own())
    report = dkm.export(model, tmp_path / "model.mlpackage", to="coreml", example=torch.ones(2, 6))
    assert {row.name: row.why for row in report.dense} == {
        "layer.weight": "Core ML has indices of at most 8 bits, and these have 9",
        "matrix": "coremltools has no palettes in Own",
    }


def test_float32_holds_what_float16_does_not(tmp_path: Path):
    model = nn.Sequential(nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight.mul_(2.0**-40)
    compressed("0:2", model)
    for precision, dense in (("float16", 1), ("float32", 0)):
        path = tmp_path / f"{precision}.mlpackage"
        report = dkm.export(model, path, to="coreml", example=torch.ones(1, 8), precision=precision)
        assert len(report.dense) == dense
        assert len(read_palettes(path)) == 1 - dense


def test_a_language_model_with_tied_weights(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, vocab_size=60)
    tokens = dict(bos_token_id=1, eos_token_id=2, tie_word_embeddings=True)
    model = compressed("*:3/2", transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **tokens)))
    example = {"input_ids": torch.arange(8)[None]}
    report = dkm.export(model, tmp_path / "model.mlpackage", to="coreml", example=example)
    assert not report.dense
    names = [row.name for row in report.rows if "codes" in row.written]
    assert len(read_palettes(tmp_path / "model.mlpackage")) >= len(names) == 8


class Odd(nn.Module):
    """With an operator that coremltools does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(self.layer(x)).real


def test_what_cannot_be_converted_is_an_error(tmp_path: Path):
    model = compressed("layer:2", Odd())
    with pytest.raises(dkm.ExportError, match=r"coremltools cannot convert the model \(exported: .*; traced: "):
        dkm.export(model, tmp_path / "model.mlpackage", to="coreml", example=torch.eye(4))
    assert not list(tmp_path.iterdir())


def test_a_package_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    convert = coremltools.convert

    def harmed(program: object, **options: object) -> object:
        for name, value in program.state_dict.items():
            if name.endswith("/lut"):
                value.add_(1.0)
        return convert(program, **options)

    monkeypatch.setattr(coremltools, "convert", harmed)
    with pytest.raises(dkm.ExportError, match="differs from the model by up to inf"):
        dkm.export(compressed("4:2"), tmp_path / "model.mlpackage", to="coreml", example=EXAMPLE)
    assert not list(tmp_path.iterdir())


MISTAKES = {
    "the end of the name": (dict(path="model.onnx"), dkm.ExportError, r"end in \.mlpackage"),
    "a precision": (dict(precision="int8"), ValueError, "precision must be float16 or float32, got 'int8'"),
    "a system": (dict(ios=17), ValueError, "ios must be 18 or 26, got 17"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case: str, tmp_path: Path):
    options, error, message = MISTAKES[case]
    path = tmp_path / options.get("path", "model.mlpackage")
    options = {key: value for key, value in options.items() if key != "path"}
    with pytest.raises(error, match=message):
        dkm.export(compressed("4:2"), path, to="coreml", example=EXAMPLE, **options)
    assert not list(tmp_path.iterdir())
