"""compress_ and snap_ on whole models: ties, sharing, optimizers."""

import copy

import pytest
import torch
from torch import nn

import dkm
from dkm.modelling.parameters import clusterings


class Tied(nn.Module):
    """An embedding and a head that are one tensor."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(60, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 60, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.embedding(x))))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))


def test_tied_weights_are_clustered_once_and_stay_tied(tmp_path):
    torch.manual_seed(0)
    model = Tied()
    plan = dkm.compress_(model, "embedding:3/2, body:4", steps=3)
    assert plan["embedding.weight"].aliases == ("head.weight",)
    assert plan["head.weight"].name == "embedding.weight"
    assert len(clusterings(model)) == 2
    assert sum(p.numel() for p in model.parameters()) == 60 * 16 + 16 * 16 + 16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randint(60, (4, 7))
    for _ in range(3):
        step(model, optimizer, x)
        assert torch.equal(model.embedding.weight, model.head.weight)
    model.eval()
    wanted = model(x)
    dkm.save(model, tmp_path / "tied.dkm", dtype=torch.float32)
    loaded = dkm.load(tmp_path / "tied.dkm", into=Tied()).eval()
    assert loaded.head.weight is loaded.embedding.weight
    assert torch.equal(loaded.head.weight, model.head.weight)
    torch.testing.assert_close(loaded(x), wanted)
    dkm.snap_(model, dtype=torch.float32)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(loaded.head.weight, model.head.weight)
    torch.testing.assert_close(model(x), wanted)


def test_tied_weight_advances_once_per_step():
    model = Tied()
    dkm.compress_(model, "embedding:3", steps=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        step(model, optimizer, torch.randint(60, (4, 7)))
    assert int(model.embedding.parametrizations.weight[0].step) == 2


def test_a_module_used_twice_is_clustered_once(tmp_path):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 16)
            self.b = self.a

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    model = Shared()
    plan = dkm.compress_(model, "a:3", tau=1e-3)
    assert [row.name for row in plan.rows] == ["a.weight", "a.bias"]
    x = torch.randn(2, 16)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    dkm.save(model.eval(), tmp_path / "shared.dkm", dtype=torch.float32)
    loaded = dkm.load(tmp_path / "shared.dkm", into=Shared()).eval()
    assert torch.equal(loaded.a.weight, model.a.weight)
    torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.parametrize("before", [True, False])
def test_optimizer_built_before_or_after(before):
    model = net()
    if before:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dkm.compress_(model, "all:3", steps=5)
    if not before:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    weight = model[0].parametrizations.weight.original
    old = weight.detach().clone()
    step(model, optimizer, torch.randn(2, 3, 8, 8))
    assert not torch.equal(weight, old)


def test_compressing_twice_says_so():
    model = net()
    dkm.compress_(model, "all:3", steps=5)
    with pytest.raises(ValueError, match="compressed already"):
        dkm.compress_(model, "all:3", steps=5)


def test_nothing_happens_to_the_model_when_one_tensor_is_bad():
    model = net()
    model[4].weight.data[0, 0] = torch.nan
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=r"4\.weight holds NaN"):
        dkm.compress_(model, "all:3", steps=5)
    assert list(model.state_dict()) == before


def test_frozen_tensors_are_clustered_and_stay_frozen():
    model = net()
    model[0].weight.requires_grad_(False)
    plan = dkm.compress_(model, "all:3", steps=5)
    assert plan["0.weight"].bits == 8
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    old = model[0].weight.clone()
    step(model, optimizer, torch.randn(2, 3, 8, 8))
    assert torch.equal(model[0].weight, old)
    assert torch.equal(old, model.eval()[0].weight)


def test_snap_gives_plain_modules_and_keeps_the_parameters():
    model = net()
    parameters = {id(p) for p in model.parameters()}
    keys = set(model.state_dict())
    dkm.compress_(model, "all:3", steps=5)
    dkm.snap_(model)
    assert set(model.state_dict()) == keys
    assert {id(p) for p in model.parameters()} == parameters
    assert type(model[0]) is nn.Conv2d
    assert not clusterings(model)
    assert len(model[4].weight.unique()) <= 256


def test_snap_rounds_the_rest_to_16_bit_but_not_running_statistics():
    model = net()
    dkm.compress_(model, "all:3", steps=5)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3, 8, 8))
    mean = model[1].running_mean.clone()
    bias = model[4].bias.detach().clone()
    dkm.snap_(model)
    assert torch.equal(model[1].running_mean, mean)
    assert torch.equal(model[4].bias, bias.half().float())


def test_other_parametrizations_survive_snapping():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 200))
    plan = dkm.compress_(model, "1:3", steps=5)
    assert any("parametrized" in row.reason for row in plan.rows)
    dkm.snap_(model)
    assert nn.utils.parametrize.is_parametrized(model[0])
    assert model(torch.randn(2, 8)).shape == (2, 200)


def test_size_counts_the_compressed_model_like_the_plan():
    model = net()
    plan = dkm.plan(model, "all:3/2")
    dkm.compress_(model, plan, steps=5)
    size = dkm.size(model)
    assert size.megabytes == plan.megabytes
    assert size.file_bytes > size.bytes == 1e6 * size.megabytes
    assert size.bits_per_weight == plan.bits_per_weight
    assert f"{size.file_bytes:,} bytes" in str(size)


def test_copies_are_independent():
    model = net()
    dkm.compress_(model, "all:3", steps=5)
    twin = copy.deepcopy(model)
    step(twin, torch.optim.SGD(twin.parameters(), lr=0.1), torch.randn(2, 3, 8, 8))
    assert not torch.equal(twin[0].parametrizations.weight.original, model[0].parametrizations.weight.original)
