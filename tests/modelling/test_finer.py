"""Clustered weights with a scale per row and a codebook per group."""

import copy

import pytest
import torch
from group_cases import literal
from method_helpers import within
from torch import nn

import dkm
from dkm.clustering.groups import Group
from dkm.clustering.options import ClusterOptions
from dkm.modelling.clustered import Clustered
from dkm.modelling.methods import METHODS
from dkm.modelling.methods.dkm import DKMClustered

SPECS = [
    "2 scaled",
    "3 e4m3",
    "2 per row",
    "2 per 8 rows",
    "3 per 8x16",
    "3/2 scaled per 7x10 e4m3",
    "4/4 per 256",
    "2/3 scaled per 50",
]


def build(dtype=torch.float32):
    """Rows of different sizes, as language models have them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 20))
    with torch.no_grad():
        model[0].weight *= torch.linspace(0.1, 3, 33)[:, None]
    return model.to(dtype)


def compressed(spec, dtype=torch.float32, **options):
    model = build(dtype)
    dkm.compress_(model, f"0:{spec}, 2:{spec}", **{"steps": 6, **options})
    return model


def train(model, steps, optimizer=None):
    dtype = next(model.parameters()).dtype
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    x = torch.randn(8, 40).to(dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x).square().mean() + dkm.method_loss(model)).backward()
        optimizer.step()
    return optimizer


def clusterings(model):
    return [module for module in model.modules() if isinstance(module, Clustered)]


class TestFiles:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("spec", SPECS)
    def test_evaluation_snapping_and_the_file_agree(self, spec, dtype, tmp_path):
        model = compressed(spec, dtype)
        train(model, 2)
        model.eval()
        evaluated = {name: model[int(name[0])].weight.clone() for name in ("0.weight", "2.weight")}
        written = dkm.save(model, tmp_path / "model.dkm")
        loaded = dkm.load(tmp_path / "model.dkm", build(dtype)).state_dict()
        assert dkm.size(model).file_bytes == written == (tmp_path / "model.dkm").stat().st_size
        snapped = dkm.snap_(copy.deepcopy(model)).state_dict()
        for name, value in evaluated.items():
            assert value.dtype == dtype
            assert torch.equal(value, loaded[name])
            assert torch.equal(value, snapped[name])

    @pytest.mark.parametrize("spec", SPECS)
    def test_few_values_per_group(self, spec):
        """Divided by its scale, a row has at most as many values as its codebooks have."""
        model = compressed(spec)
        clustered = clusterings(model)[0]
        model.eval()
        V = clustered.grouping.split(clustered.scaled(model[0].weight.detach()))
        for group, counts in zip(V, clustered.grouping.counted(), strict=True):
            vectors = group[counts].round(decimals=4)  # the product with a scale is rounded, and so is the quotient
            whole = vectors[: len(vectors) - 1] if clustered.dim > 1 else vectors  # the last one may be filled up
            assert len(whole.unique(dim=0)) <= 2**clustered.bits + (clustered.dim > 1) * clustered.grouping.tile_rows

    def test_size_counts_everything(self):
        plan = dkm.size(compressed("2 scaled per 8x16"))
        row = plan["0.weight"]
        groups = 5 * 3  # 33 rows of 40 columns
        assert row.label == "2/1 scaled per 8x16"
        assert row.stored_bits == 33 * 40 * 2 + groups * 4 * 16 + 33 * 16


class TestTraining:
    @pytest.mark.parametrize("spec", ["2 scaled", "2/2 scaled", "3 per 8x16", "2/2 scaled per 3x10", "2/3 per 50"])
    def test_exact_in_float64(self, spec):
        """W~ and the gradient against the definition: divide, cluster each group literally, multiply."""
        model = compressed(spec, torch.float64)
        module, clustered = model[0], clusterings(model)[0]
        weight = module.parametrizations.weight.original
        G = torch.randn_like(weight)
        tau = torch.as_tensor(clustered.temperature(clustered.step)).expand(clustered.grouping.count)
        start = clustered.C.clone().view(clustered.grouping.count, -1, clustered.dim)
        scales = 1.0 if clustered.scales is None else clustered.scales[:, None].double()
        options = ClusterOptions(eps=clustered.loop.eps, max_iter=clustered.loop.max_iter)
        W = weight.detach().clone().requires_grad_()
        wanted = literal(W / scales, start, tau, clustered.grouping, options)[0] * scales
        got = module.weight
        torch.testing.assert_close(got, wanted)
        (dgot,), (dwanted,) = torch.autograd.grad(got, weight, G), torch.autograd.grad(wanted, W, G)
        torch.testing.assert_close(dgot, dwanted)

    @pytest.mark.parametrize("spec", SPECS)
    def test_a_checkpoint_continues_bit_for_bit(self, spec):
        whole = compressed(spec)
        train(whole, 3)
        first = compressed(spec)
        torch.manual_seed(0)
        resumed = compressed(spec)
        optimizer = train(first, 1)
        state = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
        resumed.load_state_dict(state[0])
        again = torch.optim.SGD(resumed.parameters(), lr=0.05, momentum=0.9)
        again.load_state_dict(state[1])
        train(resumed, 2, again)
        for name, value in whole.state_dict().items():
            assert torch.equal(value, resumed.state_dict()[name]), name

    def test_groups_have_temperatures_of_their_own(self):
        clustered = clusterings(compressed("2 per row"))[0]
        tau = clustered.temperature(clustered.step)
        assert tau.shape == clustered.unit.shape == (33,)
        # the rows differ in size 30 times, and their squares 900 times
        assert float(tau.max() / tau.min()) > 100

    def test_a_learned_temperature(self):
        model = compressed("2 per row", tau="learn", steps=None)
        train(model, 2)
        for clustered in clusterings(model):
            assert float(clustered.log_multiple.grad.abs()) > 0

    def test_compiled(self):
        torch._dynamo.reset()
        model, x = compressed("2 scaled per 8x16"), torch.randn(4, 40)
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), model(x))

    def test_training_helps(self):
        """The loss with snapped weights falls: k-means alone is not what is trained."""
        torch.manual_seed(0)
        x = torch.randn(64, 40)
        target = build()(x).detach()
        model = compressed("2 scaled per 11 rows", steps=60)
        loss = [float((model.eval()(x) - target).detach().square().mean())]
        optimizer = torch.optim.Adam(model.train().parameters(), lr=3e-3)
        for _ in range(60):
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            optimizer.step()
        loss.append(float((model.eval()(x) - target).detach().square().mean()))
        assert loss[1] < loss[0] / 2

    def test_the_monitor_counts_codes_of_all_groups(self):
        model = compressed("3 per 8x16")
        train(model, 1)
        record = dkm.monitor(model).record(0)
        numbers = record["tensors"]["0.weight"]
        assert numbers["code_bytes"] == 33 * 40 * 3 // 8
        assert 0 < numbers["entropy"] <= 3
        assert numbers["dead"] < 15 * 8


class TestScale:
    @pytest.mark.parametrize("exponent", [-30, -12, -6, 0, 6, 30])
    @pytest.mark.parametrize("spec", ["2 scaled", "3 per 8x16", "3 e4m3", "2/2 scaled per 8 rows e4m3"])
    def test_the_scale_of_the_weights_does_not_matter(self, spec, exponent):
        """Times a power of ten, the snapped weight is the same times it, up to the rounding of 16 or 8 bits."""
        results = []
        for factor in (1.0, 10.0**exponent):
            model = build(torch.float64)
            with torch.no_grad():
                model[0].weight *= factor
            dkm.compress_(model, f"0:{spec}", steps=3, eps=0.0)  # which is absolute, as in the paper
            model.train()
            soft = model[0].weight.detach() / factor
            results.append((soft, model.eval()[0].weight.detach() / factor))
        spread = float(results[0][0].square().mean().sqrt())
        # A centroid of E4M3 is rounded by 2^-4 of it, one of 16 bits by 2^-11.  Another scale, another rounding,
        # and a few vectors have another nearest centroid then.
        limit = 2**-2 if "e4m3" in spec else 2**-9
        for one, other in zip(*results, strict=True):
            assert float((one - other).square().mean().sqrt()) < limit * spread

    def test_rows_of_zeros(self):
        model = build()
        with torch.no_grad():
            model[0].weight[:5] = 0
        dkm.compress_(model, "0:2 scaled", steps=3)
        assert model[0].weight.isfinite().all()
        assert clusterings(model)[0].scales[:5].tolist() == [1.0] * 5

    @pytest.mark.parametrize("spec", ["2 scaled", "2/3 per 50", "3/2 scaled per 7x10 e4m3"])
    def test_a_diverged_weight_shows(self, spec):
        model = compressed(spec).eval()
        with torch.no_grad():
            model[0].parametrizations.weight.original[7, 3] = torch.nan
        missing = model[0].weight.isnan()
        assert missing[7, 3]
        assert int(missing.sum()) <= clusterings(model)[0].dim


class TestMethods:
    @pytest.mark.parametrize("method", METHODS)
    def test_every_method_takes_scales(self, method, tmp_path):
        model = build()
        dkm.compress_(model, within(method, "0:2 scaled, 2:3/2 scaled e4m3"), method=method, steps=4)
        dkm.calibrate_(model, [torch.randn(64, model[0].in_features)])
        train(model, 2)
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        model.eval()
        dkm.save(model, tmp_path / "model.dkm")
        loaded = dkm.load(tmp_path / "model.dkm", build())
        assert all(torch.equal(loaded[i].weight, model[i].weight) for i in (0, 2))

    @pytest.mark.parametrize("method", [name for name in METHODS if name != "dkm"])
    def test_others_have_one_codebook_per_tensor(self, method):
        model, before = build(), build().state_dict()
        with pytest.raises(ValueError, match=f'method="{method}" has one codebook per tensor: leave out "per row"'):
            dkm.compress_(model, "0:2 per row", method=method, steps=4)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_absurd_groups(self):
        with pytest.raises(ValueError, match="choose larger groups"):
            DKMClustered(torch.randn(4096, 1024), 8, group=Group(None, 4), steps=3)

    def test_print(self):
        assert "2/1 scaled per 8x16, k=4 x 15" in repr(compressed("2 scaled per 8x16"))
