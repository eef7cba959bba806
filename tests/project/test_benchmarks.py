"""`python -m benchmarks` runs and prints its tables.  What the numbers are is not tested: see the README."""

import json
import subprocess
import sys
from pathlib import Path

from torch import nn

from benchmarks import monitor

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
