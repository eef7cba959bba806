"""The product from packed codes is the product with the dense weight."""

import random

import pytest
import torch
from dkm_files import skewed, tensor, with_outliers

from dkm.clustering.groups import Group
from dkm.clustering.spec import Spec
from dkm.runtime.packed import PackedWeight

pytest.importorskip("triton")
from dkm.runtime.triton.product import computes, product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU, in Triton's interpreter
SPECS = [
    Spec(1),
    Spec(2),
    Spec(3),
    Spec(4, 4),
    Spec(5, 3),
    Spec(8, 8),
    Spec(9, 2),
    Spec(12, 5),
    Spec(3, scaled=True),
    Spec(2, 2, group=Group(None, 24)),
    Spec(3, group=Group(1)),
    Spec(2, 4, scaled=True, group=Group(4, 8)),
    Spec(3, 1, scaled=True, group=Group(8, 64), float8=True),
]
SHAPES = [(1, 33, 24), (3, 70, 136), (64, 5, 200)]


def pair(spec, shape, dtype, *, source=torch.float32, exponent=0):
    """Rows of x, the packed weight of this shape, and their product in float64."""
    M, N, K = shape
    each = skewed("weight", (N, K), spec, dtype=source, exponent=exponent)
    weight = PackedWeight(each.content, each.shape, each.dtype, dtype).to(DEVICE)
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    return x, weight, x.double() @ weight.dense().double().T


def tolerance(x, weight, dtype):
    """Of products that are added in some order, in `dtype`: a rounding for each of them, and one of the result."""
    sizes = x.double().abs() @ weight.dense().double().abs().T
    return sizes * (x.shape[1] + 2) * torch.finfo(torch.promote_types(dtype, torch.float32)).eps


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.label)
def test_it_is_the_dense_product_in_float64(spec, shape):
    if DEVICE == "cuda":
        pytest.skip("the kernel is for 16 and 32 bits there")
    x, weight, expected = pair(spec, shape, torch.float64)
    assert bool(((product(x, weight) - expected).abs() <= tolerance(x, weight, torch.float64)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype, source):
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies matrices of bfloat16 as integers")
    for spec, exponent in [(Spec(4, 2), 0), (Spec(3, scaled=True, group=Group(8, 16)), -3)]:
        x, weight, expected = pair(spec, (3, 20, 72), dtype, source=source, exponent=exponent)
        found = product(x, weight)
        assert found.dtype == dtype
        allowed = tolerance(x, weight, dtype) + expected.abs() * torch.finfo(dtype).eps
        assert bool(((found.double() - expected).abs() <= allowed).all()), (spec, dtype, source)


def test_any_bits_groups_and_shape():
    rng = random.Random(0)
    dtype = torch.float32 if DEVICE == "cuda" else torch.float64
    checked = 0
    for _ in range(40):
        N, K = rng.randint(1, 40), rng.choice([8, 16, 24, 40, rng.randint(1, 70)])
        group = rng.choice([None, Group(rng.randint(1, 9)), Group(rng.randint(1, 9), rng.choice([4, 8, 24]))])
        spec = Spec(rng.randint(1, 8), rng.choice([1, 2, 4, 8, 3]), scaled=rng.random() < 0.5, group=group)
        x, weight, expected = pair(spec, (rng.randint(1, 20), N, K), dtype)
        if not weight.straddles():
            assert bool(((product(x, weight) - expected).abs() <= tolerance(x, weight, dtype)).all()), (spec, N, K)
            checked += 1
    assert checked > 15


def test_leading_axes_and_rows_that_are_not_contiguous():
    x, weight, expected = pair(Spec(2), (6, 10, 16), torch.float32)
    apart = torch.stack([x, x], -1)[..., 0].view(2, 3, 16)
    torch.testing.assert_close(product(apart, weight).double().view(6, 10), expected, rtol=1e-4, atol=1e-4)


def test_what_it_computes():
    x, weight, _ = pair(Spec(2), (3, 10, 16), torch.float32)
    assert computes(x, weight)
    assert computes(x.view(1, 3, 16), weight)
    with torch.no_grad():
        assert computes(x.clone().requires_grad_(), weight)
    assert not computes(x.clone().requires_grad_(), weight)
    assert not computes(x.double(), weight)
    assert not computes(x[:, :8], weight)
    assert not computes(x[:0], weight)
    assert not computes(x.repeat(22, 1), weight)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert not computes(x, weight)
    each = tensor("weight", (10, 16), Spec(2, 3, group=Group(4, 8)))
    assert not computes(x, PackedWeight(each.content, each.shape, each.dtype).to(DEVICE))
    each = with_outliers(tensor("weight", (10, 16), Spec(2)), 9)
    assert not computes(x, PackedWeight(each.content, each.shape, each.dtype).to(DEVICE))
