"""plan.py: text -> entries, entries + model -> a row for every tensor."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import dkm
from dkm.plans.language import Entry, parse


def resnet_like() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),  # 432 parameters: small
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 80, 3),  # 11,520: not
        nn.BatchNorm2d(80),
        nn.Flatten(),
        nn.Linear(80, 130),  # 10,400: not
        nn.Linear(130, 10),  # 1,300: small
    )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(400, 30)
        self.output = nn.Linear(30, 400)
        self.output.weight = self.embedding.weight


class Conv1D(nn.Module):
    """As in transformers: neither Linear nor Conv, one matrix called weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 30))
        self.bias = nn.Parameter(torch.randn(30))


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 20, 30))
        self.table = nn.Parameter(torch.randn(20, 30))
        self.linear = nn.Linear(30, 4)


def decided(plan: dkm.Plan) -> dict[str, tuple[int, int]]:
    return {row.name: (row.bits, row.dim) for row in plan.rows if row.bits is not None}


# --- text -> entries -----------------------------------------------------------------------------

ACCEPTED = {
    "cv:4": [Entry("cv", 4, 1)],
    "cv:4/4": [Entry("cv", 4, 4)],
    "cv:12/16": [Entry("cv", 12, 16)],
    "cv:04/02": [Entry("cv", 4, 2)],
    "cv:keep": [Entry("cv", None, 1)],
    "  cv : 4 / 4  ": [Entry("cv", 4, 4)],
    "cv:6/8, fc:6/10": [Entry("cv", 6, 8), Entry("fc", 6, 10)],
    "cv:6/8,fc:keep,cv:2": [Entry("cv", 6, 8), Entry("fc", None, 1), Entry("cv", 2, 1)],
    "all:1\n,\tfirst:8": [Entry("all", 1, 1), Entry("first", 8, 1)],
    "layer4.*:4": [Entry("layer4.*", 4, 1)],
    "layer4.0.conv1.weight:keep": [Entry("layer4.0.conv1.weight", None, 1)],
    "a:b:4": [Entry("a:b", 4, 1)],
    "no.such.thing:3/3": [Entry("no.such.thing", 3, 3)],
}


@pytest.mark.parametrize("text", ACCEPTED)
def test_accepted(text):
    assert parse(text) == ACCEPTED[text]


REJECTED = {  # text -> the word that the error quotes
    "cv": "cv",
    "cv:": "cv:",
    ":4": ":4",
    ":": ":",
    "cv 4": "cv 4",
    "cv:4/": "4/",
    "cv:/4": "/4",
    "cv:4/4/4": "4/4/4",
    "cv:0": "0",
    "cv:13": "13",
    "cv:4/0": "4/0",
    "cv:-1": "-1",
    "cv:+1": "+1",
    "cv:4/-2": "4/-2",
    "cv:4.5": "4.5",
    "cv:1e1": "1e1",
    "cv:1_0": "1_0",
    "cv:0x4": "0x4",
    "cv:four": "four",
    "cv:Keep": "Keep",
    "cv:keep/4": "keep/4",
    "cv:４": "４",  # a full-width digit
    "cv:²": "²",
    "cv:٤/٤": "٤/٤",
    "cv:4 4": "4 4",
    "cv:4;fc:8": "8",  # the selector 'cv:4;fc' is read, and no tensor has that name
    "cv:4,,fc:8": "",
    "cv:4,": "",
    ",cv:4": "",
    ",": "",
    "cv:" + "9" * 5000: "9" * 5000,  # more digits than int() takes
    "cv:4/" + "9" * 5000: "4/" + "9" * 5000,
}


@pytest.mark.parametrize("text", REJECTED, ids=lambda text: text[:20])
def test_rejected(text):
    with pytest.raises(dkm.PlanError) as caught:
        dkm.plan(resnet_like(), text)
    word = "cv:4;fc" if ";" in text else REJECTED[text]
    assert f"'{word}'" in str(caught.value)
    assert f"plan '{text}'" in str(caught.value)


