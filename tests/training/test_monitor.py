"""`dkm.monitor`: what it records, that it leaves the training alone, and the file that it writes."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import train
from torch import nn

import dkm


def net(**options) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 15))
    dkm.compress_(model, "0:3/2, 2:2", **{"steps": 10, **options})
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Writer:
    def __init__(self):
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag, step] = value


class TestNumbers:
    def test_codes(self):
        """100, 60 and 40 weights of three values, and four centroids."""
        fc = nn.Linear(20, 10, bias=False)
        values = torch.tensor([-1.0] * 100 + [0.5] * 60 + [2.0] * 40)
        fc.weight.data.copy_(values.view(10, 20))
        dkm.cluster_weight(fc, bits=2, steps=10)
        numbers = dkm.monitor(fc).record(0)["tensors"]["weight"]
        entropy = -sum(p * math.log2(p) for p in (0.5, 0.3, 0.2))
        assert numbers["dead"] == 1
        assert numbers["entropy"] == pytest.approx(entropy)
        assert numbers["code_bytes"] == 50
        assert numbers["ideal_bytes"] == pytest.approx(200 * entropy / 8)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_gap_is_between_training_and_evaluation(self, dtype):
        model = net().to(dtype)
        soft, snapped = model[0].weight.double(), copy.deepcopy(model).eval()[0].weight.double()
        wanted = float((soft - snapped).detach().norm() / soft.detach().norm())
        gap = dkm.monitor(model).record(0)["tensors"]["0.weight"]["gap"]
        assert gap == pytest.approx(wanted, rel=1e-2 if dtype == torch.bfloat16 else 1e-4)
        assert gap > 0.01

    def test_after_an_optimizer_step_it_is_the_next_forward_passes(self):
        model = net()
        train(model, sgd(model), 2)
        tau, gap = (dkm.monitor(model).record(0)["tensors"]["0.weight"][name] for name in ("tau", "gap"))
        snapped = copy.deepcopy(model).eval()[0].weight
        soft, c = model[0].weight, model[0].parametrizations.weight[0]
        assert tau == pytest.approx(float(c.temperature(c.step)))
        assert gap == pytest.approx(float((soft - snapped).detach().norm() / soft.detach().norm()), rel=1e-4)

    def test_iterations_are_the_last_clusterings(self):
        model = net(eps=1.0)
        monitor = dkm.monitor(model, every=1)
        assert monitor.record(0)["tensors"]["0.weight"]["iterations"] == 0
        _ = model[0].weight
        assert monitor.record(1)["tensors"]["0.weight"]["iterations"] == 1  # at once within eps
        model = net(eps=0.0)
        _ = model[0].weight
        assert dkm.monitor(model).record(0)["tensors"]["0.weight"]["iterations"] == 5

    def test_changed_is_the_share_since_the_last_record(self):
        fc = nn.Linear(20, 10, bias=False)
        fc.weight.data.copy_(torch.tensor([-1.0, 1.0]).repeat(100).view(10, 20))
        dkm.cluster_weight(fc, bits=1, steps=10)
        monitor = dkm.monitor(fc, every=1)
        assert monitor.record(0)["tensors"]["weight"]["changed"] is None
        fc.parametrizations.weight.original.data[:2].neg_()
        assert monitor.record(1)["tensors"]["weight"]["changed"] == pytest.approx(0.2)
        assert monitor.record(2)["tensors"]["weight"]["changed"] == 0

    def test_codes_beyond_a_byte(self):
        """Codes of 9 bits: kept in 8 bits, all of these changes would be lost."""
        torch.manual_seed(0)
        fc = dkm.cluster_weight(nn.Linear(64, 64), bits=9, steps=10)
        c = fc.parametrizations.weight[0]
        monitor = dkm.monitor(fc, every=1)
        monitor.record(0)
        c.C = c.C.roll(256, 0)  # every code is 256 more or less than before
        assert monitor.record(1)["tensors"]["weight"]["changed"] == 1

    def test_total_weighs_tensors_by_their_size(self):
        record = dkm.monitor(net()).record(0)
        first, second = record["tensors"].values()
        assert list(record["tensors"]) == ["0.weight", "2.weight"]
        assert record["total"]["code_bytes"] == first["code_bytes"] + second["code_bytes"] == 240 * 3 // 8 + 75
        assert record["total"]["dead"] == first["dead"] + second["dead"]
        assert min(first["gap"], second["gap"]) < record["total"]["gap"] < max(first["gap"], second["gap"])

    @pytest.mark.parametrize("tau", [1e-3, "learn", dkm.temperature.cosine(2.0, 0.1)], ids=str)
    def test_every_kind_of_tau(self, tau):
        model = net(tau=tau)
        c = model[0].parametrizations.weight[0]
        assert dkm.monitor(model).record(0)["tensors"]["0.weight"]["tau"] == pytest.approx(
            float(torch.as_tensor(c.temperature(c.step)).detach())
        )

    def test_frozen_weight_has_no_gap(self):
        model = net()
        model[0].parametrizations.weight.original.requires_grad_(False)
        assert dkm.monitor(model).record(0)["tensors"]["0.weight"]["gap"] == 0

    def test_diverged(self, tmp_path: Path):
        model = net()
        model[0].parametrizations.weight.original.data.fill_(math.nan)
        record = dkm.monitor(model, jsonl=tmp_path / "m", writer=Writer()).record(0)
        assert record["tensors"]["0.weight"]["gap"] is None
        assert record["tensors"]["2.weight"]["gap"] > 0
        assert json.loads((tmp_path / "m").read_text()) == record


class TestLeavesTheTrainingAlone:
    @pytest.mark.parametrize("when", ["after the step", "before it"])
    def test_training_is_the_same(self, when):
        watched, twin = net(), net()
        monitor = dkm.monitor(watched, every=1)
        optimizers = sgd(watched), sgd(twin)
        for step in range(4):
            train(twin, optimizers[1], 1)
            optimizers[0].zero_grad()
            watched(torch.linspace(-1, 1, 48).reshape(2, 24)).square().mean().backward()
            if when == "before it":
                monitor.record(step)
            optimizers[0].step()
            if when == "after the step":
                monitor.record(step)
        assert watched.training
        for name, tensor in watched.state_dict().items():
            assert torch.equal(tensor, twin.state_dict()[name]), name

    def test_a_trained_model_can_be_copied_and_its_state_is_as_before(self):
        model = net()
        keys = model.state_dict().keys()
        train(model, sgd(model), 2)
        assert dkm.monitor(copy.deepcopy(model)).record(0) == dkm.monitor(model).record(0)
        assert model.state_dict().keys() == keys

    def test_iterations_under_compile(self):
        model = net(eps=0.0)
        torch.compile(model, fullgraph=True, backend="aot_eager")(torch.randn(2, 24))
        assert dkm.monitor(model).record(0)["tensors"]["0.weight"]["iterations"] == 5


class TestEvery:
    def test_only_multiples_are_recorded(self):
        monitor = dkm.monitor(net(), every=3)
        assert [step for step in range(8) if monitor.record(step) is not None] == [0, 3, 6]

    def test_the_others_do_not_even_look_at_the_model(self):
        monitor = dkm.monitor(net())
        monitor.model = None
        assert monitor.record(99) is None


class TestFile:
    def steps(self, path: Path) -> list[int]:
        return [json.loads(line)["step"] for line in path.read_text().splitlines()]

    def test_one_line_per_record(self, tmp_path: Path):
        path = tmp_path / "run" / "monitor.jsonl"
        monitor = dkm.monitor(net(), every=2, jsonl=path)
        records = [monitor.record(step) for step in range(5)]
        assert [json.loads(line) for line in path.read_text().splitlines()] == [r for r in records if r]

    @pytest.mark.parametrize("same_object", [True, False])
    def test_an_abandoned_run_is_dropped(self, tmp_path: Path, same_object):
        path, model = tmp_path / "monitor.jsonl", net()
        monitor = dkm.monitor(model, every=1, jsonl=path)
        for step in range(6):
            monitor.record(step)
        resumed = monitor if same_object else dkm.monitor(model, every=1, jsonl=path)
        resumed.record(3)
        assert self.steps(path) == [0, 1, 2, 3]
        resumed.record(4)
        resumed.record(4)
        assert self.steps(path) == [0, 1, 2, 3, 4]

    def test_a_later_step_drops_nothing(self, tmp_path: Path):
        path, model = tmp_path / "monitor.jsonl", net()
        for step in (0, 100, 300):
            dkm.monitor(model, jsonl=path).record(step)
        assert self.steps(path) == [0, 100, 300]

    def test_another_file_is_not_overwritten(self, tmp_path: Path):
        (tmp_path / "notes").write_text("my notes\n")
        with pytest.raises(ValueError, match=r"notes is not a JSON object"):
            dkm.monitor(net(), jsonl=tmp_path / "notes").record(0)
        assert (tmp_path / "notes").read_text() == "my notes\n"


def test_writer_gets_every_number():
    writer = Writer()
    monitor = dkm.monitor(net(), every=5, writer=writer)
    for step in range(6):
        record = monitor.record(step)
    for key, value in record["tensors"]["2.weight"].items():
        assert writer.scalars[f"dkm/2.weight/{key}", 5] == value
    assert writer.scalars["dkm/total/gap", 5] == record["total"]["gap"]
    assert ("dkm/2.weight/changed", 0) not in writer.scalars  # there is none yet


class TestErrors:
    @pytest.mark.parametrize("every", [0, -1, 1.5, None, True])
    def test_every(self, every):
        with pytest.raises(ValueError, match="every must be an integer"):
            dkm.monitor(net(), every=every)

    @pytest.mark.parametrize("step", [-1, 1.5, None, "1"])
    def test_step(self, step):
        with pytest.raises(ValueError, match="step must be an integer"):
            dkm.monitor(net()).record(step)

    def test_writer(self):
        with pytest.raises(TypeError, match="add_scalar"):
            dkm.monitor(net(), writer="runs")

    def test_nothing_to_watch(self):
        with pytest.raises(ValueError, match=r"no clustered tensor to watch: call dkm\.compress_"):
            dkm.monitor(nn.Linear(3, 3))
