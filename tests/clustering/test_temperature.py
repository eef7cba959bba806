"""What tau may be: schedules, numbers, and a parameter."""

import copy
import math
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from conftest import train
from torch import nn

import dkm
from dkm import Clustered
from dkm.clustering.temperature import AUTO, constant, cosine, geometric, linear, parse

SCHEDULES = [geometric(3.0, 0.05), linear(2.0, 0.5), cosine(2.0, 0.5), constant(0.7)]


def layer(tau, **options) -> nn.Linear:
    torch.manual_seed(1)
    return dkm.cluster_weight(nn.Linear(24, 20), bits=3, dim=2, tau=tau, **{"steps": 8, **options})


def clustered(fc: nn.Module) -> Clustered:
    return fc.parametrizations.weight[0]


class TestSchedules:
    @pytest.mark.parametrize(
        ("schedule", "wanted"),
        [
            (geometric(4.0, 0.25), [4.0, 2.0, 1.0, 0.5, 0.25]),
            (linear(4.0, 2.0), [4.0, 3.5, 3.0, 2.5, 2.0]),
            (cosine(4.0, 2.0), [4.0, 3 + 0.5**0.5, 3.0, 3 - 0.5**0.5, 2.0]),
            (constant(0.7), [0.7] * 5),
            (linear(1.0, 2.0), [1.0, 1.25, 1.5, 1.75, 2.0]),  # warming up is odd, and allowed
        ],
        ids=str,
    )
    def test_values(self, schedule, wanted):
        assert [float(schedule(torch.tensor(i / 4))) for i in range(5)] == pytest.approx(wanted)

    @pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
    def test_a_layer_follows_it_and_stays_at_the_end(self, schedule):
        fc = layer(schedule, steps=4)
        optimizer = torch.optim.SGD(fc.parameters(), lr=0.1)
        for step in range(6):
            train(fc, optimizer, 1)
            c = clustered(fc)
            wanted = float(c.unit) * float(schedule(torch.tensor(min(1, step / 4))))
            assert float(c.temperature(c.step)) == pytest.approx(wanted, rel=1e-5)

    def test_auto_is_one_of_them(self):
        assert geometric(2.0, 0.1) == AUTO
        fc, twin = layer("auto"), layer(geometric(2.0, 0.1))
        assert train(fc, torch.optim.SGD(fc.parameters(), lr=0.1), 4) == train(
            twin, torch.optim.SGD(twin.parameters(), lr=0.1), 4
        )

    def test_a_function_of_ones_own(self):
        fc = layer(lambda progress: torch.where(progress < 0.5, 2.0, 0.5))
        c = clustered(fc)
        assert float(c.temperature(torch.tensor(3)) / c.unit) == pytest.approx(2.0)
        assert float(c.temperature(torch.tensor(4)) / c.unit) == pytest.approx(0.5)

    @pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
    def test_can_be_sent_to_another_process(self, schedule):
        assert ForkingPickler.loads(bytes(ForkingPickler.dumps(schedule))) == schedule

    def test_float64_weight(self):
        torch.manual_seed(0)
        fc = dkm.cluster_weight(nn.Linear(24, 20).double(), bits=2, steps=4)
        tau = clustered(fc).temperature(torch.tensor(2))
        assert tau.dtype == torch.float64
        assert float(tau / clustered(fc).unit) == pytest.approx((2.0 * 0.1) ** 0.5)


class TestErrors:
    @pytest.mark.parametrize("make", [geometric, linear, cosine], ids=lambda make: make.__name__)
    @pytest.mark.parametrize("numbers", [(0, 1), (2, 0), (2, -1), (float("nan"), 1), (2, float("inf")), ("2", 1)])
    def test_multiples_are_positive(self, make, numbers):
        with pytest.raises(ValueError, match=rf"{make.__name__}\(hot=.*positive finite"):
            make(*numbers)

    def test_constant_is_positive(self):
        with pytest.raises(ValueError, match=r"constant\(multiple=0\)"):
            constant(0)

    @pytest.mark.parametrize("tau", [AUTO, lambda progress: 1 - progress / 2], ids=["ours", "own"])
    def test_a_schedule_needs_steps(self, tau):
        with pytest.raises(ValueError, match=r"a schedule of tau anneals.*steps=None"):
            layer(tau, steps=None)

    @pytest.mark.parametrize(
        "value",
        [0.0, -1.0, float("nan"), float("inf"), None, "hot", torch.ones(2), torch.tensor(0.0)],
        ids=lambda value: repr(value).replace("\n", ""),
    )
    def test_a_schedule_that_gives_no_temperature(self, value):
        with pytest.raises(ValueError, match=r"the schedule .* at progress 0\.0: it must give a positive finite"):
            layer(lambda progress: value)

    def test_a_schedule_that_reaches_zero(self):
        with pytest.raises(ValueError, match=r"at progress 1\.0"):
            layer(lambda progress: 1 - progress)

    def test_a_tensor_is_no_tau_of_a_layer(self):
        with pytest.raises(ValueError, match="tau must be"):
            layer(torch.tensor(1e-3))

    def test_an_error_leaves_the_model_untouched(self):
        model = nn.Sequential(nn.Linear(24, 20), nn.Linear(20, 24))
        with pytest.raises(ValueError, match='tau must be "auto", "learn"'):
            dkm.compress_(model, "*:2", tau="foo", steps=4)
        assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


