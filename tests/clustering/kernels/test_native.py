"""The passes that a C compiler makes: where they come from, and what they promise besides exactness.

That they are exact is tested with the other backends, in test_cluster.py and beside this file.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from backends import ON_CPU

from dkm import cluster, init_centroids
from dkm.clustering.kernels import native
from dkm.clustering.kernels.native import compiling

pytestmark = pytest.mark.skipif("native" not in ON_CPU, reason="there is no C compiler")


def problem(n: int, d: int, k: int, dtype: torch.dtype = torch.float) -> tuple[torch.Tensor, torch.Tensor]:
    W = torch.randn(n, d, dtype=torch.float64).mul(0.05)
    return W.to(dtype), init_centroids(W, k).to(torch.promote_types(dtype, torch.float))


def results(W: torch.Tensor, C: torch.Tensor, **options) -> list[torch.Tensor]:
    weight = W.clone().requires_grad_()
    found = cluster(weight, C, **{"tau": 1e-3, "eps": 0, "max_iter": 3, "impl": "native", **options})
    return [found.W_tilde.detach(), found.C, torch.autograd.grad(found.W_tilde, weight, W.cos())[0]]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few hundred vectors make several chunks and a ragged last one."""
    monkeypatch.setattr(native, "CHUNK", 100)
    monkeypatch.setattr(native, "PER_CENTROID", 1)


@pytest.fixture
def threads():
    usual = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(usual)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("d", [1, 3, 8, 9])
def test_chunks_and_threads_change_nothing(d: int, threads):
    """The chunks decide in which order numbers are added up, and the threads nothing."""
    W, C = problem(1013, d, 16, torch.double)
    threads(1)
    one = results(W, C)
    for count in (2, 3, 7):
        threads(count)
        assert all(map(torch.equal, one, results(W, C)))
    for got, value in zip(one, results(W, C, impl="reference"), strict=True):
        torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [1, 4])
def test_16_bit_weights_are_converted_piece_by_piece(dtype: torch.dtype, d: int, monkeypatch: pytest.MonkeyPatch):
    """As the same weights in float32, rounded at the end; what is read is not changed."""
    monkeypatch.setattr(native, "CONVERTED", 300)
    W, C = problem(907, d, 8, dtype)
    G = torch.randn_like(W)
    before = W.clone(), G.clone()
    found = []
    for weight in (W, W.float()):
        weight.requires_grad_()
        W_tilde = cluster(weight, C, tau=1e-3, eps=0, max_iter=3, impl="native").W_tilde
        found.append([W_tilde.detach(), torch.autograd.grad(W_tilde, weight, G.to(weight.dtype))[0]])
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got, wanted.to(dtype))
    assert torch.equal(W.detach(), before[0])
    assert torch.equal(G, before[1])


def test_a_diverged_weight_shows():
    W, C = problem(300, 2, 4)
    for value in (torch.nan, torch.inf):
        W[100, 1] = value
        W_tilde = cluster(W, C, tau=1e-3, max_iter=1, impl="native").W_tilde
        wanted = cluster(W, C, tau=1e-3, max_iter=1, impl="reference").W_tilde
        assert W_tilde[100].isnan().all()
        assert torch.equal(W_tilde.isnan(), wanted.isnan())


def test_from_several_threads_at_once():
    W, C = problem(20_000, 2, 16)
    wanted, found = results(W, C), []
    callers = [threading.Thread(target=lambda: found.append(results(W, C))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 4
    for got in found:
        assert all(map(torch.equal, wanted, got))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_after_a_fork(threads):
    """The threads of the parent do not exist in a child, which must not wait for them."""
    threads(2)
    W, C = problem(20_000, 1, 4)
    cluster(W, C, tau=1e-3, impl="native")
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # instead of waiting for ever
        W_tilde = cluster(W, C, tau=1e-3, impl="native").W_tilde
        os._exit(0 if bool(W_tilde.isfinite().all()) else 1)
    assert os.waitpid(child, 0)[1] == 0


# --- the compiler --------------------------------------------------------------------------------


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As at the first use, with an empty cache, which is returned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caches = (compiling.library, compiling._folder)
    for cache in caches:
        cache.cache_clear()
    yield tmp_path / "dkm"
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


def test_a_library_is_compiled_once(forgotten: Path, monkeypatch: pytest.MonkeyPatch):
    assert compiling.passes(torch.float32, 3) is not None
    (first,) = forgotten.iterdir()
    written = first.stat().st_mtime_ns
    compiling.library.cache_clear()
    monkeypatch.setattr(compiling, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiling.passes(torch.float32, 3) is not None
    assert [first] == list(forgotten.iterdir())
    assert first.stat().st_mtime_ns == written


def test_large_dimensions_share_a_library(forgotten: Path):
    assert compiling.passes(torch.float32, 9) is compiling.passes(torch.float32, 100)
    assert compiling.passes(torch.float64, 9) is not compiling.passes(torch.float32, 9)


@pytest.mark.parametrize("how", ["DKM_COMPILE", "CC"])
def test_without_a_compiler_the_plain_passes_compute(how: str):
    """In a process of its own, which has no library yet."""
    script = """
import torch
import dkm
from dkm.clustering.kernels import blocked, choose

W, C = torch.randn(100, 2), torch.randn(4, 2)
assert choose("auto", W, 2) is blocked
print(dkm.cluster(W, C, tau=1.0).W_tilde.shape)
try:
    dkm.cluster(W, C, tau=1.0, impl="native")
except dkm.DKMError as error:
    print(error)
"""
    chosen = {"DKM_COMPILE": "0"} if how == "DKM_COMPILE" else {"CC": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], env={**os.environ, **chosen}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([100, 2])" in done.stdout
    assert 'use impl="auto"' in done.stdout


def test_a_compiler_that_fails_is_said_once(forgotten: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'no such header' >&2\n[ \"$1\" = --version ]\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.warns(RuntimeWarning, match="in plain PyTorch, .*: no such header.*DKM_COMPILE=0"):
        assert compiling.passes(torch.float32, 1) is None
    assert compiling.passes(torch.float32, 1) is None
    assert list(forgotten.iterdir()) == []


def test_a_cache_that_cannot_be_written(forgotten: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiling.passes(torch.float32, 1) is not None
    assert not forgotten.exists()


def test_a_flag_that_the_compiler_does_not_know(forgotten: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiling, "TARGETS", [["-march=no-such-processor"], []])
    assert compiling.passes(torch.float32, 1) is not None
