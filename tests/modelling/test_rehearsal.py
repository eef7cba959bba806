"""What a training step will launch is known before it."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dkm
from dkm.clustering import kernels

ROOT = Path(__file__).parents[2]


BOTH = ("backward_kernel", "forward_kernel")
TABLE = ("add_up_kernel", *BOTH, "gather_kernel", "look_up_gradient_kernel", "look_up_kernel")
CASES: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
    ("all:8/8", "float32", {}, BOTH),
    ("cv:3/1, lin:6/1", "float32", {}, BOTH),
    ("all:3/1", "bfloat16", {}, TABLE),
    ("all:4/2", "float32", dict(tau=1e-3, metric="euclidean"), BOTH),
    ("all:4/2", "float32", dict(tau="learn"), (*BOTH, "temperature_kernel")),
    ("all:4/2", "float32", dict(gradient="last"), BOTH),
    ("all:4/2 scaled", "float32", {}, BOTH),
    ("all:3 per 8x32", "float32", {}, ("backward_groups_kernel", "forward_groups_kernel")),
]


def test_a_step_launches_what_was_expected_and_that_is_compiled_together(tmp_path: Path):
    """In a process where Triton compiles; one for all cases, because most of the time is spent importing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= dict(PYTHONPATH=str(ROOT), TRITON_CACHE_DIR=str(tmp_path))
    cases = [json.dumps(case[:3]) for case in CASES]
    program = [sys.executable, ROOT / "tests" / "helpers" / "rehearse.py", *cases]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *found, launched = (tuple(line.split()) for line in done.stdout.splitlines())
    assert found == [case[3] for case in CASES]
    assert launched == ("forward_kernel",) * 2 + ("backward_kernel",) * 2
    pytest.importorskip("triton.runtime._async_compile")  # without it, they are compiled one by one
    assert "dkm: compiling 2 kernels for the GPU" in done.stderr
    assert "dkm: compiled in" in done.stderr


class Backend:
    """One that compiles, or has no memory to prepare that."""

    def __init__(self, error: Exception | None = None):
        self.error, self.calls = error, 0

    def rehearse(self, step):
        self.calls += 1
        if self.error:
            raise self.error


def compress(monkeypatch, backend: Backend, **options) -> nn.Module:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    model[1].requires_grad_(options.pop("train", True))
    model[0].requires_grad_(model[1].weight.requires_grad)
    monkeypatch.setattr(kernels, "compiled", lambda chosen: backend)
    dkm.compress_(model, "all:2/2", **options)
    return model


@pytest.mark.parametrize(
    "options", [dict(steps=5, train=False), dict(method="hard"), dict(steps=5, impl="reference")], ids=str
)
def test_nothing_is_expected_where_no_kernel_will_be_launched(options: dict, monkeypatch):
    backend = Backend()
    compress(monkeypatch, backend, **options)
    assert backend.calls == 0


def test_too_little_memory_is_a_warning(monkeypatch):
    with pytest.warns(RuntimeWarning, match="kernels are compiled one by one"):
        model = compress(monkeypatch, Backend(torch.OutOfMemoryError("no memory")), steps=5)
    monkeypatch.undo()
    model(torch.zeros(1, 128)).sum().backward()  # it is compressed all the same


def test_no_kernels_no_rehearsal():
    """The backend of CPUs compiles nothing."""
    assert kernels.compiled(kernels.choose("blocked", torch.zeros(8), 1)) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dkm.compress_(nn.Linear(128, 128), "all:2/2", steps=5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")
def test_nothing_runs_in_the_interpreter():
    """It could not write launches down: it would make the step."""
    model = nn.Sequential(nn.Linear(128, 128))
    dkm.compress_(model, "all:2/2", steps=5, impl="triton")
    clustered = model[0].parametrizations.weight[0]
    assert (int(clustered.step), int(clustered.clock.on(clustered.step.device))) == (0, 0)
    assert torch.equal(clustered.C, clustered.start)
