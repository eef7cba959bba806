"""The frame of the products, which is an origin and a unit, and what the rows of numbers keep of a float32."""

import pytest
import torch
import triton
import triton.language as tl

from dkm.clustering.kernels.triton.device.frame import find_frame, inverse, load_frame, store_frame
from dkm.clustering.kernels.triton.device.product_rows import split_whole

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _frame(C, out, inverses, K, D: tl.constexpr, WIDTH: tl.constexpr):
    center, unit = find_frame(C, K, D, D, WIDTH)
    store_frame(out, center, unit, WIDTH, WIDTH)
    tl.store(inverses, inverse(unit))
    # as `load_frame` gives it, which knows nothing of the columns after D
    center, unit = load_frame(out, D, WIDTH, WIDTH)
    tl.store(out + tl.arange(0, WIDTH)[None, :], center)
    tl.store(out + WIDTH, unit)


def frame(C: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    k, d = C.shape
    width = max(8, triton.next_power_of_2(d))
    out, inverses = torch.zeros(width + 1, device=DEVICE), torch.zeros(1, device=DEVICE)
    _frame[(1,)](C.to(DEVICE).contiguous(), out, inverses, k, d, width)
    assert not out[d:width].any()
    return out[:d].cpu(), float(out[-1]), float(inverses)


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e12])
@pytest.mark.parametrize(("k", "d"), [(1, 5), (16, 5), (256, 8), (1000, 13), (5000, 3)])
def test_the_unit_is_a_power_of_two_that_leaves_whole_parts_of_eight_bits(k: int, d: int, scale: float):
    C = torch.rand(k, d) * 2 * scale - scale
    center, unit, inverted = frame(C)
    assert unit * inverted == 1
    assert torch.tensor(unit).log2() % 1 == 0
    x = (C - center) / unit
    assert x.abs().max() < 300  # of many centroids, a sample is looked at
    assert k == 1 or x.abs().max() >= 100


def test_centroids_far_from_zero_are_centred_and_the_subtraction_is_exact():
    C = torch.rand(64, 6) * 0.1
    C[:, 2] += 5
    C[:, 4] -= 7
    center, _unit, _ = frame(C)
    assert (center != 0).tolist() == [False, False, True, False, True, False]
    assert torch.equal((C - center).double(), C.double() - center.double())


def test_all_centroids_in_one_place():
    center, unit, _ = frame(torch.full((16, 4), 3.0))
    assert torch.equal(center, torch.full((4,), 3.0))
    assert unit > 0
    center, unit, _ = frame(torch.zeros(16, 4))
    assert not center.any()
    assert unit > 0


@triton.jit
def _parts(X, out, N: tl.constexpr):
    i = tl.arange(0, N)
    high, middle, low = split_whole(tl.load(X + i))
    tl.store(out + i, high.to(tl.float32))
    tl.store(out + N + i, middle.to(tl.float32))
    tl.store(out + 2 * N + i, low.to(tl.float32))


def test_a_number_in_the_frame_is_a_whole_part_and_two_rests():
    X = torch.cat([torch.rand(1000) * 512 - 256, torch.rand(24) * 2 - 1]).to(DEVICE)
    out = torch.zeros(3, 1024, device=DEVICE)
    _parts[(1,)](X, out, 1024)
    high, middle, low = out.double()
    assert torch.equal(high, X.double().round())
    assert middle.abs().max() <= 0.5
    # a rest of half a unit at most, of which the two bfloat16 have 8 bits each
    assert (high + middle + low - X.double()).abs().max() <= 2**-18
