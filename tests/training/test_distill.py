"""Distillation: the loss by its definition, recovery without labels, and the divergence of two models."""

import copy
import types

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import dkm
from dkm.training import distill


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("shape", [(10,), (3, 10), (2, 3, 10)], ids=str)
def test_is_the_divergence_averaged_over_positions(shape, temperature):
    student, teacher = torch.randn(2, *shape, dtype=torch.float64)
    p, q = ((logits / temperature).softmax(-1) for logits in (teacher, student))
    wanted = temperature**2 * (p * (p / q).log()).sum(-1).mean()
    torch.testing.assert_close(dkm.distill(student, teacher, temperature=temperature), wanted)


def test_is_zero_for_equals():
    logits = torch.randn(4, 10)
    assert dkm.distill(logits, logits).item() == pytest.approx(0, abs=1e-6)


def test_only_the_student_has_a_gradient():
    student, teacher = (torch.randn(3, 10, requires_grad=True) for _ in range(2))
    dkm.distill(student, teacher).backward()
    torch.testing.assert_close(student.grad, (student.softmax(-1) - teacher.softmax(-1)).detach() / 3)
    assert teacher.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_computed_in_float32(dtype):
    student, teacher = (torch.randn(2, 64, 1000) * 3).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = dkm.distill(student, teacher, temperature=2.0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, dkm.distill(student.float(), teacher.float(), temperature=2.0))


def test_outputs_with_logits():
    student, teacher = torch.randn(2, 3, 10)
    outputs = (types.SimpleNamespace(logits=logits, loss=None) for logits in (student, teacher))
    assert torch.equal(dkm.distill(*outputs), dkm.distill(student, teacher))


@pytest.mark.parametrize(
    "shapes", [((3, 10), (3, 9)), ((3, 10), (4, 10)), ((3, 10), (10,)), ((), ()), ((0, 5), (0, 5))]
)
def test_shapes_that_do_not_fit(shapes):
    with pytest.raises(ValueError, match=r"logits \(\.\.\., classes\) of one shape, got .* from the student"):
        dkm.distill(*map(torch.zeros, shapes))


@pytest.mark.parametrize("value", [None, "logits", torch.zeros(3, dtype=torch.int64)], ids=repr)
def test_what_is_no_logits(value):
    with pytest.raises(TypeError, match="distill needs the teacher's logits"):
        dkm.distill(torch.zeros(3), value)


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf"), "warm"])
def test_temperature_is_positive(temperature):
    with pytest.raises(ValueError, match="temperature must be a positive finite number"):
        dkm.distill(torch.zeros(3), torch.zeros(3), temperature=temperature)


class TestTeacher:
    def test_is_a_frozen_copy_in_evaluation_mode(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
        teacher = dkm.teacher(model)
        assert model.training
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert not teacher.training
        assert not any(parameter.requires_grad for parameter in teacher.parameters())
        model[0].weight.data.zero_()
        assert teacher[0].weight.any()

    def test_is_made_before_compressing(self):
        model = nn.Sequential(nn.Linear(4, 4))
        dkm.compress_(model, "0:2", steps=1)
        with pytest.raises(ValueError, match="compressed already: make the teacher first"):
            dkm.teacher(model)


def test_recovers_accuracy_with_few_images_and_no_labels():
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(model(images[:1200]), labels[:1200]).backward()
        optimizer.step()

    def accuracy(network: nn.Module) -> float:
        network.eval()
        return 100 * float((network(images[1200:]).argmax(1) == labels[1200:]).float().mean())

    teacher, steps = dkm.teacher(model), 60
    dkm.compress_(model, "*:1", steps=steps)
    clustered = accuracy(model)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        dkm.distill(model(images[:200]), teacher(images[:200])).backward()
        optimizer.step()
    assert accuracy(teacher) - accuracy(model) < (accuracy(teacher) - clustered) / 3


# --- divergence ----------------------------------------------------------------------------------


def network() -> nn.Sequential:
    layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    return nn.Sequential(*layers)


def test_divergence_is_zero_at_first_and_grows():
    model = network()
    loss = dkm.divergence(model, torch.randn(32, 1, 8, 8).split(16))
    assert float(loss(copy.deepcopy(model))) == pytest.approx(0, abs=1e-6)
    with torch.no_grad():
        model[-1].weight.add_(0.05 * torch.randn(model[-1].weight.shape))
        near = float(loss(model))
        model[-1].weight.add_(0.5 * torch.randn(model[-1].weight.shape))
    assert 0 < near < float(loss(model))


def test_divergence_is_distillation_with_the_statistics_of_the_batch():
    torch.manual_seed(1)
    a, b = network(), network()
    x = torch.randn(64, 1, 8, 8)
    loss = dkm.divergence(a, [(x, torch.zeros(64))])
    before = copy.deepcopy(b.state_dict())
    found = loss(b.eval())
    assert all(torch.equal(tensor, before[name]) for name, tensor in b.state_dict().items())
    assert not any(m.training for m in b.modules())
    torch.testing.assert_close(found, dkm.distill(b.train()(x), a.train()(x)).detach())


def test_divergence_of_batches_of_keywords():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return self.linear(x) * scale

    model = Model()
    assert dkm.divergence(model, [{"x": torch.randn(2, 4), "scale": 2.0}])(model) == pytest.approx(0, abs=1e-6)


def test_divergence_needs_a_batch():
    with pytest.raises(ValueError, match="at least one batch"):
        dkm.divergence(network(), iter([]))


def test_probes_have_the_second_derivative_as_their_mean_square(monkeypatch: pytest.MonkeyPatch):
    """Where the divergence is zero, Gauss and Newton are exact.

    The squares of N random numbers of about a normal distribution have a mean with a deviation of sqrt(2 / N).
    """
    count = 2_000
    monkeypatch.setattr(distill, "PROBES", count)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double(), torch.randn(9, 4).double()
    loss = dkm.divergence(model, [x[:6], x[6:]])
    weight, before = model[0].weight, [model(part).detach() for part in (x[:6], x[6:])]

    def moved(values: Tensor) -> Tensor:
        answers = [torch.func.functional_call(model, {"0.weight": values}, (part,)) for part in (x[:6], x[6:])]
        return torch.stack([dkm.distill(new, old) for new, old in zip(answers, before, strict=True)]).mean()

    second = torch.autograd.functional.hessian(moved, weight.detach()).reshape(24, 24).diagonal().view(6, 4)
    squares = [torch.autograd.grad(number, weight)[0] ** 2 for number in loss.probes(model)]
    assert len(squares) == loss.passes == count
    torch.testing.assert_close(torch.stack(squares).mean(0), second, rtol=6 * (2 / count) ** 0.5, atol=1e-12)
    again = next(iter(loss.probes(model)))
    assert torch.equal(again, next(iter(loss.probes(model))))  # so that a plan can be chosen again


@pytest.mark.parametrize(("batches", "passes"), [(1, 4), (2, 4), (3, 6), (9, 9)])
def test_every_batch_is_probed(batches: int, passes: int):
    model = nn.Linear(3, 2)
    assert dkm.divergence(model, [torch.randn(2, 3)] * batches).passes == passes
