"""What a weight becomes when it is snapped to k-means of its own."""

import pytest
import torch

import dkm
from dkm.clustering.groups import Group
from dkm.clustering.snapping import kmeans_groups, row_scales, snapped_values
from dkm.clustering.spec import Spec


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def snapped(weight: torch.Tensor, spec: Spec) -> torch.Tensor:
    scales = row_scales(weight) if spec.scaled else None
    return snapped_values(weight, kmeans_groups(weight, spec), spec, scales)


def squared_error(weight: torch.Tensor, spec: Spec) -> float:
    return float((snapped(weight, spec) - weight).double().square().sum())


def test_scales_are_the_largest_values_as_float16_has_them():
    weight = normal(6, 4, 3) * torch.tensor([1.0, 1e-3, 1e3, 0.0, 1e-9, 1e9])[:, None, None]
    scales = row_scales(weight)
    assert scales.shape == (6,)
    assert torch.equal(scales, scales.half().float())
    expected = weight.flatten(1).abs().amax(1)
    # float16 has 11 bits: rounding to nearest moves a value by at most 2^-11 of it.
    torch.testing.assert_close(scales[:3], expected[:3], rtol=2**-11, atol=0)
    assert scales[3:].tolist() == [1.0, 2.0**-24, 65504.0]  # zeros, and the smallest and the largest float16


@pytest.mark.parametrize(
    "spec",
    [Spec(2), Spec(3, 2), Spec(2, scaled=True), Spec(2, group=Group(4)), Spec(3, 2, True, Group(3, 10), True)],
    ids=lambda spec: spec.label,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_group_has_at_most_k_vectors_and_the_nearest(spec: Spec, dtype: torch.dtype):
    weight = normal(8, 6, 5).to(dtype)
    C, scales = kmeans_groups(weight, spec), row_scales(weight) if spec.scaled else torch.ones(8)
    values = snapped(weight, spec)
    assert values.shape == weight.shape
    assert values.dtype == dtype
    grouping = spec.grouping(weight.shape)
    assert C.shape == (grouping.count, 2**spec.bits, spec.dim)
    X = weight.to(C.dtype) / scales.to(C.dtype)[:, None, None]
    V, found = grouping.split(X), grouping.split(values.to(C.dtype) / scales.to(C.dtype)[:, None, None])
    whole = grouping.split(torch.ones_like(X)).all(-1)  # vectors without a zero that was filled in
    best = (V[:, :, None] - C[:, None]).square().sum(-1).amin(2)
    # Values are rounded to the weight's dtype: by half a unit in the last place of values up to 4.
    atol = 4 * spec.dim * 8 * torch.finfo(dtype).eps
    torch.testing.assert_close((V - found).square().sum(-1)[whole], best[whole], rtol=0, atol=atol)


@pytest.mark.parametrize("dim", [1, 2])
def test_centroids_have_the_precision_of_the_file(dim: int):
    weight = 0.02 * normal(16, 32)
    C = kmeans_groups(weight, Spec(3, dim))
    assert torch.equal(C, C.half().float())
    narrow = kmeans_groups(weight, Spec(3, dim, group=Group(4), float8=True))
    wide = kmeans_groups(weight, Spec(3, dim, group=Group(4)))
    assert len(torch.frexp(narrow).mantissa.abs().unique()) <= 8 + 1  # 3 bits of mantissa, and zero
    # E4M3 rounds to 4 bits, by at most 2^-4 of the value; below 2^-6 of the unit, its steps are 2^-9 of it.
    torch.testing.assert_close(narrow, wide, rtol=2**-4 + 2**-10, atol=0.03 * 2**-9)


def test_finer_ways_are_closer():
    weight = normal(64, 64) * torch.logspace(-1, 1, 64)[:, None]
    plain, scaled, rows = (squared_error(weight, s) for s in (Spec(2), Spec(2, scaled=True), Spec(2, group=Group(1))))
    assert rows < scaled < plain


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e8, 1e30])
@pytest.mark.parametrize("spec", [Spec(3), Spec(3, scaled=True, group=Group(2), float8=True)], ids=lambda s: s.label)
def test_weights_of_an_extreme_scale(scale: float, spec: Spec):
    weight = normal(8, 64)
    relative = squared_error(weight * scale, spec) / scale**2 / squared_error(weight, spec)
    # The power of two and the limits of float16's scales change what E4M3 rounds; the clustering stays as close.
    assert relative < 1.5


def test_a_whole_tensor_is_snapped_as_before():
    weight = normal(30, 30)
    C = dkm.init_centroids(weight.view(-1, 1), 8).half().float()
    expected = C[dkm.assign(weight.view(-1, 1), C)].view(30, 30)
    torch.testing.assert_close(snapped(weight, Spec(3)), expected)
