"""Target `aqlm`: what AQLM makes of the folder has our weights, and transformers' own AQLM path gives our logits."""

import json
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import torch
import transformers
from dkm_files import tensor, with_outliers
from safetensors.torch import load_file
from small_language import make_language_model
from torch import Tensor, nn

import dkm
from dkm.clustering.spec import Spec
from dkm.exporters.aqlm import aqlm_layer
from dkm.formats.described import Codes, Described

PLAN = (
    "*.embed_tokens:8/8, *.q_proj:8/8, *.k_proj:8/8 scaled, *.up_proj:4/4, *.v_proj:2/2 scaled, *.0.*.o_proj:1/8, "
    "*.1.*.o_proj:3/1, *.0.*.down_proj:8/8 per 16 rows, *.1.*.down_proj:keep, *.gate_proj:8/8"
)


def aqlm_weight(codes: Tensor, codebooks: Tensor, scales: Tensor) -> Tensor:
    """The weight as AQLM defines it: a sum over codebooks, each of vectors of (out group, in group), times scales."""
    out_groups, in_groups, books = codes.shape
    assert codes.dtype == torch.int8
    numbers = codes.long() % 256
    total = torch.zeros(out_groups, in_groups, *codebooks.shape[2:])
    for book in range(books):
        total += codebooks[book].float()[numbers[:, :, book]]
    total = total * scales.float()
    return total.transpose(1, 2).reshape(out_groups * codebooks.shape[2], -1)


