"""`dkm.recalibrate_`: the running statistics of the snapped network."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn

import dkm


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.bn1 = nn.BatchNorm2d(6, momentum=0.3)
        self.drop = nn.Dropout(0.5)
        self.conv2 = nn.Conv2d(6, 4, 3)
        self.bn2 = nn.BatchNorm2d(4)

    def forward(self, x, scale=1.0):
        return self.bn2(self.conv2(self.drop(self.bn1(self.conv1(x)).relu()))) * scale


def trained_a_little(compressed: bool = True) -> Net:
    model = Net()
    if compressed:
        dkm.compress_(model, "conv1:2, conv2:2/2", steps=5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.randn(8, 3, 9, 9)).square().mean().backward()
        optimizer.step()
    return model


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5 + i, 3, 9, 9, generator=generator) + i for i in range(count)]


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_buffers() if "bn" in name}


def by_hand(model: Net, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each batch's mean and unbiased variance, averaged over the batches, with the weights as in evaluation."""
    model = copy.deepcopy(model).eval()

    def normalise(x, norm):
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=1)
        biased = x.var((0, 2, 3), correction=0)
        y = (x - mean[:, None, None]) / (biased + norm.eps).sqrt()[:, None, None]
        return y * norm.weight[:, None, None] + norm.bias[:, None, None], mean, var

    seen = []
    for x in batches:
        h, *first = normalise(model.conv1(x), model.bn1)
        _, *second = normalise(model.conv2(h.relu()), model.bn2)
        seen.append([*first, *second])
    names = ("bn1.running_mean", "bn1.running_var", "bn2.running_mean", "bn2.running_var")
    return {name: torch.stack(values).mean(0) for name, values in zip(names, zip(*seen, strict=True), strict=True)}


@pytest.mark.parametrize("compressed", [True, False], ids=["compressed", "plain"])
def test_statistics_are_those_of_the_snapped_network(compressed):
    model = trained_a_little(compressed)
    with torch.no_grad():
        expected = by_hand(model, batches())
    dkm.recalibrate_(model, batches())
    for name, value in expected.items():
        torch.testing.assert_close(model.get_buffer(name), value)


def test_compressed_and_snapped_agree():
    model = trained_a_little()
    snapped = dkm.snap_(copy.deepcopy(model), dtype=torch.float32)
    dkm.recalibrate_(model, batches())
    dkm.recalibrate_(snapped, batches())
    for name, value in statistics(snapped).items():
        torch.testing.assert_close(value, statistics(model)[name])


def test_counts_the_batches():
    model = dkm.recalibrate_(trained_a_little(), batches(2))
    assert model.bn1.num_batches_tracked == 2


def test_does_not_depend_on_what_was_there():
    model = trained_a_little()
    other = copy.deepcopy(model)
    other.bn1.running_mean += 5
    assert torch.equal(
        dkm.recalibrate_(model, batches()).bn1.running_mean, dkm.recalibrate_(other, batches()).bn1.running_mean
    )


def test_returns_the_model():
    model = trained_a_little()
    assert dkm.recalibrate_(model, batches()) is model


def test_nothing_but_the_statistics_changes():
    model = trained_a_little()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dkm.recalibrate_(model, batches())
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"bn{i}.running_{what}" for i in (1, 2) for what in ("mean", "var")}  # 3 batches, as before


@pytest.mark.parametrize("fail", [False, True])
def test_modes_and_momenta_are_as_before(fail):
    model = trained_a_little()
    model.train()
    model.conv1.eval()
    model.bn2.eval()
    before = {name: module.training for name, module in model.named_modules()}
    if fail:
        with pytest.raises(RuntimeError):
            dkm.recalibrate_(model, [torch.randn(2, 5)])
    else:
        dkm.recalibrate_(model, batches())
    assert {name: module.training for name, module in model.named_modules()} == before
    assert (model.bn1.momentum, model.bn2.momentum) == (0.3, 0.1)


def test_a_failing_batch_leaves_the_statistics():
    model = trained_a_little()
    before = statistics(model)
    with pytest.raises(RuntimeError):
        dkm.recalibrate_(model, [*batches(), torch.randn(2, 5)])
    assert all(torch.equal(value, before[name]) for name, value in statistics(model).items())


def test_a_failing_iterator_leaves_the_statistics():
    def failing():
        yield from batches()
        raise KeyboardInterrupt

    model = trained_a_little()
    before = statistics(model)
    with pytest.raises(KeyboardInterrupt):
        dkm.recalibrate_(model, failing())
    assert all(torch.equal(value, before[name]) for name, value in statistics(model).items())


def test_no_batches():
    model = trained_a_little()
    before = statistics(model)
    with pytest.raises(ValueError, match="recalibrate_ needs at least one batch, got none"):
        dkm.recalibrate_(model, iter([]))
    assert all(torch.equal(value, before[name]) for name, value in statistics(model).items())


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


FORMS = {
    "tuple": lambda x: (x, 7),
    "list": lambda x: [x, 7],
    "tuple of one": lambda x: (x,),
    "namedtuple": lambda x: Pair(x, 7),
    "dict": lambda x: {"x": x},
    "dict with more": lambda x: {"x": x, "scale": 2.0},
    "dict in a tuple": lambda x: ({"x": x}, 7),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_batch(form):
    model = trained_a_little()
    expected = statistics(dkm.recalibrate_(copy.deepcopy(model), batches()))
    dkm.recalibrate_(model, (FORMS[form](x) for x in batches()))
    assert all(torch.equal(value, expected[name]) for name, value in statistics(model).items())


def test_forward_decides_how_a_batch_is_fed():
    model = trained_a_little()
    expected = statistics(dkm.recalibrate_(copy.deepcopy(model), batches()))
    dkm.recalibrate_(model, [f"{i}" for i in range(3)], forward=lambda model, name: model(batches()[int(name)]))
    assert all(torch.equal(value, expected[name]) for name, value in statistics(model).items())


def test_a_batch_of_unknown_form():
    model = trained_a_little()
    before = statistics(model)
    with pytest.raises(TypeError, match="do not know how to feed a str to the model: give forward="):
        dkm.recalibrate_(model, ["a"])
    assert all(torch.equal(value, before[name]) for name, value in statistics(model).items())


def test_a_model_without_batch_norm_is_left_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.BatchNorm1d(3, track_running_stats=False)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def never():
        raise AssertionError("no batch is needed")
        yield

    assert dkm.recalibrate_(model, never()) is model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].training


def test_cumulative_norms_stay_cumulative():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None))
    dkm.recalibrate_(model, [torch.randn(4, 3)])
    assert model[1].momentum is None


def test_one_dimension():
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3))
    x = torch.randn(4, 2, 6)
    dkm.recalibrate_(model, [x])
    with torch.no_grad():
        torch.testing.assert_close(model[1].running_mean, model[0](x).mean((0, 2)))


def test_no_graph_is_built():
    outputs = []
    model = trained_a_little()
    dkm.recalibrate_(model, batches(1), forward=lambda model, x: outputs.append(model(x)))
    assert not outputs[0].requires_grad


def test_the_centroids_do_not_move():
    model = trained_a_little()
    before = [module.C.clone() for module in model.modules() if isinstance(module, dkm.Clustered)]
    dkm.recalibrate_(model, batches())
    after = [module.C for module in model.modules() if isinstance(module, dkm.Clustered)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
