"""The section about sizes: its bars are the whole file."""

import json
import math
from pathlib import Path

import pytest
from sample_run import write_run

from dkm.app import report
from dkm.app.report.sizes import BUFFERS, HEADER, sizes, stored_sizes


@pytest.mark.parametrize("layers", [1, 3, 100])
@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("older", [True, False])
def test_the_bars_are_the_whole_file(tmp_path: Path, layers: int, finished: bool, older: bool):
    run = report.read(write_run(tmp_path / "run", layers=layers, finished=finished, older=older))
    shown = sizes(run)
    assert math.isclose(sum(bar.percent for bar in shown.bars), 100)
    assert math.isclose(sum(part.percent for part in shown.parts), 100)
    stored = stored_sizes(run)
    assert sum(stored.tensors.values()) + stored.buffers + stored.rest == run.size


def test_statistics_and_the_header_have_bars(tmp_path: Path):
    shown = sizes(report.read(write_run(tmp_path / "run", older=False)))
    assert [(bar.name, bar.size) for bar in shown.bars[-2:]] == [(BUFFERS, "256 B"), (HEADER, "644 B")]
    assert [(part.name, part.size) for part in shown.parts] == [
        ("codes", "6.1 kB"), ("centroids", "384 B"), ("not clustered", "384 B"), (BUFFERS, "256 B"), (HEADER, "644 B"),
    ]  # fmt: skip


@pytest.mark.parametrize("sizes_of_the_file", [{"header": -5}, {"header": "x"}, [1], None, {"header": None}])
def test_sizes_that_are_none(tmp_path: Path, sizes_of_the_file: object):
    folder = write_run(tmp_path / "run", older=False)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"file": sizes_of_the_file}))
    run = report.read(folder)
    assert run.stored == {}
    assert run.size == result["bytes_file"]
