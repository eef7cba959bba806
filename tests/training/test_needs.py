"""What a method needs besides the weight is given by a line, and missed by name where the line is not there."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import dkm


def network(method: str, **options) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Linear(20, 4), nn.Dropout(0.5))
    dkm.compress_(model, "0:2, 2:2", method=method, steps=10, **options)
    return model


X = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
BATCHES = r"calibrate_\(model, batches\) with a few batches"
LOSS = r"in every step, loss = loss \+ dkm.method_loss\(model\) before loss.backward\(\)"


def step(model: nn.Module, *, whole: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loss = model.train()(X).square().mean()
    (loss + dkm.method_loss(model) if whole else loss).backward()
    optimizer.step()


def test_batches_are_missed_before_the_first_step(tmp_path: Path):
    model = network("atb")
    model.eval()(X)  # to measure the model before is no mistake
    assert dkm.size(model).bytes > 0
    for use in (
        lambda: model.train()(X),
        lambda: dkm.save(model, tmp_path / "m.dkm"),
        lambda: dkm.snap_(copy.deepcopy(model)),
        lambda: dkm.export(model, tmp_path / "m.safetensors", to="safetensors"),
    ):
        with pytest.raises(dkm.NeedError, match=f'method="atb" needs a line .*{BATCHES}'):
            use()
    assert not list(tmp_path.iterdir())
    dkm.calibrate_(model, [X])
    model.train()(X)
    dkm.save(model, tmp_path / "m.dkm")


def test_a_term_of_the_loss_is_missed_after_the_second_step():
    model = network("soft-sharing")
    step(model, whole=False)
    step(model, whole=False)
    with pytest.raises(dkm.NeedError, match=f'method="soft-sharing" needs a line .*{LOSS}'):
        step(model, whole=False)


def test_a_term_of_the_loss_is_missed_by_what_is_made_of_the_model(tmp_path: Path):
    model = network("soft-sharing")
    dkm.save(model, tmp_path / "before.dkm")  # nothing was trained, and nothing is missing
    step(model, whole=False)
    step(model, whole=False)  # what the first one changed was read
    with pytest.raises(dkm.NeedError, match=LOSS):
        dkm.save(model, tmp_path / "after.dkm")
    step_with = network("soft-sharing")
    for _ in range(3):
        step(step_with, whole=True)
    dkm.save(step_with, tmp_path / "after.dkm")


def test_several_batches_for_a_step_and_reads_without_gradient_are_no_mistake():
    model = network("soft-sharing")
    with torch.no_grad():
        model.train()(X)
        for parameter in model.parameters():
            parameter.mul_(1.01)
        model(X)
    for _ in range(4):
        model(X).square().mean().backward()
    step(model, whole=True)
    step(model, whole=False)
    step(model, whole=False)


@pytest.mark.parametrize("method", ["atb", "escq", "profit", "soft-sharing", "rps"])
def test_a_checkpoint_knows_what_was_given(method: str, tmp_path: Path):
    model = dkm.calibrate_(network(method), [X])
    step(model, whole=True)
    step(model, whole=True)
    other = network(method)
    other.load_state_dict(model.state_dict())
    dkm.save(other, tmp_path / "other.dkm")
    dkm.save(model, tmp_path / "model.dkm")
    assert (tmp_path / "other.dkm").read_bytes() == (tmp_path / "model.dkm").read_bytes()


def test_methods_without_needs_are_left_alone():
    model = network("hard")
    before = copy.deepcopy(model.state_dict())
    assert dkm.calibrate_(model, []) is model
    assert float(dkm.method_loss(model)) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_calibrating_sees_the_weights_as_they_are_and_leaves_modes_and_statistics():
    model = network("atb").train()
    model[3].eval()
    seen, plain = [], model[0].parametrizations.weight.original.detach().clone()
    mean = model[1].running_mean.clone()

    def forward(model: nn.Module, batch: tuple) -> None:
        model(batch[0])
        seen.append(model[0].weight)

    dkm.calibrate_(model, iter([(X, "label")]), forward=forward)
    assert torch.equal(seen[0], plain)
    assert [module.training for module in model] == [True, True, True, False]
    assert torch.equal(model[1].running_mean, mean)
    assert not torch.equal(model[0].weight, plain)  # clustered again


def test_no_batches_and_a_broken_one():
    model = network("atb")
    with pytest.raises(ValueError, match="calibrate_ needs at least one batch, got none"):
        dkm.calibrate_(model, [])
    with pytest.raises(RuntimeError):
        dkm.calibrate_(model, [torch.randn(3, 5)])
    assert not model[0]._forward_pre_hooks
    with pytest.raises(dkm.NeedError):
        model.train()(X)


def test_frozen_weights_add_nothing_to_the_loss():
    model = network("soft-sharing")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert float(dkm.method_loss(model)) == 0
