"""`dkm.plan`: a row for every tensor of any model, and the model stays as it is."""

import pytest
import torch
from example_models import MODELS
from torch import nn

import dkm


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


def test_a_module_whose_name_has_a_comma():
    model = nn.Sequential()
    model.add_module("odd, name", nn.Linear(8, 8))
    plan = dkm.plan(model, '"odd, name":3/2')
    assert plan["odd, name.weight"].bits == 3
    assert dkm.plan(model, plan.text) == dkm.plan(model, '"odd, name.weight":3/2')


def test_a_dim_beyond_the_tensor_is_refused_before_anything_is_allocated():
    with pytest.raises(dkm.PlanError, match=r"weight:2/50000000' selects weight, which has only 100 weights"):
        dkm.compress_(nn.Linear(10, 10), "weight:2/50000000", steps=1)
    with pytest.raises(ValueError, match="2/50000000 has far more centroids than 100 weights have values"):
        dkm.cluster_weight(nn.Linear(10, 10), bits=2, dim=50_000_000, steps=1)
