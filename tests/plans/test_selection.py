"""Which tensors an entry of a plan selects, and the kind and the reason of every row."""

import pytest
import torch
from example_models import Bare, Conv1D, Tied, decided, resnet_like
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import dkm
from dkm.clustering.spec import Spec
from dkm.plans.language import parse_spec

FIT = {  # on resnet_like(): 0 and 2 are convolutions, 5 and 6 linear; 0 and 6 are small
    "cv:4/4": {"0.weight": (8, 1), "2.weight": (4, 4)},
    "fc:4": {"6.weight": (8, 1)},
    "lin:4": {"5.weight": (4, 1), "6.weight": (8, 1)},
    "xform:4": {"5.weight": (4, 1), "6.weight": (8, 1)},
    "all:2": {"0.weight": (8, 1), "2.weight": (2, 1), "5.weight": (2, 1), "6.weight": (8, 1)},
    "first:4/2": {"0.weight": (4, 2)},
    "last:4/2": {"6.weight": (4, 2)},
    "0:4/2": {"0.weight": (4, 2)},
    "0.weight:4/2": {"0.weight": (4, 2)},
    "[06]:1": {"0.weight": (1, 1), "6.weight": (1, 1)},
    "?.weight:1": {"0.weight": (1, 1), "2.weight": (1, 1), "5.weight": (1, 1), "6.weight": (1, 1)},
    "*:3": {"0.weight": (3, 1), "2.weight": (3, 1), "5.weight": (3, 1), "6.weight": (3, 1)},
    # later ones win
    "cv:4/4, 2:2": {"0.weight": (8, 1), "2.weight": (2, 1)},
    "2:2, cv:4/4": {"0.weight": (8, 1), "2.weight": (4, 4)},
    "cv:4, cv:keep": {},
    "cv:keep, cv:4": {"0.weight": (8, 1), "2.weight": (4, 1)},
    "cv:4, first:keep": {"2.weight": (4, 1)},
    "first:keep, last:keep": {},
    "0:2, cv:4": {"0.weight": (8, 1), "2.weight": (4, 1)},  # the kind's rule for small ones again
}


@pytest.mark.parametrize("text", FIT)
def test_selected(text):
    assert decided(dkm.plan(resnet_like(), text)) == FIT[text]


UNFIT = {  # text -> (the quoted word, what the error also says)
    "emb:4": ("emb", "embeddings, and this model has none"),
    "conf:4": ("conf", "selectors are cv, fc, lin"),
    "embed:4": ("embed", "did you mean 'emb'"),
    "firts:4": ("firts", "did you mean 'first'"),
    "2.wieght:4": ("2.wieght", "did you mean '2.weight'"),
    "layer9.*:4": ("layer9.*", "unknown selector"),
    "cv:4, CV:2": ("CV", "unknown selector"),
    "*.bias:4": ("*.bias", "matches only tensors that stay: 0.bias"),
    "1:4": ("1", "matches only tensors that stay: 1.weight"),
    "cv:8, 1.*:keep": ("1.*", "matches only tensors that stay"),
    "cv:8, .:4": (".", "unknown selector"),
}


@pytest.mark.parametrize("text", UNFIT)
def test_selects_nothing(text):
    word, hint = UNFIT[text]
    with pytest.raises(dkm.PlanError) as caught:
        dkm.plan(resnet_like(), text)
    assert f"'{word}' in plan '{text}'" in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("word", ["all", "first", "last"])
def test_a_model_without_weights(word):
    with pytest.raises(dkm.PlanError, match="this model has none") as caught:
        dkm.plan(nn.BatchNorm1d(3), f"{word}:4")
    assert "of these" not in str(caught.value)  # "these" would point at a table the reader does not see
    assert "of them" not in str(caught.value)


def test_a_literal_name_needs_no_escape():
    model = nn.ModuleDict({"block[0]": nn.Linear(4, 4)})
    assert decided(dkm.plan(model, "block[0].weight:4")) == {"block[0].weight": (4, 1)}


