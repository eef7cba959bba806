"""Launches, with a kernel that writes down who launched it: Triton, or we."""

from contextlib import contextmanager

import pytest
import torch

from dkm.clustering.kernels.triton import launch


class Kernel:
    """As much of Triton's as `quick` uses."""

    arg_names = ("X", "N", "BLOCK", "EXACT")

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.launches.append(("triton", grid, arguments, constants))
            return {(*grid, 1, 1): lambda *a: self.launches.append(("quick", grid, a))}

        return launch


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    kernel = Kernel()

    @contextmanager
    def device(which):
        kernel.launches.append(which)
        yield
        kernel.launches.append("back")

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(launch, "CompiledKernel", dict)
    return kernel


def by(kernel: Kernel) -> list[str]:
    return [launch[0] for launch in kernel.launches if isinstance(launch, tuple)]


def test_the_second_launch_of_a_kind(kernel):
    X = torch.zeros(8)
    run = launch._Quick(kernel)[(3,)]
    run(X, 8, EXACT=True, BLOCK=64, num_warps=4)
    run(X, 8, EXACT=True, BLOCK=64, num_warps=4)
    assert [x for x in kernel.launches if isinstance(x, tuple)] == [
        ("triton", (3,), (X, 8), dict(EXACT=True, BLOCK=64, num_warps=4)),
        ("quick", (3,), (X, 8, 64, True)),  # constants in the order of the kernel, options left out
    ]


def test_on_the_device_of_the_first_argument(kernel):
    X = torch.zeros(8)
    run = launch._Quick(kernel)[(1,)]
    run(X, 8, BLOCK=64, EXACT=True)
    run(X, 8, BLOCK=64, EXACT=True)
    assert [x if not isinstance(x, tuple) else x[0] for x in kernel.launches] == [
        X.device, "triton", "back", X.device, "quick", "back"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "X", "N", "constants"),
    [
        ((2,), torch.zeros(8), 8, dict(BLOCK=64, EXACT=True)),
        ((1,), torch.zeros(8, dtype=torch.float64), 8, dict(BLOCK=64, EXACT=True)),
        ((1,), torch.zeros(8), 8.0, dict(BLOCK=64, EXACT=True)),
        ((1,), torch.zeros(8), 9, dict(BLOCK=64, EXACT=True)),
        ((1,), torch.zeros(8), 8, dict(BLOCK=32, EXACT=True)),
        ((1,), torch.zeros(8), 8, dict(BLOCK=64, EXACT=True, maxnreg=128)),
        ((1,), torch.zeros(9)[1:], 8, dict(BLOCK=64, EXACT=True)),
        ((1,), torch.zeros(8, device="meta"), 8, dict(BLOCK=64, EXACT=True)),
    ],
    ids=["grid", "dtype", "type", "number", "constant", "option", "alignment", "device"],
)
def test_another_kind_is_triton_s(grid, X, N, constants, kernel):
    kernel_of_ours = launch._Quick(kernel)
    kernel_of_ours[(1,)](torch.zeros(8), 8, BLOCK=64, EXACT=True)
    kernel_of_ours[grid](X, N, **constants)
    assert by(kernel) == ["triton", "triton"]


def test_without_alignment_always_triton_s(kernel):
    X = torch.zeros(9)[1:]
    run = launch._Quick(kernel)[(1,)]
    for _ in range(3):
        run(X, 8, BLOCK=64, EXACT=True)
    assert by(kernel) == ["triton"] * 3


def test_a_float_is_of_one_kind(kernel):
    """A temperature that is another one in every step must not fill the memory."""
    run = launch._Quick(kernel)[(1,)]
    for number in (0.5, 0.25, 1.0):
        run(torch.zeros(8), number, BLOCK=64, EXACT=True)
    assert by(kernel) == ["triton", "quick", "quick"]


def test_where_triton_only_looks(kernel, monkeypatch):
    """It compiles in the background, or a hook keeps it from launching."""
    monkeypatch.setattr(launch, "CompiledKernel", int)
    run = launch._Quick(kernel)[(1,)]
    for _ in range(2):
        run(torch.zeros(8), 8, BLOCK=64, EXACT=True)
    assert by(kernel) == ["triton", "triton"]
