"""The table of all tensors."""

import json
from pathlib import Path

from sample_run import write, write_run
from torch import nn

import dkm
from dkm.app import report
from dkm.app.report.plan_table import plan_table
from dkm.app.run_folder import plan_file


def test_groups_have_a_column_of_centroids(tmp_path: Path):
    folder, text = write_run(tmp_path / "run"), "0.weight:2 scaled, 1.weight:3 per 8x64 e4m3"
    plan = dkm.plan(nn.Sequential(nn.Linear(128, 96), nn.Linear(96, 128)), text)
    (folder / "plan.json").write_text(json.dumps(plan_file(plan, text)))
    table = plan_table(report.read(folder))
    assert table is not None
    cells = [dict(zip(table.columns, row.cells, strict=False)) for row in table.rows]
    assert [cell["bits/dim"] for cell in cells] == ["2/1 scaled", "keep", "3/1 per 8x64 e4m3", "keep"]
    assert [cell["centroids"] for cell in cells] == ["4", "", "8 × 32", ""]
    assert cells[2]["bytes"] == f"{(3 * 96 * 128 + 32 * 8 * 8) // 8:,}"
    assert "3/1 per 8x64 e4m3" in write(folder).text


def test_a_plan_without_groups_has_none(tmp_path: Path):
    table = plan_table(report.read(write_run(tmp_path / "run")))  # its rows have no labels, as those of older runs
    assert table is not None
    assert "centroids" not in table.columns
    assert [row.cells[2] for row in table.rows[:2]] == ["4/4", "keep"]
