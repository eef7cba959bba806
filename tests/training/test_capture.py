"""A training step as a CUDA graph; without a GPU, `capture` calls the step as it is and refuses wrong arguments."""

import pytest
import torch
from torch import nn

import dkm

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make(device: str, kind: type = torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    dkm.compress_(model, "*.weight:2/1", steps=20)
    optimizer = kind(model.parameters(), **dict(lr=0.1) | options)

    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


def train(model, optimizer, step, device: str) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    losses = []
    for _ in range(12):
        x = torch.randn(16, 32, generator=generator)
        losses.append(step(x.to(device), (x[:, 0] > 0).long().to(device)).item())
        schedule.step()
    return losses


def test_without_a_gpu_the_step_is_called():
    plain, other = make("cpu"), make("cpu")
    captured = dkm.capture(other[2], other[1])
    assert train(*plain, "cpu") == train(other[0], other[1], captured, "cpu")


@gpu
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, dict(momentum=0.9, fused=True)), (torch.optim.AdamW, dict(lr=1e-3))],
    ids=["sgd", "adamw"],
)
def test_equals_the_step_without_a_graph(kind, options):
    """Losses and state, with a schedule of the learning rate."""
    plain, other = make("cuda", kind, **options), make("cuda", kind, **options)
    losses = train(*plain, "cuda"), train(other[0], other[1], dkm.capture(other[2], other[1], warm_up=3), "cuda")
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0][-1] < losses[0][0]
    for name, wanted in plain[0].state_dict().items():
        torch.testing.assert_close(other[0].state_dict()[name], wanted, rtol=1e-2, atol=1e-4, msg=name)


@gpu
def test_a_training_that_has_begun_can_be_captured():
    plain, other = (make("cuda", torch.optim.AdamW, lr=1e-3) for _ in range(2))
    for model in (plain, other):
        train(*model, "cuda")
    losses = train(*plain, "cuda"), train(other[0], other[1], dkm.capture(other[2], other[1], warm_up=1), "cuda")
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@gpu
@pytest.mark.parametrize("tau", ["auto", "learn"])
def test_reading_a_weight_between_replays_does_no_harm(tau):
    """The state is written in place: what a graph writes is what the model reads, and the other way round."""
    torch.manual_seed(0)
    layer = dkm.cluster_weight(nn.Linear(32, 8, device="cuda"), bits=2, tau=tau, steps=20)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)

    def step(x):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()

    step, x = dkm.capture(step, optimizer, warm_up=1), torch.randn(4, 32, device="cuda")
    for count in range(6):
        step(x)
        layer.weight.detach()  # not kept: PyTorch cannot capture a step while an older graph of its weights is alive
        assert int(layer.parametrizations.weight[0].step) == count + 1


@gpu
def test_a_step_that_waits_raises_and_can_then_be_called_as_it_is():
    """Nothing is left of the attempt: neither in the weights nor in the random numbers."""
    model = nn.Sequential(nn.Linear(32, 8), nn.Dropout(), nn.Linear(8, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    captured, x = dkm.capture(step, optimizer, warm_up=1), torch.randn(4, 32, device="cuda")
    captured(x)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError):
        captured(x)
    assert not captured.captured
    assert all(map(torch.equal, before, model.parameters()))
    assert step(x) > 0


@gpu
def test_another_shape_is_refused():
    _, optimizer, step = make("cuda", fused=True)
    captured = dkm.capture(step, optimizer, warm_up=1)
    x, y = torch.randn(16, 32, device="cuda"), torch.zeros(16, dtype=torch.int64, device="cuda")
    captured(x, y)
    captured(x, y)
    with pytest.raises(ValueError, match=r"captured with \(16, 32\) float32 and is called with \(7, 32\)"):
        captured(x[:7], y[:7])


@gpu
def test_sgd_that_cannot_be_captured_is_refused():
    _, optimizer, step = make("cuda")
    x, y = torch.randn(16, 32, device="cuda"), torch.zeros(16, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match="fused=True"):
        dkm.capture(step, optimizer)(x, y)


def test_what_it_does_not_take_says_so():
    with pytest.raises(TypeError, match="capture needs a function"):
        dkm.capture(None)
    with pytest.raises(TypeError, match="optimizers"):
        dkm.capture(lambda x: x, "sgd")
    with pytest.raises(ValueError, match="warm_up must be an integer of at least 1, got 0"):
        dkm.capture(lambda x: x, warm_up=0)
    with pytest.raises(TypeError, match="takes tensors, got float"):
        dkm.capture(lambda x: x)(1.0)