@pytest.mark.parametrize("text", ["", " ", "\n\t"])
def test_empty_text(text):
    with pytest.raises(dkm.PlanError, match="plan is empty"):
        parse(text)


@pytest.mark.parametrize("text", [None, 4, b"cv:4", ["cv:4"], {"cv": 4}])
def test_not_text(text):
    with pytest.raises(TypeError, match=f"a plan is text .* got {type(text).__name__}"):
        dkm.plan(resnet_like(), text)


selectors = st.text("abz09._*?[]:", min_size=1, max_size=8)
bits_dims = st.tuples(st.integers(1, 12), st.integers(1, 99))
entries = st.lists(
    st.one_of(
        st.builds(lambda s, bd: Entry(s, *bd), selectors, bits_dims), st.builds(lambda s: Entry(s, None, 1), selectors)
    ),
    min_size=1,
    max_size=6,
)


@given(entries, st.sampled_from(["", " ", "  ", "\n"]))
def test_parse_inverts_format(entries, space):
    def format(entry):
        return f"{space}{entry.selector}{space}:{space}" + (
            "keep" if entry.bits is None else f"{entry.bits}{space}/{space}{entry.dim}"
        )

    assert parse(",".join(map(format, entries))) == entries


@given(st.text(max_size=20))
def test_parse_raises_nothing_but_plan_errors(text):
    try:
        result = parse(text)
    except dkm.PlanError:
        return
    assert all(entry.selector and (entry.bits is None or 1 <= entry.bits <= 12) for entry in result)


# --- selectors -----------------------------------------------------------------------------------

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


def test_the_small_rule_is_in_the_reason():
    assert "under 10,000" in dkm.plan(resnet_like(), "cv:4")["0.weight"].reason


# --- kinds ---------------------------------------------------------------------------------------


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


def test_an_unknown_row():
    with pytest.raises(KeyError, match="nothing"):
        dkm.plan(nn.Linear(2, 2), "all:4")["nothing"]


# --- a row for every tensor ----------------------------------------------------------------------

MODELS = {
    "resnet": resnet_like,
    "tied": Tied,
    "bare": Bare,
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False),
    "rnn": lambda: nn.ModuleDict({"a": nn.LSTM(3, 4, 2, proj_size=2), "b": nn.Embedding(4, 3), "c": nn.RNN(2, 2)}),
    "weight_norm": lambda: nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Linear(5, 2)),
}


@pytest.mark.parametrize("case", MODELS)
def test_every_parameter_is_in_exactly_one_row(case):
    model = MODELS[case]()
    rows = dkm.plan(model, "all:4").rows
    names = [name for row in rows for name in (row.name, *row.aliases)]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
    assert len(rows) == len(list(model.parameters()))


@pytest.mark.parametrize("case", MODELS)
def test_planning_leaves_the_model_alone(case):
    model = MODELS[case]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dkm.plan(model, "all:4")
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("case", MODELS)
def test_a_plan_needs_no_values(case):
    with torch.device("meta"):
        empty = MODELS[case]()
    assert dkm.plan(empty, "all:4") == dkm.plan(MODELS[case](), "all:4")


@pytest.mark.parametrize("lazy", [nn.LazyLinear(4), nn.LazyConv2d(4, 3)], ids=["linear", "conv"])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_says_what_to_do(lazy):
    with pytest.raises(dkm.PlanError, match=r"1\.weight has no shape yet: run one batch"):
        dkm.plan(nn.Sequential(nn.Linear(2, 2), lazy), "all:4")


def test_a_compressed_model_says_what_to_do():
    model = nn.Sequential(nn.Linear(4, 4))
    dkm.compress_(model, "all:2", steps=1)
    with pytest.raises(dkm.PlanError, match=r"0\.weight is clustered already: snap_"):
        dkm.plan(model, "all:2")


# --- the paper's count ---------------------------------------------------------------------------

layers = st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(1, 12), st.integers(1, 17), st.booleans())