class TestParse:
    @pytest.mark.parametrize(
        ("text", "wanted"),
        [
            ("auto", "auto"),
            ("learn", "learn"),
            ("1e-4", 1e-4),
            ("geometric:3:0.05", geometric(3, 0.05)),
            ("linear:2:1", linear(2, 1)),
            ("cosine:2:0.1", cosine(2, 0.1)),
            ("constant:1.5", constant(1.5)),
        ],
    )
    def test_accepted(self, text, wanted):
        assert parse(text) == wanted

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "foo",
            "0",
            "-1",
            "nan",
            "inf",
            "geometric",
            "geometric:3",
            "geometric:3:x",
            "geometric:3:0",
            "constant:1:2",
        ],
    )
    def test_rejected(self, text):
        with pytest.raises(ValueError, match=rf"geometric:HOT:COLD.*got '{text}'"):
            parse(text)


class TestLearn:
    def test_starts_hot(self):
        c = clustered(layer("learn", steps=None))
        assert c.temperature(c.step).item() == pytest.approx(2.0 * c.unit.item())

    @pytest.mark.parametrize("gradient", ["unrolled", "last"])
    @pytest.mark.parametrize("impl", ["reference", "auto"])
    def test_gradient_is_the_derivative(self, impl, gradient):
        torch.manual_seed(0)
        fc = nn.Linear(24, 20).double()
        dkm.cluster_weight(fc, bits=3, dim=2, tau="learn", impl=impl, gradient=gradient, max_iter=1, eps=0.0)
        c, G = clustered(fc), torch.randn(20, 24, dtype=torch.float64)
        (fc.weight * G).sum().backward()
        values = []
        for shift in (1e-5, -2e-5):
            c.log_multiple.data += shift
            values.append((fc.weight * G).sum().item())
        assert float(c.log_multiple.grad) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)
        assert float(c.log_multiple.grad) != 0

    @pytest.mark.parametrize("impl", ["reference", "auto"])
    def test_the_optimizer_trains_it(self, impl):
        """With the weights held fixed, training tau finds the value that the target was made with."""
        fc = layer("learn", impl=impl)
        log_multiple = clustered(fc).log_multiple
        log_multiple.data.fill_(0.3)
        target = fc.weight.detach()
        log_multiple.data.fill_(math.log(2.0))
        optimizer = torch.optim.Adam([log_multiple], lr=0.05)
        for _ in range(60):
            optimizer.zero_grad()
            (fc.weight - target).square().mean().backward()
            optimizer.step()
        assert log_multiple.item() == pytest.approx(0.3, abs=0.01)

    def test_it_is_no_weight_of_the_model(self, tmp_path: Path):
        learn, auto = layer("learn"), layer("auto")
        assert [row.name for row in dkm.size(learn).rows] == ["bias", "weight"]
        assert dkm.save(learn, tmp_path / "learn.dkm") == dkm.save(auto, tmp_path / "auto.dkm")
        assert dkm.load(tmp_path / "learn.dkm").keys() == {"bias", "weight"}
        assert [name for name, _ in dkm.snap_(learn).named_parameters()] == ["bias", "weight"]

    def test_resumes_exactly(self):
        fc = layer("learn")
        optimizer = torch.optim.Adam(fc.parameters(), lr=0.01)
        train(fc, optimizer, 3)
        twin = layer("learn", init="random")
        twin_optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
        twin.load_state_dict(fc.state_dict())
        twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert train(fc, optimizer, 3) == train(twin, twin_optimizer, 3)
        assert torch.equal(clustered(fc).log_multiple, clustered(twin).log_multiple)
        assert clustered(fc).log_multiple.item() != pytest.approx(math.log(2.0), abs=1e-4)

    def test_tied_weights_share_it(self):
        model = nn.ModuleDict({"emb": nn.Embedding(50, 16), "out": nn.Linear(16, 50, bias=False)})
        model["out"].weight = model["emb"].weight
        dkm.compress_(model, "*:2", tau="learn")
        assert len(list(model.parameters())) == 2

    def test_half_model_keeps_it_in_float32(self):
        assert clustered(layer("learn").bfloat16()).log_multiple.dtype == torch.float32

    def test_frozen_weight_freezes_it(self):
        fc = nn.Linear(24, 20).requires_grad_(False)
        dkm.cluster_weight(fc, bits=2, tau="learn")
        assert not clustered(fc).log_multiple.requires_grad


@pytest.mark.parametrize("tau", [*SCHEDULES, "learn", 1e-3], ids=str)
def test_compiled_training_equals_eager_training(tau):
    """The compiled graph has no break, whatever tau is."""

    def losses(compiled: bool) -> list[float]:
        fc = layer(tau, eps=0.0)  # all iterations: whether the last movement is below eps would be a matter of rounding
        model = torch.compile(fc, fullgraph=True, backend="aot_eager") if compiled else fc
        return train(model, torch.optim.SGD(fc.parameters(), lr=0.1), 3)

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)
