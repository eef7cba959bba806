"""A weight that has diverged shows, in training and in evaluation."""

import pytest
import torch
from method_helpers import within
from torch import nn

import dkm
from dkm.modelling.methods import METHODS


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dim", [1, 3])
def test_a_weight_that_is_not_finite_is_seen_in_evaluation(method: str, value: float, dim: int):
    layer = nn.Linear(10, 7)
    dkm.compress_(layer, within(method, f"weight:2/{dim}"), method=method, steps=3)
    with torch.no_grad():
        layer.parametrizations.weight.original[2, 3] = value
    weight = layer.eval().weight
    assert not weight[2, 3].isfinite()
    assert not layer(torch.ones(10)).isfinite().all()


@pytest.mark.parametrize("dim", [1, 3])
def test_only_the_vectors_in_question_are_not_finite(dim: int):
    layer = nn.Linear(10, 7)
    dkm.compress_(layer, f"weight:2/{dim}", steps=3)
    with torch.no_grad():
        layer.parametrizations.weight.original[2, 3] = float("nan")
    assert int((~layer.eval().weight.isfinite()).sum()) == dim
