"""Reading a run folder: what a crash left of it, and what is none."""

import contextlib
import functools
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


HOSTILE = [
    None, True, -1, 0, 0.5, 10**9, 10**400, -(10**400), 1e308, -1e308, 5e-324, math.nan, math.inf, "", "x", "\ud800",
    [], [1], [[]], {}, {"a": {}}, [None] * 3, [1e308, -1e308, 1e308],
]  # fmt: skip


def replaced(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one of its entries, at any depth, replaced by a hostile one."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        copy: Any = value.copy()
        key = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
        copy[key] = replaced(copy[key], rng)
        return copy
    return rng.choice(HOSTILE)


@pytest.mark.parametrize("seed", range(10))
def test_malformed_values_give_a_page_or_a_problem(run: Callable[..., Path], seed: int):
    folder, rng = run(layers=2, steps=100), random.Random(seed)
    names = ("plan.json", "result.json", "log.jsonl")
    whole = {name: (folder / name).read_text() for name in names}
    for _ in range(20):
        for name in names:
            lines = whole[name].splitlines() if name == "log.jsonl" else [whole[name]]
            for at in rng.sample(range(len(lines)), min(3, len(lines))):
                lines[at] = json.dumps(replaced(json.loads(lines[at]), rng))
            (folder / name).write_text("\n".join(lines) + "\n")
        with contextlib.suppress(Problem):
            report.write(folder)
            report.summary(folder)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000 + b"\n", b'{"kind": ["step"], "step": 1}\n'])
@pytest.mark.parametrize("name", FILES)
def test_contents_that_no_run_has_written(run: Callable[..., Path], name: str, content: bytes):
    folder = run()
    (folder / name).write_bytes(content)
    with contextlib.suppress(Problem):
        report.write(folder)


@pytest.mark.parametrize("text", ["[[[", "[1]\n"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_kind_is_named(run: Callable[..., Path], name: str, text: str):
    folder = run()
    (folder / name).write_text(text if name != "config.toml" else "a = = 1")
    if name == "log.jsonl":
        (folder / name).write_text("[1]\n")
    with pytest.raises(Problem, match=re.escape(name)):
        report.write(folder)
