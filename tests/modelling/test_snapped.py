"""The snapped weight of an evaluation is remembered, and never stale."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import dkm
from dkm.modelling.methods.dkm import DKMClustered


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry each time that a snapped weight is made."""
    calls: list[int] = []
    make = DKMClustered.snapped

    def counted(self: DKMClustered, weight: Tensor) -> Tensor:
        calls.append(1)
        return make(self, weight)

    monkeypatch.setattr(DKMClustered, "snapped", counted)
    return calls


def compressed(plan: str = "*:2/1", *shape: int) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*(shape or (33, 17)), bias=False))
    dkm.compress_(model, plan, steps=10)
    return model.eval()[0]


def clustering(layer: nn.Module) -> dkm.Clustered:
    return layer.parametrizations.weight[0]


def anew(layer: nn.Module) -> Tensor:
    """The snapped weight, made without the memory."""
    return clustering(layer).snapped(layer.parametrizations.weight.original.detach())


@torch.no_grad()
def test_a_second_read_makes_nothing(made):
    layer = compressed()
    first, second = layer.weight, layer.weight
    assert len(made) == 1
    assert torch.equal(first, second)


def test_inference_mode_and_no_grad_share_it(made):
    layer = compressed()
    with torch.inference_mode():
        first = layer.weight.clone()
    with torch.no_grad():
        assert torch.equal(layer.weight, first)
    assert len(made) == 1


def by_data(layer: nn.Module) -> None:
    layer.parametrizations.weight.original.data.neg_()


def by_numpy(layer: nn.Module) -> None:
    layer.parametrizations.weight.original.detach().numpy()[:] *= -1


def by_one_bit(layer: nn.Module) -> None:
    weight = layer.parametrizations.weight.original.data.view(-1).view(torch.int32)
    weight[7] ^= 1 << 31  # the sign


def by_a_swap(layer: nn.Module) -> None:
    weight = layer.parametrizations.weight.original.data
    weight.copy_(weight.flip(0))


def by_another_tensor(layer: nn.Module) -> None:
    layer.parametrizations.weight.original.data = -layer.parametrizations.weight.original.data


def by_the_centroids(layer: nn.Module) -> None:
    clustering(layer).C.data.mul_(2)


def by_the_scales(layer: nn.Module) -> None:
    clustering(layer).scales.data.mul_(2)


def by_a_checkpoint(layer: nn.Module) -> None:
    state = copy.deepcopy(layer.state_dict())
    state["parametrizations.weight.original"].neg_()
    layer.load_state_dict(state)


def by_dtype(layer: nn.Module) -> None:
    layer.double()


def by_nan(layer: nn.Module) -> None:
    layer.parametrizations.weight.original.data.view(-1)[3] = torch.nan


def by_the_reader(layer: nn.Module) -> None:
    layer.weight.mul_(3)


def by_the_readers_data(layer: nn.Module) -> None:
    layer.weight.data.mul_(3)


def by_the_readers_array(layer: nn.Module) -> None:
    layer.weight.detach().numpy()[3, 5] += 1


CHANGES = [
    by_data,
    by_numpy,
    by_one_bit,
    by_a_swap,
    by_another_tensor,
    by_the_centroids,
    by_the_scales,
    by_a_checkpoint,
    by_dtype,
    by_nan,
    by_the_reader,
    by_the_readers_data,
    by_the_readers_array,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("plan", ["*:2/1 scaled", "*:4/4 scaled", "*:3 scaled per 8x16"])
@torch.no_grad()
def test_never_stale(change, plan):
    layer = compressed(plan)
    before = layer.weight.clone()
    change(layer)
    after = layer.weight
    torch.testing.assert_close(after, anew(layer), rtol=0, atol=0, equal_nan=True)
    if not change.__name__.startswith("by_the_reader"):
        assert after.dtype != before.dtype or not torch.equal(after, before)


def test_an_optimizer_step_between_evaluations_shows():
    layer = compressed()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    with torch.no_grad():
        before = layer.weight.clone()
    layer.train()
    layer(torch.randn(8, 33)).square().mean().backward()
    optimizer.step()
    layer.eval()
    with torch.no_grad():
        assert torch.equal(layer.weight, anew(layer))
        assert not torch.equal(layer.weight, before)


def test_training_frees_the_memory(made):
    layer = compressed()
    with torch.no_grad():
        assert layer.weight is not None
    layer.train()
    assert layer.weight is not None
    layer.eval()
    with torch.no_grad():
        assert layer.weight is not None
    assert len(made) == 2


@torch.no_grad()
def test_a_copy_has_a_memory_of_its_own(made):
    layer = compressed()
    first = layer.weight.clone()
    other = copy.deepcopy(layer)
    other.parametrizations.weight.original.data.neg_()
    assert torch.equal(other.weight, anew(other))
    assert torch.equal(layer.weight, first)


@torch.no_grad()
def test_checkpoints_and_pickles_do_not_hold_it():
    layer = compressed("*:2/1", 300, 200)
    assert layer.weight is not None
    assert not any("memory" in name for name in layer.state_dict())
    assert len(pickle.dumps(clustering(layer).memory)) < 200


def test_a_frozen_weight_in_training_is_remembered(made):
    layer = compressed()
    layer.parametrizations.weight.original.requires_grad_(False)
    layer.train()
    layer(torch.randn(4, 33, requires_grad=True)).sum().backward()
    layer(torch.randn(4, 33, requires_grad=True)).sum().backward()
    assert len(made) == 1


def test_gradients_pass_straight_through_and_nothing_is_remembered(made):
    layer = compressed()
    layer(torch.ones(2, 33)).sum().backward()
    assert torch.equal(layer.parametrizations.weight.original.grad, torch.full((17, 33), 2.0))
    assert clustering(layer).memory._kept is None


@torch.no_grad()
def test_tied_weights_share_it(made):
    model = nn.ModuleDict({"emb": nn.Embedding(50, 32), "out": nn.Linear(32, 50, bias=False)})
    model["out"].weight = model["emb"].weight
    dkm.compress_(model, "emb:3", steps=5)
    model.eval()
    assert torch.equal(model["emb"].weight, model["out"].weight)
    assert len(made) == 1


@torch.no_grad()
def test_compiled_evaluation_follows_the_weight():
    layer = compressed()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(4, 33)
    compiled(x)
    layer.parametrizations.weight.original.data.neg_()
    torch.testing.assert_close(compiled(x), x @ anew(layer).T)


@torch.no_grad()
def test_odd_sizes_are_compared_to_the_last_byte():
    layer = compressed("*:2/1", 7, 3).half()
    layer.weight.detach().view(torch.uint8).view(-1)[-1] ^= 1  # after the last eight bytes
    assert torch.equal(layer.weight, anew(layer))
