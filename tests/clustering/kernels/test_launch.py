"""Launches, with a kernel that writes down how it was launched: through Triton, or directly."""

from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from dkm.clustering.kernels.triton import launch


class Kernel:
    """As much of a Triton kernel as `quick` uses."""

    arg_names = ("X", "N", "BLOCK", "EXACT")
    params = tuple(SimpleNamespace(name=name, is_constexpr=name in ("BLOCK", "EXACT")) for name in arg_names)

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def launch(**arguments):
            self.launches.append(("triton", grid, arguments))
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
    arguments = dict(EXACT=True, N=8, BLOCK=64, X=X, num_warps=4)
    run(**arguments)
    run(**arguments)
    assert [x for x in kernel.launches if isinstance(x, tuple)] == [
        ("triton", (3,), arguments),
        ("quick", (3,), (X, 8, 64, True)),  # in the order of the kernel, options left out
    ]


def test_keywords_in_another_order(kernel):
    """Values are found by their names, whatever their order: these two launches differ only in what 8 and 64 are."""
    X = torch.zeros(8)
    run = launch._Quick(kernel)[(1,)]
    for _ in range(2):
        run(X=X, N=8, BLOCK=64, EXACT=True)
        run(X=X, BLOCK=8, N=64, EXACT=True)
    launches = [x for x in kernel.launches if isinstance(x, tuple)]
    assert [x[2] for x in launches if x[0] == "quick"] == [(X, 8, 64, True), (X, 64, 8, True)]


def test_an_argument_is_missing(kernel):
    run = launch._Quick(kernel)[(1,)]
    run(X=torch.zeros(8), N=8, BLOCK=64, EXACT=True)
    with pytest.raises(KeyError, match="X"):
        run(N=8, BLOCK=64, EXACT=True)


def test_on_the_device_of_the_first_argument(kernel):
    X = torch.zeros(8)
    run = launch._Quick(kernel)[(1,)]
    run(X=X, N=8, BLOCK=64, EXACT=True)
    run(X=X, N=8, BLOCK=64, EXACT=True)
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
def test_another_kind_goes_through_triton(grid, X, N, constants, kernel):
    quick_kernel = launch._Quick(kernel)
    quick_kernel[(1,)](X=torch.zeros(8), N=8, BLOCK=64, EXACT=True)
    quick_kernel[grid](X=X, N=N, **constants)
    assert by(kernel) == ["triton", "triton"]


def test_without_alignment_every_launch_goes_through_triton(kernel):
    X = torch.zeros(9)[1:]
    run = launch._Quick(kernel)[(1,)]
    for _ in range(3):
        run(X=X, N=8, BLOCK=64, EXACT=True)
    assert by(kernel) == ["triton"] * 3


def test_a_float_is_of_one_kind(kernel):
    """Otherwise a temperature that changes at every step would fill the memory with kinds."""
    run = launch._Quick(kernel)[(1,)]
    for number in (0.5, 0.25, 1.0):
        run(X=torch.zeros(8), N=number, BLOCK=64, EXACT=True)
    assert by(kernel) == ["triton", "quick", "quick"]


def test_triton_returns_no_compiled_kernel(kernel, monkeypatch):
    """It does so where it compiles in the background, or where a hook keeps it from launching."""
    monkeypatch.setattr(launch, "CompiledKernel", int)
    run = launch._Quick(kernel)[(1,)]
    for _ in range(2):
        run(X=torch.zeros(8), N=8, BLOCK=64, EXACT=True)
    assert by(kernel) == ["triton", "triton"]


@pytest.fixture
def together(monkeypatch) -> list[list[launch.Launch]]:
    """What was compiled together."""
    found: list[list[launch.Launch]] = []
    monkeypatch.setattr(launch, "_expected", deque())
    monkeypatch.setattr(launch, "compile_together", found.append)
    return found


def test_launches_that_are_written_down(kernel):
    """Nothing runs, and nothing of the tensors' memory is kept."""
    X, quick_kernel = torch.zeros(8), launch._Quick(kernel)
    with launch.written_down() as launches:
        for N in (8, 8, 16):
            quick_kernel[(3,)](X=X, N=N, BLOCK=64, EXACT=True)
        quick_kernel[(3,)](X=torch.zeros(9)[1:], N=8, BLOCK=64, EXACT=True)  # not aligned: another compiled form
    assert kernel.launches == []
    first, second = launches.values()
    assert (first.kernel, first.grid, first.device) == (kernel, (3,), X.device)
    assert [first.arguments["N"], second.arguments["N"]] == [8, 16]
    assert first.arguments["X"].dtype == torch.float32
    assert not any(isinstance(argument, torch.Tensor) for argument in first.arguments.values())
    quick_kernel[(3,)](X=X, N=8, BLOCK=64, EXACT=True)
    assert by(kernel) == ["triton"]


def test_kernels_are_compiled_together_when_one_is_needed(kernel, together):
    X, quick_kernel = torch.zeros(8), launch._Quick(kernel)
    with launch.written_down() as launches:
        for N in (8, 16):
            quick_kernel[(3,)](X=X, N=N, BLOCK=64, EXACT=True)
    launch.expect(launches)
    quick_kernel[(3,)](X=X, N=32, BLOCK=64, EXACT=True)
    launch._Quick(kernel)[(3,)](X=X, N=8, BLOCK=64, EXACT=True)
    assert together == []  # neither of these was expected
    for N in (16, 8, 16):
        quick_kernel[(3,)](X=X, N=N, BLOCK=64, EXACT=True)
    assert together == [list(launches.values())]  # once
    assert by(kernel) == ["triton"] * 4 + ["quick"]


def test_only_what_belongs_to_it_is_compiled(kernel, together, monkeypatch):
    """Of two models, the one that trains; and of many that never train, only the last few are remembered."""
    monkeypatch.setattr(launch, "_expected", deque(maxlen=2))
    X, quick_kernel, expected = torch.zeros(8), launch._Quick(kernel), []
    for N in (8, 16, 32):
        with launch.written_down() as launches:
            quick_kernel[(3,)](X=X, N=N, BLOCK=64, EXACT=True)
        launch.expect(launches)
        expected.append(list(launches.values()))
    launch.expect({})  # of a model that has no kernels
    for N in (8, 32):
        quick_kernel[(3,)](X=X, N=N, BLOCK=64, EXACT=True)
    assert together == [expected[2]]
