"""GOBO by its definition, and outliers on all ways of a model."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from method_helpers import close, make_gradient
from torch import Tensor, nn
from torch.nn import functional as F

import dkm
from dkm.modelling.methods.gobo import GOBO, best_bins, equal_bins, improved
from dkm.modelling.packed_tensor import packed_tensors


def heavy(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    """Weights of which a few are far from all others."""
    generator = torch.Generator().manual_seed(3)
    weight = 0.04 * torch.randn(shape, generator=generator, dtype=torch.float64)
    weight.view(-1)[::97] *= 12
    return nn.Parameter(weight.to(dtype))


def make(weight: nn.Parameter, bits: int = 3, **options) -> GOBO:
    return GOBO(weight, bits, **options)


@pytest.mark.parametrize("threshold", [-4.0, -1.0, 0.5])
def test_outliers_are_those_of_the_definition(threshold: float):
    weight = heavy(30, 40)
    w = weight.detach().view(-1).tolist()
    mean = math.fsum(w) / len(w)
    variance = math.fsum((x - mean) ** 2 for x in w) / len(w)
    density = [math.exp(-((x - mean) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance) for x in w]
    wanted = [i for i, p in enumerate(density) if p < math.exp(threshold)]
    found = make(weight, threshold=threshold).outliers(weight)
    assert found.positions.tolist() == wanted
    assert 3 < len(wanted) < 600


def values() -> np.ndarray:
    return np.sort(np.random.default_rng(5).standard_t(3, 1000))


def literal_error(values: np.ndarray, bounds: np.ndarray, C: np.ndarray) -> float:
    of = np.repeat(np.arange(len(C)), np.diff(bounds))
    return float(np.abs(values - C[of]).sum())


@pytest.mark.parametrize("bits", [1, 3, 5])
def test_it_starts_from_bins_of_equally_many(bits: int):
    found = equal_bins(values(), 2**bits)
    counts = np.diff(found.bounds)
    assert counts.sum() == 1000
    assert counts.max() - counts.min() <= 1
    np.testing.assert_allclose(found.C, [each.mean() for each in np.split(values(), found.bounds[1:-1])], rtol=1e-12)


@pytest.mark.parametrize("bits", [1, 3, 5])
def test_a_round_assigns_and_averages(bits: int):
    before = equal_bins(values(), 2**bits)
    after = improved(values(), before)
    nearest = np.abs(values()[:, None] - before.C).argmin(1)
    np.testing.assert_array_equal(nearest, np.repeat(np.arange(2**bits), np.diff(after.bounds)))
    np.testing.assert_allclose(after.C, [values()[nearest == j].mean() for j in range(2**bits)], rtol=1e-12)
    assert after.error == pytest.approx(literal_error(values(), after.bounds, after.C), rel=1e-12)


@pytest.mark.parametrize("bits", [1, 2, 3, 5])
def test_it_stops_where_the_absolute_error_is_least(bits: int):
    found = equal_bins(values(), 2**bits)
    errors = [found.error]
    for _ in range(500):
        found = improved(values(), found)
        errors.append(found.error)
    first_rise = next(i for i in range(1, 501) if not errors[i] < errors[i - 1])
    best = best_bins(values(), 2**bits)
    assert best.error == errors[first_rise - 1]
    assert all(errors[i] < errors[i - 1] for i in range(1, first_rise))
    assert best.error < errors[0]


def test_values_that_repeat_and_fewer_values_than_clusters():
    for few in ([1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 5.0], [2.0]):
        best = best_bins(np.array(few), 8)
        assert best.error == 0
        assert set(best.C[np.diff(best.bounds) > 0]) == set(few)
    weight = nn.Parameter(torch.tensor([0.0, 0.0, 1.0, 0.5]))
    gobo = make(weight, threshold=-100)
    assert torch.equal(gobo.snapped(weight), weight)


def test_the_clusters_are_the_best_bins_of_all_but_the_outliers():
    weight = heavy(30, 40)
    gobo = make(weight)
    inside = ~gobo.is_outlier
    others = weight.detach()[inside]
    best = best_bins(np.sort(others.numpy()), 8)
    close(gobo.C[:, 0], torch.from_numpy(best.C))
    codes = gobo.cluster_of.view(30, 40)[inside]
    assert torch.equal(torch.bincount(codes.long(), minlength=8), torch.from_numpy(np.diff(best.bounds)))
    for j in range(8):
        close(gobo.C[j, 0], others[codes == j].mean())


def test_outliers_train_freely_and_clusters_with_their_mean_gradient():
    weight = heavy(30, 40)
    gobo = make(weight)
    G = make_gradient(weight)
    W_tilde = gobo(weight)
    (gradient,) = torch.autograd.grad(W_tilde, weight, G)
    apart, codes = gobo.is_outlier, gobo.cluster_of.view(30, 40)
    assert torch.equal(W_tilde[apart], weight[apart])
    assert torch.equal(gradient[apart], G[apart])
    for j in range(8):
        mine = (codes == j) & ~apart
        close(gradient[mine], G[mine].mean().expand(int(mine.sum())))
        close(W_tilde[mine], weight[mine].mean().expand(int(mine.sum())))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outliers_are_kept_exactly(dtype: torch.dtype):
    weight = heavy(30, 40, dtype=dtype)
    gobo = make(weight).eval()
    apart = gobo.is_outlier
    assert 5 < int(apart.sum()) < 40
    assert torch.equal(gobo(weight)[apart], weight[apart])
    assert len(gobo(weight)[~apart].unique()) == 8


def test_which_weights_are_outliers_does_not_change():
    weight = heavy(30, 40)
    gobo = make(weight)
    before = gobo.is_outlier.clone()
    with torch.no_grad():
        weight[0, 1] = 9.0
        weight[before] = 0.0
    gobo(weight)
    assert torch.equal(gobo.is_outlier, before)
    assert torch.equal(gobo.outliers(weight).positions, before.view(-1).nonzero()[:, 0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.two = nn.Embedding(50, 24), nn.Linear(24, 40), nn.Linear(40, 6)
        for layer in (self.embed, self.one, self.two):
            layer.weight = heavy(*layer.weight.shape, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.relu(self.one(self.embed(x))))


WORDS = torch.arange(50)
PLAN = "embed:3, one:2 scaled, two:4"


def trained() -> Net:
    torch.manual_seed(0)
    model = Net()
    dkm.compress_(model, PLAN, method="gobo")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(WORDS), WORDS % 6).backward()
        optimizer.step()
    return model.eval()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(model, name).weight.detach() for name in ("embed", "one", "two")}


def test_the_file_has_them_and_every_reader_gives_them_back(tmp_path: Path):
    model = trained()
    expected, path = weights(model), tmp_path / "model.dkm"
    for coding in ("packed", "entropy"):
        dkm.save(model, path, coding=coding, dtype=torch.float32)
        assert all(torch.equal(dkm.load(path)[f"{name}.weight"], value) for name, value in expected.items())
        packed = dkm.load(path, into=Net(), packed=True)
        assert len(packed_tensors(packed)) == 3
        assert all(torch.equal(value, expected[name]) for name, value in weights(packed).items())
        torch.testing.assert_close(packed(WORDS), model(WORDS))
        again = tmp_path / "again.dkm"
        dkm.save(packed, again, coding=coding)
        assert all(torch.equal(dkm.load(again)[f"{name}.weight"], value) for name, value in expected.items())
    snapped = weights(dkm.snap_(copy.deepcopy(model)))
    assert all(torch.equal(snapped[name], value) for name, value in expected.items())


def test_the_size_counts_them(tmp_path: Path):
    model = trained()
    size = dkm.size(model)
    assert size.file_bytes == dkm.save(model, tmp_path / "model.dkm")
    plan = dkm.plan(Net(), PLAN)
    counts = {name: int(getattr(model, name).parametrizations.weight[0].is_outlier.sum()) for name in weights(model)}
    for name, count in counts.items():
        row = size[f"{name}.weight"]
        assert row.stored_bytes == plan[f"{name}.weight"].stored_bytes + 8 * count  # 4 bytes of position, 4 of value
        assert row.reason == f"clustered, {count} outlier{'s' * (count > 1)}"
    assert set(counts.values()) == {7, 5, 1}
    assert size.bytes == plan.bytes + 8 * sum(counts.values())
    packed = dkm.size(dkm.load(tmp_path / "model.dkm", into=Net(), packed=True))
    assert packed.bytes == size.bytes


def test_exports_have_them(tmp_path: Path):
    model = trained()
    expected = weights(model)
    dkm.export(model, tmp_path / "out.safetensors", to="safetensors")
    stored = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(stored[f"{name}.weight"], value) for name, value in expected.items())


def test_onnx_has_them(tmp_path: Path):
    pytest.importorskip("onnxruntime")
    report = dkm.export(trained(), tmp_path / "out.onnx", to="onnx", example=WORDS)
    assert report.checked.difference < 1e-5
    assert not report.dense
    assert {row.written for row in report.rows} >= {"3-bit codes, 7 outliers", "4-bit codes, 1 outlier"}


def test_a_checkpoint_has_them():
    model, other = trained(), Net()
    with torch.no_grad():
        other.one.weight.normal_(0, 0.04)  # trained elsewhere, with other outliers
    dkm.compress_(other, PLAN, method="gobo")
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(value, weights(model)[name]) for name, value in weights(other.eval()).items())


def test_thresholds():
    assert make(heavy(30, 40), threshold=-1000).outliers(heavy(30, 40)) is None
    with pytest.raises(ValueError, match=r"every weight would be an outlier: .* below e\^4 everywhere; give a lower"):
        make(heavy(30, 40), threshold=4)
    for wrong in ("low", None, float("nan"), True):
        with pytest.raises(ValueError, match="threshold is the logarithm of a density, a number such as -4, got"):
            make(heavy(30, 40), threshold=wrong)
