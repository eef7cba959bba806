"""The size of a file before there is one."""

import copy

import pytest
import torch
from example_models import MODELS
from torch import nn

import dkm
from dkm.formats.file_size import FileCount

PLANS = ["all:4/4", "*:3", "*:2 scaled", "*:3/2 per 8x16 e4m3", "*:2 scaled per row, all:1"]


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("case", MODELS)
def test_it_is_that_of_the_file(case, text: str, tmp_path):
    model = MODELS[case]()
    plan = dkm.plan(model, text)
    counted = FileCount(model).of_plan(plan.rows)
    dkm.compress_(model, plan, steps=1)
    assert counted == 8 * dkm.save(model, tmp_path / "model.dkm")


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_extreme_scales_and_other_types(scale: float, dtype: torch.dtype, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Linear(50, 30)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= scale
    plan = dkm.plan(model, "0:3/2, 2:2 e4m3")
    counted = FileCount(model).of_plan(plan.rows)
    assert counted == FileCount(model).of_plan(plan.rows)
    before = copy.deepcopy(model.state_dict())
    dkm.compress_(model, plan, steps=1)
    assert counted == 8 * dkm.save(model, tmp_path / "model.dkm")
    assert all(torch.equal(before[name], tensor) for name, tensor in before.items())


def test_an_entropy_coded_file_is_no_larger(tmp_path):
    pytest.importorskip("constriction")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 300), nn.Linear(300, 4))
    with torch.no_grad():
        model[0].weight.pow_(5)  # most are close to zero
    plan = dkm.plan(model, "0:3, 1:2/1")
    counted = FileCount(model).of_plan(plan.rows) // 8
    dkm.compress_(model, plan, steps=1)
    assert dkm.save(model, tmp_path / "model.dkm", coding="entropy") < counted