@settings(deadline=None)
@given(st.lists(layers, min_size=1, max_size=5))
def test_megabytes_is_the_papers_count(layers):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(columns, rows) for columns, rows, *_ in layers))
    text = ", ".join(
        f"{i}.weight:" + ("keep" if keep else f"{bits}/{dim}") for i, (*_, bits, dim, keep) in enumerate(layers)
    )
    expected = 0
    for columns, rows, bits, dim, keep in layers:
        biases = 16 * rows
        if keep:
            expected += 16 * columns * rows + biases
        else:
            codes = bits * math.ceil(columns * rows / dim)
            expected += codes + 16 * dim * 2**bits + biases
    assert dkm.plan(model, text).megabytes == expected / (8 * 1024 * 1024)


def test_bits_per_weight_counts_the_codes_of_clustered_tensors():
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    assert dkm.plan(model, "0:4/4").bits_per_weight == 1.0  # 25 codes of 4 bits over 100 weights
    assert dkm.plan(model, "0:4/4, 1:1").bits_per_weight == 1.0
    assert dkm.plan(model, "0:keep").bits_per_weight == 0


def test_ratio_is_to_float32():
    assert dkm.plan(nn.Linear(100, 100), "all:keep").ratio == pytest.approx(2)


# --- the table -----------------------------------------------------------------------------------


def named(names: list[str], shape=(2048, 2048)) -> nn.Module:
    """A model, without values, whose tensors have these names."""
    root = nn.Module()
    for name in names:
        *path, attribute = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.register_parameter(attribute, nn.Parameter(torch.empty(shape, device="meta")))
    return root


NAMES = {
    "resnet": [
        f"layer{i}.{j}.{part}.weight" for i in range(1, 5) for j in range(3) for part in ("conv1", "downsample.0")
    ],
    "mobilenet": [f"features.{i}.conv.{j}.0.weight" for i in range(1, 18) for j in range(2)],
    "bert": [
        f"distilbert.transformer.layer.{i}.{part}.weight"
        for i in range(6)
        for part in ("attention.q_lin", "attention.out_lin", "ffn.lin1", "output_layer_norm")
    ],
    "gpt": [f"transformer.h.{i}.{part}.weight" for i in range(12) for part in ("attn.c_attn", "mlp.c_proj")],
}


@pytest.mark.parametrize("case", NAMES)
def test_the_table_fits_80_columns_and_names_stay_apart(case, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    model = named(NAMES[case])
    model.add_module("small", nn.Linear(10, 10))  # has the longest reason of all
    plan = dkm.plan(model, "all:4/4")
    head, *lines = plan.table(80).splitlines()
    assert len(lines) == len(NAMES[case]) + 2
    assert max(map(len, [head, *str(plan).splitlines()])) <= 80
    shown = [line.split()[0] for line in lines]
    assert len(set(shown)) == len(shown), f"two rows are called {max(shown, key=shown.count)}"


@pytest.mark.parametrize("case", MODELS)
def test_the_table_has_a_row_for_every_tensor(case, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    plan = dkm.plan(MODELS[case](), "all:4")
    lines = str(plan).splitlines()[1:-2]
    assert [line.split()[0] for line in lines] == [row.name for row in plan.rows]
    assert all(row.reason in line for row, line in zip(plan.rows, lines, strict=True))


def test_the_table_of_large_tensors_fits_80_columns():
    plan = dkm.plan(named(["encoder.blocks.0.weight"], (2048, 2048, 3, 3, 3)), "*:12/16")
    assert max(map(len, plan.table(80).splitlines())) <= 80


def test_the_table_says_what_a_tensor_costs():
    head, line = dkm.plan(nn.Linear(100, 100, bias=False), "weight:4/4").table(100).splitlines()
    assert dict(zip(head.split(), line.split(), strict=True)) == dict(
        tensor="weight", shape="100x100", params="10,000", **{"b/d": "4/4"}, k="16", bytes="1,378", why="weight"
    )


def test_the_table_shows_aliases(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert "also output.weight" in str(dkm.plan(Tied(), "emb:4"))