class StandIn(nn.Module):
    """As `aqlm.QuantizedLinear`, in plain PyTorch."""

    def __init__(
        self, in_features, out_features, in_group_size, out_group_size, num_codebooks, nbits_per_codebook, bias=True
    ):
        super().__init__()
        rows, entries = out_features // out_group_size, 2**nbits_per_codebook

        def made(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

        self.codebooks = made(num_codebooks, entries, out_group_size, in_group_size)
        self.codes = made(rows, in_features // in_group_size, num_codebooks, dtype=torch.int8)
        self.scales = made(rows, 1, 1, 1)
        self.bias = made(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, aqlm_weight(self.codes, self.codebooks, self.scales), self.bias)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make_language_model(tmp_path / "model")
    return tmp_path


def compressed(place: Path, plan: str = PLAN, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model", dtype=dtype)
    dkm.compress_(model, plan, tau=1.0)
    return model


def check_folder(folder: Path, expected: dict[str, Tensor]) -> set[str]:
    """The weights in the folder are those expected; returns the names of those that are codes."""
    stored = load_file(folder / "model.safetensors")
    coded = {name.removesuffix("codes") + "weight" for name in stored if name.endswith("codes")}
    for name in coded:
        prefix = name.removesuffix("weight")
        found = aqlm_weight(*(stored[prefix + part] for part in ("codes", "codebooks", "scales")))
        assert torch.equal(found.to(expected[name].dtype), expected[name]), name
    for name in expected.keys() - coded - {"lm_head.weight"}:
        assert torch.equal(stored[name].to(expected[name].dtype), expected[name]), name
    return coded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_those_of_the_file(place: Path, dtype: torch.dtype):
    model = compressed(place, dtype=dtype)
    dkm.save(model, place / "model.dkm")
    expected = dkm.load(place / "model.dkm")
    report = dkm.export(model, place / "out", to="aqlm")
    coded = check_folder(place / "out", expected)
    places = {name.removeprefix("model.layers.").removesuffix(".weight") for name in coded}
    both = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.gate_proj"}
    assert places == {f"{layer}.{name}" for layer in (0, 1) for name in both} | {"0.self_attn.o_proj"}
    assert report.checked.difference == 0
    assert {row.name.removeprefix("model."): row.why for row in report.dense} == {
        "embed_tokens.weight": "AQLM is for linear layers",
        "layers.1.self_attn.o_proj.weight": "AQLM's codes have 8 bits for 8 weights, and this is 3/1",
        "layers.0.mlp.down_proj.weight": "AQLM has one codebook for a layer, and this has one for each group",
    }
    config = json.loads((place / "out/config.json").read_text())
    kept = {
        "lm_head",
        "model.layers.1.self_attn.o_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    }
    assert set(config["quantization_config"]["linear_weights_not_to_quantize"]) == kept | {f"{n}.weight" for n in kept}
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert (place / "out/tokenizer.json").read_bytes() == (place / "model/tokenizer.json").read_bytes()


@pytest.mark.parametrize("package", ["stand-in", "aqlm"])
def test_transformers_own_path_gives_our_logits(place: Path, package: str, monkeypatch: pytest.MonkeyPatch):
    if package == "aqlm":  # its CPU kernel loses sums between threads: run this with NUMBA_NUM_THREADS=1
        pytest.importorskip("aqlm")
    else:
        module = types.ModuleType("aqlm")
        module.QuantizedLinear = StandIn
        monkeypatch.setitem(sys.modules, "aqlm", module)
        monkeypatch.setattr("transformers.quantizers.quantizer_aqlm.is_aqlm_available", lambda: True)
    model = compressed(place)
    dkm.save(model, place / "model.dkm")
    plain = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    dkm.load(place / "model.dkm", into=plain)
    dkm.export(place / "model.dkm", place / "out", to="aqlm", model=plain)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(place / "out")
    names = [type(each).__name__ for each in loaded.modules()]
    assert names.count("StandIn" if package == "stand-in" else "QuantizedLinear") == 11
    x = torch.arange(3, 15).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x).logits, plain(x).logits, atol=1e-4, rtol=1e-4)


def test_a_weight_of_an_extreme_scale(place: Path):
    """Its power of two goes into the scales."""
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    with torch.no_grad():
        for layer, scale in enumerate((1e-20, 1e20)):
            model.model.layers[layer].self_attn.q_proj.weight.mul_(scale)
    dkm.compress_(model, "*.q_proj:8/8 scaled", tau=1.0)
    dkm.save(model, place / "model.dkm")
    dkm.export(model, place / "out", to="aqlm")
    assert len(check_folder(place / "out", dkm.load(place / "model.dkm"))) == 2


def test_a_scale_that_float32_does_not_hold_is_dense():
    centroids, scales = torch.full((2**8, 8), 4.0).half(), torch.tensor([1.5 * 2**-23]).half()
    content = Codes(8, 8, -126, torch.zeros(1, dtype=torch.uint8), centroids, None, scales)
    found = aqlm_layer(Described("a", (1, 8), torch.float32, content))
    assert found == "its weights are too small or too large for a codebook and scales"


def test_names_that_transformers_would_confuse_are_dense(place: Path):
    """It leaves every module alone whose name begins or ends as one of its list."""
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    model.up_proj = nn.Linear(32, 32)
    dkm.compress_(model, "model.*.up_proj:8/8, *.q_proj:8/8", tau=1.0)
    report = dkm.export(model, place / "out", to="aqlm")
    assert {row.name for row in report.dense} == {f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)}
    assert all("transformers would confuse" in row.why for row in report.dense)


def test_several_files(place: Path):
    model = compressed(place)
    report = dkm.export(model, place / "out", to="aqlm", max_shard_size="20KB")
    shards = list((place / "out").glob("model-*.safetensors"))
    assert len(shards) > 1
    assert report.checked.difference == 0


def test_other_models_are_refused(tmp_path: Path):
    model = nn.Sequential(nn.Linear(16, 16))
    dkm.compress_(model, "0:8/8", tau=1.0)
    with pytest.raises(dkm.ExportError, match=r"a model of transformers.*this is a Sequential"):
        dkm.export(model, tmp_path / "out", to="aqlm")
    assert not list(tmp_path.iterdir())


def test_outliers_do_not_fit():
    each = tensor("weight", (4, 16), Spec(1))
    assert not isinstance(aqlm_layer(each), str)
    assert aqlm_layer(with_outliers(each, 10)) == "AQLM stores no value besides codes, and this has 7 outliers"
