"""The centroids advance when the weight has changed; nothing else changes any state."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import train
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import dkm
from dkm import Clustered, cluster_weight
from dkm.clustering.kernels.reference import distance
from dkm.clustering.temperature import constant
from dkm.modelling.methods.dkm import DKMClustered


def layer(bits: int = 3, dim: int = 2, **options) -> nn.Linear:
    torch.manual_seed(1)
    return dkm.cluster_weight(nn.Linear(24, 20), bits=bits, dim=dim, **{"steps": 10, **options})


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def clusterings(model: nn.Module) -> list[Clustered]:
    return [module for module in model.modules() if isinstance(module, Clustered)]


class TestAdvance:
    """`C` moves on when, and only when, the weight has changed."""

    def test_reading_the_weight_changes_nothing(self):
        fc = layer()
        first = fc.weight
        before = state(fc)
        assert fc.weight.shape == (20, 24)
        assert torch.equal(fc.weight, first)
        assert_same(state(fc), before)

    def test_no_grad_forward_changes_nothing(self):
        fc = layer()
        wanted = fc.weight
        with torch.no_grad():
            fc(torch.randn(3, 24))
        assert torch.equal(fc.weight, wanted)
        assert int(clusterings(fc)[0].step) == 0

    def test_each_optimizer_step_advances_once(self):
        fc = layer()
        (clustered,) = clusterings(fc)
        optimizer = torch.optim.SGD(fc.parameters(), lr=0.1)
        newest = []
        for step in range(4):
            x = torch.randn(2, 24)
            for _ in range(3):  # gradient accumulation
                fc(x).square().mean().backward()
            assert int(clustered.step) == step
            if newest:
                assert torch.equal(clustered.start, newest[-1])
            newest.append(clustered.C.clone())
            optimizer.step()
            optimizer.zero_grad()
        assert not torch.equal(newest[0], newest[-1])

    def test_the_graph_of_an_earlier_pass_stays_whole(self):
        """A second forward pass must not corrupt the graph of the first."""
        fc = layer()
        x = torch.randn(2, 24)
        wanted = torch.autograd.grad(fc(x).square().mean(), fc.parametrizations.weight.original)[0]
        loss = fc(x).square().mean()
        fc(torch.randn(5, 24))
        got = torch.autograd.grad(loss, fc.parametrizations.weight.original)[0]
        assert torch.equal(got, wanted)

    def test_gradient_accumulation_equals_one_batch(self):
        x = torch.randn(8, 24)
        whole, parts = layer(), layer()
        (whole(x).sum() / 8).backward()
        for piece in x.split(2):
            (parts(piece).sum() / 8).backward()
        torch.testing.assert_close(
            parts.parametrizations.weight.original.grad, whole.parametrizations.weight.original.grad
        )

    def test_zero_learning_rate_does_not_advance(self):
        fc = layer()
        train(fc, torch.optim.SGD(fc.parameters(), lr=0.0), 3)
        assert int(clusterings(fc)[0].step) == 0

    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
            lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
            lambda p: torch.optim.RMSprop(p, lr=0.01),
        ],
        ids=["sgd", "foreach", "fused", "rmsprop"],
    )
    def test_any_optimizer_is_noticed(self, make):
        fc = layer()
        train(fc, make(fc.parameters()), 4)
        fc(torch.randn(1, 24))
        assert int(clusterings(fc)[0].step) == 4

    def test_writing_through_data_is_noticed(self):
        fc = layer()
        _ = fc.weight
        fc.parametrizations.weight.original.data.add_(0.01)
        _ = fc.weight
        assert int(clusterings(fc)[0].step) == 1


class TestCheckpointing:
    """Activation checkpointing runs the forward pass again, in the middle of the backward pass."""

    @pytest.mark.parametrize("eps", [0.0, 1e-2], ids=["all-iterations", "early-convergence"])
    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_equals_the_unchecked_gradient(self, eps, use_reentrant):
        def gradients(checked: bool) -> list[torch.Tensor]:
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
            dkm.compress_(model, "0:3/2, 2:2", tau=1e-3, eps=eps)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            x, result = torch.randn(4, 24, requires_grad=True), []
            for _ in range(3):
                optimizer.zero_grad()
                y = checkpoint(model, x, use_reentrant=use_reentrant) if checked else model(x)
                y.square().mean().backward()
                result += [p.grad.clone() for p in model.parameters()]
                optimizer.step()
            return result + [c.C for c in clusterings(model)] + [c.step for c in clusterings(model)]

        for got, wanted in zip(gradients(True), gradients(False), strict=True):
            torch.testing.assert_close(got, wanted)


class TestModes:
    def test_training_has_a_gradient_and_evaluation_is_snapped(self):
        fc = layer()
        fc(torch.randn(2, 24)).sum().backward()
        assert fc.parametrizations.weight.original.grad.abs().sum() > 0
        fc.eval()
        C, codes = clusterings(fc)[0].codes(fc.parametrizations.weight.original)
        assert C.dtype == torch.float16
        assert C.shape == (8, 2)
        assert torch.equal(fc.weight.reshape(-1, 2), C.float()[codes])

    def test_evaluation_follows_the_current_weight(self):
        fc = layer().eval()
        before = fc.weight
        fc.parametrizations.weight.original.data.neg_()
        assert not torch.equal(fc.weight, before)

    def test_evaluation_changes_no_state(self):
        fc = layer()
        train(fc, torch.optim.SGD(fc.parameters(), lr=0.1), 2)
        before = state(fc)
        fc.eval()(torch.randn(2, 24))
        assert_same(state(fc), before)

    def test_frozen_weight_is_what_ships_also_in_training(self):
        fc = layer()
        fc.parametrizations.weight.original.requires_grad_(False)
        assert torch.equal(fc.weight, copy.deepcopy(fc).eval().weight)
        fc(torch.randn(2, 24)).sum().backward()
        assert fc.bias.grad is not None

    def test_half_model_keeps_centroids_in_float32(self):
        fc = layer()
        C = clusterings(fc)[0].C.clone()
        fc.bfloat16()
        assert fc.weight.dtype == torch.bfloat16
        assert clusterings(fc)[0].C.dtype == torch.float32
        assert torch.equal(clusterings(layer().half())[0].C, C)

    def test_assigning_sets_the_weight_underneath(self):
        fc = layer()
        fc.weight = torch.full((20, 24), 0.5)
        assert torch.equal(fc.parametrizations.weight.original, torch.full((20, 24), 0.5))


class TestTemperature:
    def test_auto_anneals_over_the_steps_by_itself(self):
        fc = layer(steps=4)
        (clustered,) = clusterings(fc)
        optimizer = torch.optim.SGD(fc.parameters(), lr=0.1)
        taus = []
        for _ in range(7):
            train(fc, optimizer, 1)
            taus.append(float(clustered.temperature(clustered.step) / clustered.unit))
        assert taus[0] == pytest.approx(2.0)
        assert taus[2] == pytest.approx((2.0 * 0.1) ** 0.5)
        assert taus[4:] == pytest.approx([0.1] * 3)

    def test_unit_is_the_squared_error_per_weight(self):
        fc = layer(bits=2, dim=3)
        weight = fc.parametrizations.weight.original
        C = clusterings(fc)[0].C
        nearest = torch.cdist(weight.detach().reshape(-1, 3), C).amin(1)
        assert float(clusterings(fc)[0].unit) == pytest.approx(float(nearest.square().mean() / 3), rel=1e-4)

    def test_fixed_tau_stays(self):
        fc = layer(tau=1e-3)
        assert clusterings(fc)[0].temperature(torch.tensor(5)) == 1e-3


def test_compiled_training_equals_eager_training():
    """The compiled graph has no break, the losses are the same, and the centroids advance as often."""

    def losses(compiled: bool) -> tuple[list[float], int]:
        fc = layer(eps=0.0)  # all iterations: whether the last movement is below eps would be a matter of rounding
        model = torch.compile(fc, fullgraph=True, backend="aot_eager") if compiled else fc
        return train(model, torch.optim.SGD(fc.parameters(), lr=0.1), 4), int(clusterings(fc)[0].step)

    wanted, steps = losses(False)
    got, compiled_steps = losses(True)
    assert got == pytest.approx(wanted, rel=1e-5)
    assert compiled_steps == steps == 3


class TestDeepcopy:
    @pytest.mark.parametrize("trained", [False, True])
    def test_snapping_a_copy_leaves_the_original_alone(self, trained):
        fc = layer()
        if trained:
            train(fc, torch.optim.SGD(fc.parameters(), lr=0.1), 2)
        fc.eval()
        wanted, before = fc.weight, state(fc)
        twin = dkm.snap_(copy.deepcopy(fc), dtype=torch.float32)
        assert type(twin) is nn.Linear
        assert torch.equal(twin.weight, wanted)
        assert torch.equal(fc.weight, wanted)
        assert_same(state(fc), before)
        assert parametrize.is_parametrized(fc)

    def test_a_copy_trains_to_the_same_state(self):
        fc = layer()
        train(fc, torch.optim.SGD(fc.parameters(), lr=0.1), 2)
        twin = copy.deepcopy(fc)
        for model in (fc, twin):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
        assert_same(state(fc), state(twin))


class TestMultiheadAttention:
    def test_projections_are_clustered_and_read_consistently(self):
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(64, 2, batch_first=True)
        plain = copy.deepcopy(attention)
        plan = dkm.compress_(attention, "in_proj_weight:4, out_proj:4", tau=1e-4)
        assert {row.name for row in plan.rows if row.bits} == {"in_proj_weight", "out_proj.weight"}
        x = torch.randn(2, 5, 64)
        y, _ = attention(x, x, x)
        plain.in_proj_weight.data.copy_(attention.in_proj_weight.detach())
        plain.out_proj.weight.data.copy_(attention.out_proj.weight.detach())
        torch.testing.assert_close(y, plain(x, x, x)[0])
        assert [int(c.step) for c in clusterings(attention)] == [0, 0]
        y.sum().backward()
        assert attention.parametrizations.in_proj_weight.original.grad.abs().sum() > 0
        attention.eval()  # its fast path reads the weights in another way
        with torch.no_grad():
            assert attention(x, x, x)[0].isfinite().all()


RESUME = """
import sys, torch, safetensors.torch, dkm
from torch import nn
def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 40, 3), nn.BatchNorm1d(40), nn.Flatten(), nn.Linear(240, 60), nn.Linear(60, 4))
    dkm.compress_(model, "0:3/2, 3:4/4, 4:2", steps=8)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)
