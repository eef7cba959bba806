"""A monitor that goes on from a checkpoint counts what has changed since the record before it."""

import torch
from torch import nn

import dkm


def test_changes_are_counted_across_a_checkpoint():
    model = nn.Sequential(nn.Linear(16, 16))
    dkm.compress_(model, "0:2", tau=1e-3)
    first = dkm.monitor(model, every=1)
    first.record(0)
    state = first.state_dict()
    with torch.no_grad():
        model[0].parametrizations.weight.original.mul_(-1)
    expected = first.record(1)

    second = dkm.monitor(model, every=1)
    second.load_state_dict(state)
    found = second.record(1)
    assert found["total"]["changed"] == expected["total"]["changed"] > 0
    assert state["codes"].keys() == {"0.weight"}
