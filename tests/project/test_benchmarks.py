"""`python -m benchmarks` runs and prints its tables.  What the numbers are is not tested: see the README."""

import json
import os
import subprocess
import sys
from pathlib import Path

from torch import nn

from benchmarks import compilation, monitor

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "formats" / "golden" / "coded.dkm"


def test_tables_come_out(tmp_path):
    # one process: most of the time is spent importing
    names = ["accuracy", "memory", "groups", "coding", "network", "packed"]
    sections = [text for name in names for text in ("--only", name)]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks",
            "--quick",
            *sections,
            "--file",
            GOLDEN,
            "--json",
            tmp_path / "numbers.json",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, *texts = done.stdout.split("###")
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    for text, section in zip(texts, names, strict=True):
        table = [line for line in text.splitlines() if line.startswith("|")]
        assert len(table) == 2 + len(numbers[section]) > 2  # a header, a rule
        assert len({line.count("|") for line in table}) == 1
        assert max(map(len, table)) <= 100
    assert all(row["ours"]["dW"] < 1e-3 for row in numbers["accuracy"])
    assert all(row["ours"]["extra"] <= row["bound"] for row in numbers["memory"])
    assert all(row["file"] > 0 and row["seconds"]["packed"] > 0 for row in numbers["packed"])
    assert numbers["coding"][-1]["name"] == "coded"
    assert all(row["bound"] <= row["coded"] <= row["packed"] for row in numbers["coding"])


def test_kernels_are_listed(tmp_path):
    """In a process of its own: kernels that were imported for Triton's interpreter cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", "benchmarks.compilation", "--model", "small", "--plan", "all:3/1", "--list"]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == "small, float32, all:3/1, sm_90: 2 kernels"
    assert [line.split()[1] for line in lines[2:]] == ["forward", "backward"]


def test_innermost_loops():
    outer = ["@P1 BRA LBB0;", "BRA LBB2;", "LBB2:", "EXIT;"]
    lines = ["LBB0:", "IADD R1, R1;", "LBB1:", "HMMA.16816 R2;", "@P0 BRA LBB1;", *outer]
    assert compilation.innermost_loops(lines) == [["HMMA.16816 R2;", "@P0 BRA LBB1;"]]


def test_the_monitor_is_measured():
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 10))

    times = monitor.measure(build, "1:2, 3:2", (4, 3, 4, 4), "cpu", rounds=3)
    assert times["every"] == 100
    assert all(times[what] > 0 for what in ("step", "record", "idle"))


def test_shards_are_measured():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sharded", "--quick"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 2
    assert len({line.count("|") for line in table}) == 1
