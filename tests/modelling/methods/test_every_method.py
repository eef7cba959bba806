"""What all methods share: training, files, resuming, precision, and the wrappers of PyTorch."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from method_helpers import OTHERS, PLAN, backward, make, make_weight, network, within
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dkm
from dkm.modelling.methods import METHODS, option_names


def compressed(method: str, **options) -> nn.Sequential:
    model = network()
    dkm.compress_(model, within(method, PLAN), method=method, steps=30, **options)
    return dkm.calibrate_(model, [batch()[0]])


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(64, 12, generator=generator)
    return x, (x[:, :5] * 2 + x[:, 5:10]).argmax(1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    x, y = batch()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model.train()(x), y) + dkm.method_loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_trains_and_the_file_holds_what_was_evaluated(method: str, optimizer: str, tmp_path: Path):
    model = compressed(method)
    x, y = batch()
    before = F.cross_entropy(model.eval()(x), y).item()
    train(model, OPTIMIZERS[optimizer](model.parameters()), 40)
    dkm.recalibrate_(model, [x])
    evaluated = model.eval()(x)
    assert F.cross_entropy(evaluated, y).item() < 0.5 * before
    for i in (0, 3):
        spec = model[i].parametrizations.weight[0].spec
        assert len(model[i].weight.reshape(-1, spec.dim).unique(dim=0)) <= 2**spec.bits
    dkm.save(model, tmp_path / "model.dkm", dtype=torch.float32)
    loaded = dkm.load(tmp_path / "model.dkm", into=network()).eval()
    torch.testing.assert_close(loaded(x), evaluated)
    assert dkm.size(model).megabytes == dkm.plan(network(), within(method, PLAN)).megabytes
    dkm.snap_(model, dtype=torch.float32)
    assert all(torch.equal(model[i].weight, loaded[i].weight) for i in (0, 3, 4))
    torch.testing.assert_close(model.eval()(x), evaluated)


@pytest.mark.parametrize("method", OTHERS)
def test_reading_again_changes_nothing(method: str):
    model = compressed(method)
    train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    first = model[3].weight
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert torch.equal(model[3].weight, first)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("method", OTHERS)
def test_activation_checkpointing_gives_the_same_gradient(method: str):
    gradients = []
    for run in (lambda model, x: model(x), lambda model, x: checkpoint(model, x, use_reentrant=False)):
        model, x = compressed(method), batch()[0]
        train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
        model.zero_grad()
        run(model[2:], model[:2](x)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for checked, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(checked, plain)


@pytest.mark.parametrize("method", OTHERS)
def test_resuming_is_exact(method: str):
    model = compressed(method)
    train(model, optimizer := torch.optim.SGD(model.parameters(), 0.1), 3)
    other = network()
    with torch.no_grad():
        other[0].weight.normal_()  # a model that was trained elsewhere
        other[3].weight.normal_()
    elsewhere = dict(init="random") if "init" in option_names(METHODS[method]) else {}
    # without batches: the checkpoint has what followed from them
    dkm.compress_(other, within(method, PLAN), method=method, steps=30, seed=5, **elsewhere)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert train(other, torch.optim.SGD(other.parameters(), 0.1), 3) == train(model, optimizer, 3)


@pytest.mark.parametrize("method", OTHERS)
def test_the_monitor_watches(method: str):
    model = compressed(method)
    record = dkm.monitor(model).record(0)
    assert (record["tensors"]["0.weight"]["tau"] is None) == (method != "gumbel")
    assert 0 <= record["total"]["gap"] < 1


@pytest.mark.parametrize("method", OTHERS)
def test_frozen_weights_are_snapped(method: str):
    model = network()
    model[0].requires_grad_(False)
    dkm.compress_(model, within(method, PLAN), method=method, steps=30)
    dkm.calibrate_(model, [batch()[0]])
    assert len(model.train()[0].weight.unique()) <= 8


@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits(method: str, dtype: torch.dtype):
    weight = make_weight(dtype)
    clustered = make(method, weight)
    W_tilde = clustered(weight)
    assert W_tilde.dtype == dtype
    assert clustered.C.dtype == torch.float32
    assert backward(W_tilde, weight).isfinite().all()


@pytest.mark.parametrize("method", OTHERS)
def test_autocast_does_not_touch_the_clustering(method: str):
    weight = make_weight(torch.float32)
    plain, mixed = (make(method, weight) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        W_tilde = mixed(weight)
    assert torch.equal(W_tilde, plain(weight))


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_fully_shard_is_refused():
    model = compressed("hard")
    with pytest.raises(NotImplementedError, match='method="hard" cannot be sharded'):
        fully_shard(model)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("method", OTHERS)
def test_data_parallel(method: str):
    plain, parallel = compressed(method), compressed(method)
    wrapped = nn.parallel.DistributedDataParallel(parallel)
    losses = [train(model, torch.optim.SGD(model.parameters(), 0.1), 3) for model in (plain, wrapped)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("method", OTHERS)
def test_it_compiles_without_a_break(method: str):
    plain, other = network(), network()
    for model in (plain, other):
        dkm.compress_(model, within(method, "0:3"), method=method, steps=30)
        dkm.calibrate_(model, [batch()[0]])
    whole = torch.compile(other, backend="aot_eager", fullgraph=True)
    losses = [train(model, torch.optim.SGD(model.parameters(), 0.1), 3) for model in (plain, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
