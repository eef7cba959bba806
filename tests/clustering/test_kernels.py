"""Which backend computes a clustering."""

import itertools
import sys
import types

import pytest
import torch

from dkm.clustering import kernels
from dkm.clustering.backends import Registration
from dkm.clustering.kernels import blocked, choose, native

numbers = itertools.count()  # what is found under a name is remembered: every test has names of its own


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch):
    """Registers a backend that exists in this test only, in front of the others; returns its name and module."""

    def register(*, fits: bool, device: str | None = None, package: str | None = None) -> tuple[str, types.ModuleType]:
        name = f"backend_of_a_test_{next(numbers)}"
        module = types.ModuleType(name)
        module.fits = lambda W, d: fits
        monkeypatch.setitem(sys.modules, f"{kernels.__name__}.{name}", module)
        monkeypatch.setattr(kernels, "BACKENDS", {name: Registration(device, package), **kernels.BACKENDS})
        return name, module

    return register


W = torch.zeros(10)


def test_auto_on_a_cpu_is_native(monkeypatch: pytest.MonkeyPatch):
    """Or, without a compiler, `blocked`."""
    monkeypatch.setattr(native, "passes", lambda dtype, d: object())
    assert choose("auto", W, 1) is native
    monkeypatch.setattr(native, "passes", lambda dtype, d: None)
    assert choose("auto", W, 1) is blocked


def test_a_name_is_that_backend():
    assert choose("blocked", W, 1) is blocked


def test_auto_takes_the_first_that_fits(registered):
    _, first = registered(fits=True)
    assert choose("auto", W, 1) is first


def test_auto_passes_one_that_does_not_fit(registered):
    usual = choose("auto", W, 1)
    registered(fits=False)
    assert choose("auto", W, 1) is usual


def test_auto_passes_one_for_another_device(registered):
    usual = choose("auto", W, 1)
    registered(fits=True, device="cuda")
    assert choose("auto", W, 1) is usual


def test_auto_passes_one_whose_package_is_not_installed(registered):
    usual = choose("auto", W, 1)
    registered(fits=True, package="no_such_package_anywhere")
    assert choose("auto", W, 1) is usual
    _, second = registered(fits=True, package="torch")
    assert choose("auto", W, 1) is second


def test_a_name_is_taken_even_where_it_would_not_fit(registered):
    """Whoever names a backend wants its error, not another backend."""
    name, first = registered(fits=False, device="cuda")
    assert choose(name, W, 1) is first


def test_no_backend_at_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "BACKENDS", {})
    with pytest.raises(RuntimeError, match=r"no backend is for a weight of torch\.float32 on cpu"):
        choose("auto", W, 1)


@pytest.mark.parametrize("name", kernels.BACKENDS)
def test_every_backend_has_the_functions_of_the_contract(name: str):
    if kernels.BACKENDS[name].package is not None:
        pytest.importorskip(kernels.BACKENDS[name].package)
    backend = choose(name, W, 1)
    functions = ["fits", "forward", "backward"] + ["can_advance", "advance"] * (kernels.stateful(backend) is not None)
    for function in functions:
        assert callable(getattr(backend, function)), function


def test_only_triton_makes_a_step_in_one_launch():
    pytest.importorskip("triton")
    assert kernels.stateful(choose("triton", W, 1)) is not None
    assert kernels.stateful(blocked) is None
