"""Killed ten times, a training run still ends in the byte-equal file."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "resume.py"
KILLS = 10
MOST = 20  # steps of one life, at most
STEPS = 300  # more than the ten lives together: none of them may reach the end

# The example, which after every line that it prints waits for one: it cannot run ahead of the test, however fast it is
# and however long the test is kept waiting.
PACED = f"""
import builtins, runpy, sys

def paced(*arguments, print=print, **options):
    print(*arguments, **options)
    sys.stdin.readline()

builtins.print = paced
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


def start(out: Path, *, paced: bool = False) -> subprocess.Popen:
    program = ["-c", PACED] if paced else [str(EXAMPLE)]
    command = [sys.executable, "-u", *program, "--out", str(out), "--steps", str(STEPS)]
    stdin = subprocess.PIPE if paced else subprocess.DEVNULL
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True)


def test_killed_ten_times(tmp_path: Path):
    with start(tmp_path / "whole") as process:
        process.communicate()
    assert process.returncode == 0

    rng = random.Random(0)
    seen = []  # the first and the last step of each life
    for _ in range(KILLS):
        patience, steps = rng.randint(1, MOST), []
        with start(tmp_path / "killed", paced=True) as process:
            for line in process.stdout:  # one line per step
                steps.append(int(line.split()[1]))
                process.stdin.write("go on\n")
                process.stdin.flush()
                if len(steps) == patience:
                    break
            time.sleep(rng.uniform(0, 0.02))  # anywhere in the next step, or in the writing of a checkpoint
            process.kill()
            process.stdout.read()
        assert process.returncode == -9, "it ended before it was killed: raise STEPS"
        seen.append((steps[0], steps[-1]))
    assert KILLS * (MOST + 1) < STEPS
    firsts, lasts = zip(*seen, strict=True)
    # A checkpoint is written every 5 steps, and most lives end between two: their last steps are made again.
    assert any(first <= last for first, last in zip(firsts[1:], lasts, strict=False)), "no step was lost: kill harder"

    with start(tmp_path / "killed") as process:
        output, _ = process.communicate()
    assert process.returncode == 0
    assert int(output.split()[1]) > 1, "it began anew"
    assert (tmp_path / "killed" / "model.dkm").read_bytes() == (tmp_path / "whole" / "model.dkm").read_bytes()


def test_a_checkpoint_lost_halfway_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    import resume

    resume.write({"done": 1}, tmp_path / "checkpoint.pt")

    def die(checkpoint: dict, stream) -> None:
        stream.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", die)
    with pytest.raises(KeyboardInterrupt):
        resume.write({"done": 2}, tmp_path / "checkpoint.pt")
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True) == {"done": 1}