def test_the_root_module_can_own_tensors():
    assert decided(dkm.plan(nn.Linear(4, 4), "weight:2")) == {"weight": (2, 1)}


def test_a_pattern_means_the_modules_below_too():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "b": nn.Linear(2, 2)})
    assert decided(dkm.plan(model, "a.*:4")) == {"a.0.weight": (4, 1), "a.1.weight": (4, 1)}


@pytest.mark.parametrize(
    ("parameters", "small"), [(9_999, True), (10_000, False), (10_001, False)], ids=["9999", "10000", "10001"]
)
def test_small_is_under_10_000(parameters, small):
    row = dkm.plan(nn.Linear(parameters, 1), "all:2/2")["weight"]
    assert (row.bits, row.dim) == ((8, 1) if small else (2, 2))


@pytest.mark.parametrize("spec", ["2 scaled", "2 per row", "2 per 64 e4m3"])
def test_small_tensors_have_neither_scales_nor_groups(spec: str):
    plan = dkm.plan(nn.Sequential(nn.Linear(99, 99), nn.Linear(100, 100)), f"all:{spec}")
    assert [plan[name].spec for name in ("0.weight", "1.weight")] == [Spec(8), parse_spec(spec, "a test")]


ABSURD = {
    "8 per 4": "256 x 262144 centroids of 1 values: choose larger groups, fewer bits or a smaller dim",
    "12/64 scaled per row": "4096 x 1024 centroids of 64 values: choose larger groups, fewer bits or a smaller dim",
    "12/5000": "4096 centroids of 5,000 values: choose a smaller dim",
}


@pytest.mark.parametrize("spec", ABSURD)
def test_more_centroids_than_weights_are_refused(spec: str):
    with torch.device("meta"):
        model = nn.Linear(1024, 1024)
    label = parse_spec(spec, "a test").label
    with pytest.raises(dkm.PlanError) as caught:
        dkm.plan(model, f"all:{spec}")
    assert str(caught.value) == f"'all:{label}' selects weight, which has only 1,048,576 weights for {ABSURD[spec]}"


def test_few_vectors_for_the_centroids_are_allowed():
    assert dkm.plan(nn.Linear(64, 64), "weight:4 per 8")["weight"].why == "weight"


def test_the_small_rule_is_in_the_reason():
    assert "under 10,000" in dkm.plan(resnet_like(), "cv:4")["0.weight"].reason


class LinearNormed(nn.Linear):
    """A linear layer with "Norm" in its name."""


class Conv2dSame(nn.Conv2d):
    pass


class Scale(nn.LayerNorm):
    """A norm without "Norm" in its name."""


KINDS = {
    "Linear": (nn.Linear(4, 4), "weight", "lin"),
    "a Linear": (LinearNormed(4, 4), "weight", "lin"),
    "Bilinear": (nn.Bilinear(3, 4, 5), "weight", "lin"),
    "Conv1d": (nn.Conv1d(3, 4, 3), "weight", "cv"),
    "Conv3d": (nn.Conv3d(3, 4, 3), "weight", "cv"),
    "ConvTranspose2d": (nn.ConvTranspose2d(3, 4, 3), "weight", "cv"),
    "a Conv2d": (Conv2dSame(3, 4, 3), "weight", "cv"),
    "Embedding": (nn.Embedding(5, 4), "weight", "emb"),
    "EmbeddingBag": (nn.EmbeddingBag(5, 4), "weight", "emb"),
    "LSTM": (nn.LSTM(3, 4), "weight_hh_l0", "rnn"),
    "GRU": (nn.GRU(3, 4, bidirectional=True), "weight_ih_l0_reverse", "rnn"),
    "MultiheadAttention": (nn.MultiheadAttention(4, 2), "in_proj_weight", "lin"),
    "MultiheadAttention, apart": (nn.MultiheadAttention(4, 2, kdim=3, vdim=5), "k_proj_weight", "lin"),
    "Conv1D": (Conv1D(), "weight", "lin"),
    "bare": (Bare(), "position", "bare"),
    "bias": (nn.Linear(4, 4), "bias", ""),
    "BatchNorm": (nn.BatchNorm2d(4), "weight", ""),
    "LayerNorm 2-d": (nn.LayerNorm((4, 5)), "weight", ""),
    "a LayerNorm": (Scale((4, 5)), "weight", ""),
    "RMSNorm 2-d": (nn.RMSNorm((4, 5)), "weight", ""),
    "PReLU": (nn.PReLU(4), "weight", ""),
}


