"""A tied weight has one clustering, which every module that holds the weight sees under its own name."""

import copy
import os
import pickle
import subprocess
import sys

import torch
from torch import nn

import dkm
from dkm.modelling.parameters import clusterings

SCRIPT = """
import copy, torch, dkm
from test_twins import Tied, step
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

def wrapped():
    model = nn.parallel.DistributedDataParallel(Tied.compressed())
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

model, optimizer = wrapped()
step(model, optimizer)
state, optimizer_state = copy.deepcopy(get_state_dict(model, optimizer))
other, other_optimizer = wrapped()
set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
step(model, optimizer)
step(other, other_optimizer)
for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
    assert torch.equal(a, b), name
torch.distributed.destroy_process_group()
print("resumed")
"""


class Tied(nn.Module):
    """An embedding and a head that are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))

    @classmethod
    def compressed(cls) -> "Tied":
        torch.manual_seed(0)
        model = cls()
        dkm.compress_(model, "embedding:3/2", steps=10)
        return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(5)).square().mean().backward()
    optimizer.step()


def test_both_names_have_the_same_state():
    model = Tied.compressed()
    assert len(clusterings(model)) == 1
    step(model, torch.optim.SGD(model.parameters(), 0.1))
    model(torch.arange(5))
    state = model.state_dict()
    for name in ("C", "start", "seen", "step", "unit", "exponent"):
        a, b = (state[f"{part}.parametrizations.weight.0.{name}"] for part in ("embedding", "head"))
        assert a.data_ptr() == b.data_ptr()


def test_copies_and_pickles_have_a_clustering_of_their_own_that_both_names_share():
    model = Tied.compressed()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(clusterings(model)))):
        if isinstance(other, list):
            assert torch.equal(other[0].C, clusterings(model)[0].C)
            continue
        assert len(clusterings(other)) == 1
        assert vars(clusterings(other)[0]) is not vars(clusterings(model)[0])
        before = clusterings(model)[0].C.clone()
        step(other, torch.optim.SGD(other.parameters(), 0.5))
        other(torch.arange(5))
        assert torch.equal(clusterings(model)[0].C, before)
        assert torch.equal(other.embedding.weight, other.head.weight)


def test_distributed_checkpoints_of_a_model_in_ddp():
    """PyTorch visits a module once: the state of one that two layers share would lack the second name."""
    here = os.path.dirname(__file__)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, *sys.path])}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == "resumed"
