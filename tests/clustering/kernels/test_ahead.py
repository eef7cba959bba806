"""Kernels that are compiled together, with kernels that only say so to Triton."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dkm.clustering.kernels.triton import ahead

compilation = pytest.importorskip("triton.runtime._async_compile")


class Kernel:
    """As much of a Triton kernel as is needed to compile it: in the threads that Triton was given."""

    def __init__(self, name: str, compile_it=lambda: None):
        self.name, self.compile_it, self.cache = name, compile_it, {}

    def warmup(self, *, grid, **arguments):
        key = f"{self.name}, {arguments}"
        mode = compilation.active_mode.get()
        self.cache[key] = mode.submit(key, self.compile_it, lambda compiled: None, lambda future: None)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def launches(*kernels: Kernel, **arguments) -> list[ahead.Launch]:
    return [ahead.Launch(kernel, (1,), torch.device("cpu"), arguments) for kernel in kernels]


def test_every_kernel_is_compiled_once(capsys):
    done = []
    a, b = Kernel("a", lambda: done.append("a")), Kernel("b", lambda: done.append("b"))
    assert ahead.compile_together([*launches(a, b, a, BLOCK=1), *launches(a, BLOCK=2)]) == 3
    assert sorted(done) == ["a", "a", "b"]
    assert capsys.readouterr() == ("", "")  # it was quick


def test_a_line_says_what_takes_long(monkeypatch, capsys):
    monkeypatch.setattr(ahead, "wait", lambda asked, timeout: SimpleNamespace(not_done=set(asked)))
    ahead.compile_together(launches(Kernel("a"), Kernel("b")))
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("dkm: compiling 2 kernels for the GPU")
    assert second.startswith("dkm: compiled in 0 s")


def test_a_failure_is_a_warning_and_the_others_are_compiled():
    def fail():
        raise RuntimeError("no such instruction")

    done = []
    kernels = launches(Kernel("bad", fail), Kernel("good", lambda: done.append("good")))
    with pytest.warns(RuntimeWarning, match="at its first launch: no such instruction"):
        ahead.compile_together(kernels)
    assert done == ["good"]
    assert compilation.active_mode.get() is None  # later kernels are compiled as always


def test_a_kernel_that_cannot_even_be_asked_for():
    class Broken:
        def warmup(self, **arguments):
            raise ValueError("an argument is missing")

    with pytest.warns(RuntimeWarning, match="an argument is missing"):
        ahead.compile_together(launches(Broken()))
    assert compilation.active_mode.get() is None


def test_an_interruption_is_not_swallowed():
    class Interrupted:
        def warmup(self, **arguments):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ahead.compile_together(launches(Interrupted()))
    assert compilation.active_mode.get() is None


def test_a_triton_without_threads(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.runtime._async_compile", None)
    assert ahead.compile_together(launches(Kernel("a"))) == 0


@pytest.mark.parametrize(("processes", "threads"), [("1", 8), ("3", 2), ("100", 1), ("", 8), ("0", 8)])
def test_processes_of_a_training_share_the_cores(processes: str, threads: int, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda pid: range(8), raising=False)
    assert ahead._threads() == threads
