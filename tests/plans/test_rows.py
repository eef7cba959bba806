"""A plan's figures, as the paper counts them, and its table."""

import math

import pytest
import torch
from example_models import MODELS, Tied
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dkm


def test_an_unknown_row():
    with pytest.raises(KeyError, match="nothing"):
        dkm.plan(nn.Linear(2, 2), "all:4")["nothing"]


layers = st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(1, 12), st.integers(1, 17), st.booleans())


@given(st.lists(layers, min_size=1, max_size=5))
def test_bytes_are_the_papers_count(layers):
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
    assert dkm.plan(model, text).bytes == -(-expected // 8)


def test_bits_per_weight_counts_everything_of_clustered_tensors():
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    first = 25 * 4 + 16 * 4 * 16  # 25 codes of 4 bits, 16 centroids of 4 values of 16 bits
    assert dkm.plan(model, "0:4/4").bits_per_weight == first / 100
    assert dkm.plan(model, "0:4/4, 1:1").bits_per_weight == (first + 100 + 2 * 16) / 200
    assert dkm.plan(model, "0:keep").bits_per_weight == 0


COSTS = {  # of 96 x 128 weights, in bits: codes, centroids, scales
    "2": 2 * 12_288 + 4 * 16,
    "2 scaled": 2 * 12_288 + 4 * 16 + 96 * 16,
    "2 per row": 2 * 12_288 + 96 * 4 * 16,
    "2 per 8 rows": 2 * 12_288 + 12 * 4 * 16,
    "3 per 8x64": 3 * 12_288 + 24 * 8 * 16,
    "3 per 8x64 e4m3": 3 * 12_288 + 24 * 8 * 8,
    "4/4 scaled per 4096": 4 * 3_072 + 3 * 16 * 4 * 16 + 96 * 16,
    "2 per 1000": 2 * 12_288 + 13 * 4 * 16,
    "2/2 per 1001": 2 * (12 * 501 + 138) + 13 * 4 * 2 * 16,  # 1001 weights are 501 vectors, and 276 remain
}


@pytest.mark.parametrize("spec", COSTS)
def test_scales_and_all_codebooks_are_counted(spec: str):
    plan = dkm.plan(nn.Linear(128, 96, bias=False), f"weight:{spec}")
    assert plan.rows[0].stored_bits == COSTS[spec]
    assert plan.bits_per_weight == COSTS[spec] / 12_288
    assert dkm.plan(nn.Linear(128, 96, bias=False), plan.text).rows[0].spec == plan.rows[0].spec


def test_ratio_is_to_float32():
    assert dkm.plan(nn.Linear(100, 100), "all:keep").ratio == pytest.approx(2)


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


@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("spec", ["3 scaled per 8x64 e4m3", "2/4 scaled per 4096", "2 per row"])
def test_the_table_of_groups_fits_80_columns_and_names_stay_apart(case: str, spec: str):
    head, *lines = dkm.plan(named(NAMES[case]), f"all:{spec}").table(80).splitlines()
    assert max(map(len, [head, *lines])) <= 80
    assert len({line.split()[0] for line in lines}) == len(NAMES[case])
    assert all(dkm.plan(nn.Linear(100, 100), f"all:{spec}")["weight"].label in line for line in lines)


def test_columns_that_follow_from_others_give_way_to_names_and_reasons():
    plan = dkm.plan(named(["encoder.blocks.0.weight"]), "*:3 per 8x64")
    assert plan.table(120).splitlines()[0].split() == ["tensor", "shape", "params", "b/d", "k", "bytes", "why"]
    assert "8 x 8192" in plan.table(120)
    assert plan.table(70).splitlines()[0].split() == ["tensor", "shape", "b/d", "k", "bytes", "why"]
    assert plan.table(60).splitlines()[0].split() == ["tensor", "shape", "b/d", "bytes", "why"]


def test_the_table_says_what_a_tensor_costs():
    head, line = dkm.plan(nn.Linear(100, 100, bias=False), "weight:4/4").table(100).splitlines()
    assert dict(zip(head.split(), line.split(), strict=True)) == dict(
        tensor="weight", shape="100x100", params="10,000", **{"b/d": "4/4"}, k="16", bytes="1,378", why="weight"
    )


def test_the_table_shows_aliases(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert "also output.weight" in str(dkm.plan(Tied(), "emb:4"))


def test_tensors_that_no_plan_can_cluster_are_folded_into_a_line_for_each_reason():
    plan = dkm.plan(nn.Sequential(nn.Linear(100, 100), nn.LayerNorm(100), nn.Linear(100, 100)), "0:4")
    head, first, second, rest = plan.table(100, fold=True).splitlines()
    assert dict(zip(head.split(), rest.replace("(4 tensors)", "folded - ").split(maxsplit=5), strict=False)) == dict(
        tensor="folded", shape="-", params="400", **{"b/d": "keep", "k": "800", "bytes": "bias or norm"}
    )
    assert first.split()[-1] == "0"
    assert second.endswith("not selected")  # what a plan could have selected keeps its line
