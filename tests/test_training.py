"""Every way people train: the model learns, the centroids advance with the optimizer, and the file is what was
evaluated."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

import dkm
from dkm import Clustered

STEPS = 30
PLAN = "0:3/2, 4:3/2, 6:4"


def data() -> tuple[Tensor, Tensor]:
    """64 small images of 4 classes: each a pattern and noise."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(64) % 4
    patterns = torch.randn(4, 1, 8, 8, generator=generator)
    return patterns[y] + 0.5 * torch.randn(64, 1, 8, 8, generator=generator), y


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(16, 4))


def compressed(**options) -> nn.Sequential:
    model = network()
    dkm.compress_(model, PLAN, **{"steps": STEPS, **options})
    return model


def clusterings(model: nn.Module) -> list[Clustered]:
    return [module for module in model.modules() if isinstance(module, Clustered)]


def clock(model: nn.Module) -> list[int]:
    """How often each weight has changed, the last step included."""
    model.train()(data()[0])
    return [int(clustered.step) for clustered in clusterings(model)]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], **tolerance) -> None:
    assert a.keys() == b.keys()
    for name in a.keys() - {name for name in a if name.endswith("seen")}:  # a checksum differs in the last bit
        torch.testing.assert_close(a[name], b[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def train(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int = STEPS,
    *,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    pieces: int = 1,
    clip: float | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """An ordinary training loop, with all of the data in every step; returns the losses."""
    x, y = data()
    dtype = next(p for group in optimizer.param_groups for p in group["params"]).dtype
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for piece, labels in zip(x.to(dtype).chunk(pieces), y.chunk(pieces), strict=True):
            with nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast):
                loss = F.cross_entropy(model(piece), labels) / pieces
            scaler.scale(loss).backward()
            total += loss.item()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
        scaler.step(optimizer)
        scaler.update()
        after_step()
        losses.append(total)
    return losses


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    x, y = data()
    return (model.eval()(x).argmax(1) == y).double().mean().item()


@torch.no_grad()
def assert_same_network(plain: nn.Sequential, compressed: nn.Sequential, x: Tensor) -> None:
    """Bit-equal weights.  Outputs to rounding: a plain layer and a parametrized one need not take the same path."""
    for ours, theirs in zip(plain, compressed, strict=True):
        if hasattr(ours, "weight"):
            assert torch.equal(ours.weight, theirs.weight)
            assert torch.equal(ours.bias, theirs.bias)
    torch.testing.assert_close(plain(x), compressed(x))


def assert_learned(model: nn.Sequential, losses: list[float], tmp_path: Path) -> None:
    """The snapped model classifies, and the file holds it."""
    assert losses[-1] < 0.2 * losses[0]
    model.eval()
    dtype = next(model.parameters()).dtype
    x, y = data()
    with torch.no_grad():
        assert (model(x.to(dtype)).argmax(1) == y).double().mean() > 0.95
        dkm.save(model, tmp_path / "model.dkm", dtype=torch.float32)
        loaded = dkm.load(tmp_path / "model.dkm", into=network().to(dtype)).eval()
        assert_same_network(loaded, model, x.to(dtype))
    assert len(loaded[4].weight.reshape(-1, 2).unique(dim=0)) <= 8


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.03, momentum=0.9, nesterov=True),
    "sgd-fused": partial(torch.optim.SGD, lr=0.03, momentum=0.9, fused=True),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adam-amsgrad-foreach": partial(torch.optim.Adam, lr=0.01, amsgrad=True, foreach=True),
    "adamw-foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.003),
    "adagrad": partial(torch.optim.Adagrad, lr=0.03),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, tmp_path: Path):
    model = compressed()
    losses = train(model, OPTIMIZERS[name](model.parameters()))
    assert clock(model) == [STEPS] * 3
    assert_learned(model, losses, tmp_path)


