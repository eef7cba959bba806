"""`python -m benchmarks` runs and prints its tables.  What the numbers are is not tested: see the README."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("section", "rows"), [("accuracy", 8), ("memory", 1)])
def test_a_table_comes_out(section, rows, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--only", section, "--json", tmp_path / "numbers.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + rows  # a header, a rule
    assert len({line.count("|") for line in table}) == 1
    assert max(map(len, done.stdout.splitlines())) <= 105
    assert len(json.loads((tmp_path / "numbers.json").read_text())[section]) == rows
    if section == "memory":
        assert "yes" in table[-1]