def train(model, optimizer, first, last):
    for step in range(first, last):
        x = torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
"""


class TestResume:
    """A fresh process continues bit-exactly from a checkpoint."""

    @pytest.mark.parametrize("how", ["torch", "safetensors"])
    def test_bit_exact(self, tmp_path: Path, how):
        scope: dict = {}
        exec(RESUME, scope)
        model, optimizer = scope["build"]()
        scope["train"](model, optimizer, 0, 3)
        checkpoint = {"optimizer": optimizer.state_dict()}
        if how == "torch":
            checkpoint["model"] = model.state_dict()
        else:
            safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
        torch.save(checkpoint, tmp_path / "checkpoint.pt")
        scope["train"](model, optimizer, 3, 7)

        script = RESUME + (
            "model, optimizer = build()\n"
            "torch.manual_seed(99)\n"
            "saved = torch.load('checkpoint.pt', weights_only=True)\n"
            "model.load_state_dict(saved['model'] if 'model' in saved else "
            "safetensors.torch.load_file('model.safetensors'))\n"
            "optimizer.load_state_dict(saved['optimizer'])\n"
            "train(model, optimizer, 3, 7)\n"
            "torch.save(model.state_dict(), 'resumed.pt')\n"
            "dkm.save(model, 'resumed.dkm')\n"
        )
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
        assert_same(torch.load(tmp_path / "resumed.pt", weights_only=True), state(model))
        dkm.save(model, tmp_path / "whole.dkm")
        assert (tmp_path / "whole.dkm").read_bytes() == (tmp_path / "resumed.dkm").read_bytes()

    def test_between_forward_and_step_too(self):
        """A checkpoint in the middle of gradient accumulation must not advance the centroids."""
        fc = layer()
        fc(torch.randn(2, 24)).sum().backward()
        twin = layer()
        twin.load_state_dict(fc.state_dict())
        wanted = fc.weight
        assert torch.equal(twin.weight, wanted)
        assert int(clusterings(twin)[0].step) == int(clusterings(fc)[0].step) == 0


def test_a_gradient_in_evaluation_mode_goes_straight_through():
    layer = cluster_weight(nn.Linear(6, 5), bits=2, steps=10).eval()
    x = torch.randn(3, 6)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.parametrizations.weight.original.grad, x.sum(0).expand(5, 6))


def test_the_unit_of_the_plain_distance_is_a_distance():
    """Attention at the same multiple of the unit is about as soft with both metrics."""
    W = torch.randn(4000, 2) * 0.05
    entropies = []
    for metric in ("sqeuclidean", "euclidean"):
        clustered = DKMClustered(W, bits=4, dim=2, metric=metric, tau=constant(2.0), steps=1)
        tau = clustered.temperature(clustered.step)
        A = torch.softmax(-distance(W, clustered.C, metric) / tau, 1)
        entropies.append(float(-(A * A.clamp(min=1e-30).log()).sum(1).mean()))
    assert 0.5 < entropies[1] / entropies[0] < 2