def test_several_parameter_groups(tmp_path: Path):
    """A learning rate of 0 freezes one group: its weights stay, and it cools down with the others, a read later."""
    model = compressed()
    conv, rest = model[0].parameters(), [*model[1].parameters(), *model[4].parameters(), *model[6].parameters()]
    groups = [{"params": conv, "lr": 0.0}, {"params": rest, "weight_decay": 1e-2}]
    losses = train(model, torch.optim.AdamW(groups, lr=0.01))
    assert clock(model) == [STEPS - 1, STEPS, STEPS]
    assert_learned(model, losses, tmp_path)


def test_lbfgs(tmp_path: Path):
    """Its closure is called several times per step, almost always with other weights; the clock counts each change."""
    model, evaluations = compressed(tau=1e-3, steps=None), 0
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    x, y = data()
    losses = []

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(5):
        losses.append(float(optimizer.step(closure).detach()))
    assert 2 * 5 < max(clock(model)) <= evaluations
    assert_learned(model, losses, tmp_path)


@pytest.mark.parametrize(
    "schedule",
    [
        partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=STEPS),
        partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=STEPS),
        partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=10),
    ],
    ids=["one-cycle", "cosine", "warm-up"],
)
def test_learning_rate_schedules(schedule, tmp_path: Path):
    model = compressed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = train(model, optimizer, after_step=schedule(optimizer).step)
    assert clock(model) == [STEPS] * 3
    assert_learned(model, losses, tmp_path)


def test_weight_decay_shrinks_what_ships():
    """Decay acts on the weight underneath; the centroids follow it."""
    layer = dkm.cluster_weight(nn.Linear(64, 64, bias=False), bits=4, steps=20)
    before = copy.deepcopy(layer).eval().weight
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        (0 * layer(torch.zeros(1, 64))).sum().backward()
        optimizer.step()
    layer(torch.zeros(1, 64))
    after = layer.eval().weight
    assert float((after.norm() / before.norm()).detach()) == pytest.approx(0.95**20, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, tmp_path: Path):
    model = compressed()
    losses = train(model, torch.optim.Adam(model.parameters(), lr=0.01), autocast=dtype)
    assert clock(model) == [STEPS] * 3
    assert {clustered.C.dtype for clustered in clusterings(model)} == {torch.float32}
    assert_learned(model, losses, tmp_path)


def test_autocast_does_not_change_the_clustering():
    model = compressed()
    wanted = model[4].weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model[4].weight, wanted)


def test_float16_autocast_with_a_gradient_scaler(tmp_path: Path):
    """A scale that overflows: the scaler skips those steps, the weights stay, and so do the centroids."""
    model, skipped = compressed(), 0
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=1000)

    def count() -> None:
        nonlocal skipped
        skipped = round(22 - torch.tensor(scaler.get_scale()).log2().item())  # the scale halves at each

    losses = train(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        autocast=torch.float16,
        scaler=scaler,
        clip=10.0,
        after_step=count,
    )
    assert 0 < skipped < STEPS // 2
    assert clock(model) == [STEPS - skipped] * 3
    assert_learned(model, losses, tmp_path)


def test_pure_bfloat16(tmp_path: Path):
    model = network().bfloat16()
    dkm.compress_(model, PLAN, steps=STEPS)
    losses = train(model, torch.optim.Adam(model.parameters(), lr=0.01))
    assert {clustered.C.dtype for clustered in clusterings(model)} == {torch.float32}
    assert_learned(model, losses, tmp_path)


def test_gradient_accumulation_equals_one_large_batch():
    def trained(pieces: int) -> dict[str, Tensor]:
        model = compressed(tau=1e-3, eps=0.0)  # all iterations: when eps is reached would be a matter of rounding
        model[1].eval()  # batch norm would see other batches
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 5, pieces=pieces)
        return state(model)

    assert_close(trained(4), trained(1), rtol=1e-3, atol=1e-5)


