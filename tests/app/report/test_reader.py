"""Reading a run folder: what a crash left of it, and what is none."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_run import write, write_run

from dkm.app import report
from dkm.app.errors import Problem
from dkm.app.run_folder import FILES
from dkm.foundation import jsonl


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run folder; see `write_run`."""
    return functools.partial(write_run, tmp_path / "run")


def test_steps_repeated_after_a_crash_count_once(run: Callable[..., Path]):
    folder = run(finished=False)
    again = dict(kind="eval", step=200, epoch=4.0, soft=None, snapped=12.34, loss=1.0)
    jsonl.append(folder / "log.jsonl", again)
    assert [record.step for record in report.read(folder).evaluations] == [0, 50, 100, 150, 200]
    assert "12.34" in write(folder).text


def test_a_log_that_was_cut_off_counts_to_its_last_whole_line(run: Callable[..., Path]):
    folder = run(finished=False)
    with open(folder / "log.jsonl", "ab") as stream:
        stream.write(b'{"kind": "eval", "step": 999, "ep')
    assert "epoch 4.0 of 4" in write(folder).text


def test_what_is_not_a_run_folder(tmp_path: Path):
    with pytest.raises(Problem, match=r"there is no run folder .*nowhere"):
        report.write(tmp_path / "nowhere")
    with pytest.raises(Problem, match=r"is not a run folder: it has none of config\.toml"):
        report.write(tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["[[[", "[1]\n"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_kind_is_named(run: Callable[..., Path], name: str, text: str):
    folder = run()
    (folder / name).write_text(text if name != "config.toml" else "a = = 1")
    if name == "log.jsonl":
        (folder / name).write_text("[1]\n")
    with pytest.raises(Problem, match=re.escape(name)):
        report.write(folder)