empty = nn.Linear(4, 4)


empty.register_parameter("none", nn.Parameter(torch.zeros(0, 4)))


KINDS["empty"] = (empty, "none", "")


@pytest.mark.parametrize("case", KINDS)
def test_kind(case):
    module, name, kind = KINDS[case]
    others = nn.ModuleDict({"x": module, "y": nn.Linear(2, 2)})  # so that "y:keep" is always a valid plan
    row = dkm.plan(others, "y:keep")[f"x.{name}"]
    assert row.kind == kind
    assert row.reason


def test_bare_parameters_are_clustered_only_where_named():
    assert decided(dkm.plan(Bare(), "all:4")) == {"linear.weight": (8, 1)}
    assert decided(dkm.plan(Bare(), "position:4/2")) == {"position": (4, 2)}
    assert "name it" in dkm.plan(Bare(), "all:4")["table"].reason


def test_recurrent_weights_are_lin_and_not_xform():
    model = nn.ModuleDict({"rnn": nn.LSTM(3, 4), "head": nn.Linear(4, 2)})
    assert set(decided(dkm.plan(model, "lin:4"))) == {"rnn.weight_ih_l0", "rnn.weight_hh_l0", "head.weight"}
    assert set(decided(dkm.plan(model, "xform:4"))) == {"head.weight"}


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn], ids=str)
def test_parameters_without_16_bit_floats_are_kept(dtype):
    model = nn.Linear(4, 4)
    model.register_parameter("table", nn.Parameter(torch.zeros(3, 5).to(dtype), requires_grad=False))
    row = dkm.plan(model, "all:4")["table"]
    assert row.bits is None
    assert str(dtype).removeprefix("torch.") in row.reason


def test_an_integer_parameter_counts_its_own_width():
    model = nn.Linear(4, 4, bias=False)
    model.register_parameter("table", nn.Parameter(torch.zeros(3, 5, dtype=torch.int64), requires_grad=False))
    assert dkm.plan(model, "all:keep")["table"].stored_bits == 15 * 64


@pytest.mark.parametrize("text", ["0:4", "all:4", "1:4"])
def test_frozen_is_noted_in_the_table(text):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    rows = dkm.plan(model, text)
    assert rows["0.weight"].frozen
    assert "frozen" in rows["0.weight"].why
    assert not rows["1.weight"].frozen
    assert "frozen" not in rows["1.weight"].why


def test_other_parametrizations_are_kept_and_named():
    model = nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Linear(5, 2))
    rows = dkm.plan(model, "all:4")
    assert set(decided(rows)) == {"1.weight"}
    assert "WeightNorm" in rows["0.parametrizations.weight.original1"].reason


def test_tied_weights_are_one_row():
    rows = dkm.plan(Tied(), "emb:4")
    assert rows["output.weight"] is rows["embedding.weight"]
    assert rows["embedding.weight"].aliases == ("output.weight",)
    assert rows.parameters == 400 * 30 + 400


def test_tied_weights_can_be_named_either_way():
    assert decided(dkm.plan(Tied(), "output.weight:4")) == {"embedding.weight": (4, 1)}


def test_a_module_used_twice_is_one_row():
    linear = nn.Linear(4, 4)
    rows = dkm.plan(nn.Sequential(linear, nn.ReLU(), linear), "all:4")
    assert [row.name for row in rows.rows] == ["0.weight", "0.bias"]
    assert rows["2.weight"].name == "0.weight"