def test_clipping_limits_the_step_of_the_weights_underneath():
    model = compressed()
    before = [p.detach().clone() for p in model.parameters()]
    train(model, torch.optim.SGD(model.parameters(), lr=1.0), 1, clip=1e-3)
    moved = torch.stack([(p - old).norm() for p, old in zip(model.parameters(), before, strict=True)]).norm()
    assert float(moved.detach()) == pytest.approx(1e-3, rel=1e-3)


class TestAveraging:
    """torch.optim.swa_utils: the averaged weights snap to the newest centroids, or to the averaged ones."""

    @pytest.mark.parametrize("use_buffers", [False, True])
    @pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.8)], ids=["swa", "ema"])
    def test_the_average_snaps_as_well_as_the_model(self, use_buffers, average, tmp_path: Path):
        model = compressed()
        averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=use_buffers)
        train(
            model, torch.optim.Adam(model.parameters(), lr=0.01), after_step=lambda: averaged.update_parameters(model)
        )

        def error(model: nn.Module) -> float:
            """The mean squared error of snapping, relative to the weights."""
            weight = model.eval()[4].parametrizations.weight.original.detach()
            return float((model[4].weight.detach() - weight).square().mean() / weight.square().mean())

        assert not torch.equal(averaged.module[4].weight, model[4].weight)
        assert error(averaged.module) < 1.5 * error(model)
        dkm.recalibrate_(averaged.module, [data()[0]])
        assert accuracy(averaged.module) > 0.95
        dkm.save(averaged.module, tmp_path / "average.dkm", dtype=torch.float32)
        loaded = dkm.load(tmp_path / "average.dkm", into=network())
        assert_same_network(loaded.eval(), averaged.module, data()[0])

    def test_averaging_does_not_touch_the_training(self):
        def trained(average: bool) -> dict[str, Tensor]:
            model = compressed()
            averaged = AveragedModel(model, use_buffers=True)
            after_step = partial(averaged.update_parameters, model) if average else lambda: None
            train(model, torch.optim.Adam(model.parameters(), lr=0.01), 5, after_step=after_step)
            return state(model)

        assert_close(trained(True), trained(False), rtol=0, atol=0)

    def test_update_bn(self):
        """It runs the averaged model in training mode: the centroids may move, and still fit the weights afterwards."""
        model = compressed()
        averaged = AveragedModel(model)
        train(
            model, torch.optim.Adam(model.parameters(), lr=0.01), after_step=lambda: averaged.update_parameters(model)
        )
        update_bn([data()], averaged)
        assert accuracy(averaged) > 0.95


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_with_dropout_autocast_and_accumulation(use_reentrant: bool):
    def trained(checked: bool) -> dict[str, Tensor]:
        model = compressed()
        model.insert(4, nn.Dropout(0.2))
        run = partial(checkpoint, model[2:], use_reentrant=use_reentrant) if checked else model[2:]
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(lambda x: run(model[:2](x)), optimizer, 3, autocast=torch.bfloat16, pieces=2)
        return state(model)

    assert_close(trained(True), trained(False))


def test_compiled_training_with_autocast_then_evaluation(tmp_path: Path):
    model = compressed()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    losses = train(run, torch.optim.AdamW(model.parameters(), lr=0.01), autocast=torch.bfloat16)
    assert_learned(model, losses, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(run(data()[0]), model(data()[0]))


class TestDataParallel:
    """nn.DataParallel runs replicas of a model; these tests make one in the same way, without further devices."""

    @staticmethod
    def replica(model: nn.Module) -> tuple[Clustered, Tensor]:
        return clusterings(model)[1]._replicate_for_data_parallel(), model[4].parametrizations.weight.original

    def test_training_is_refused(self):
        replica, weight = self.replica(compressed())
        with pytest.raises(RuntimeError, match=r"DataParallel .* use DistributedDataParallel"):
            replica(weight)

    def test_evaluation_is_not(self):
        model = compressed().eval()
        replica, weight = self.replica(model)
        assert torch.equal(replica(weight), model[4].weight)
