"""Several processes: they stop together, go on together, and speak with one voice."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import log_lines, wait_for_log

pytest.importorskip("typer")
pytest.importorskip("accelerate")
import accelerate
from command_place import flags, make_place
from tracker_of_lines import OWN, lines

from dkm.app import cli, settings
from dkm.app.errors import Problem
from dkm.app.run.stage import runs_on_cpu
from dkm.foundation import jsonl


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with pictures, a network and its weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    make_place(tmp_path)
    return tmp_path


LAUNCHERS = {
    "torchrun": "torch.distributed.run --standalone --nproc-per-node 2 -m dkm",
    "accelerate": "accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 0 -m dkm",
}
LONG = dict(batch_size="4", epochs="12", checkpoint_every="0")  # 24 steps of two processes
LONGER = dict(batch_size="4", epochs="40", eval_every="20")  # 80 steps
PATIENCE = 600  # seconds, for a machine that has much else to do


def launch(launcher: str, *arguments: str, seconds_per_step: float = 0) -> subprocess.Popen:
    """As a user does, in a process group of its own.  There is no GPU, and nothing says that this is for CPUs."""
    command = [sys.executable, "-m", *LAUNCHERS[launcher].split(), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"SECONDS_PER_STEP": str(seconds_per_step)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


def our_sentences(errors: str) -> list[str]:
    """Our sentences.  A launcher says more, a traceback of its own among it; there is none of ours."""
    assert not [file for file in re.findall(r'File "(.*?)"', errors) if Path(cli.__file__).parent in Path(file).parents]
    return [line for line in errors.splitlines() if line.startswith("dkm: ")]


def fork(*arguments: str, halt_at: int | None = None) -> list[BaseProcess]:
    """What a launcher would start, in a fraction of the time.  They halt when the log has `halt_at` lines."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def target(rank: int) -> None:
        os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        accelerate.state.AcceleratorState._reset_state(True)
        if halt_at is not None:
            _halt(halt_at)
        cli.main(["compress", "--resume", *arguments])

    processes = [get_context("fork").Process(target=target, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    return processes


def _halt(lines: int) -> None:
    append = jsonl.append

    def append_or_halt(path: Path, record: dict) -> None:
        append(path, record)
        if log_lines(path.parent) >= lines:
            time.sleep(PATIENCE)

    jsonl.append = append_or_halt


def codes(processes: list[BaseProcess]) -> list[int]:
    for process in processes:
        process.join(PATIENCE)
    return [process.exitcode for process in processes]


def test_two_processes_killed_and_resumed(place: Path):
    assert codes(fork(*flags(**LONG, out="whole"))) == [0, 0]
    assert json.loads(Path("whole/result.json").read_text())["steps"] == 18 // (4 * 2) * 12
    for count in (20, 50):
        processes = fork(*flags(**LONG), halt_at=count)
        wait_for_log(processes[0].is_alive, Path("run"), count)
        for process in processes:
            process.kill()
        assert codes(processes) == [-signal.SIGKILL] * 2
    assert codes(fork(*flags(**LONG))) == [0, 0]
    assert Path("run/model.dkm").read_bytes() == Path("whole/model.dkm").read_bytes()


def test_two_processes_share_the_writing_of_a_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    from small_language import language_settings, make_language_place

    monkeypatch.chdir(make_language_place(tmp_path))
    chosen = language_settings(Path(), Path("run"), samples=35, epochs=1)
    words = settings.as_command(chosen).split()[2:]
    assert codes(fork(*words)) == [0, 0]
    tokens = safetensors.torch.load_file("run/samples.safetensors")["tokens"]
    assert tokens.shape == (32, 16)
    assert (tokens[:, 0] == 1).all()
    assert len(tokens.unique(dim=0)) == 32  # neither a text that nobody wrote nor one that both did
    assert json.loads(Path("run/result.json").read_text())["steps"] == 2


def test_the_first_of_two_processes_has_the_tracker(place: Path):
    Path("own.py").write_text(OWN)
    assert codes(fork(*flags(tracker="own.py:Lines", batch_size="4"))) == [0, 0]
    kinds = [kind for kind, *_ in lines(Path("run"))]
    assert [kinds.count(kind) for kind in ("start", "config", "finish")] == [1, 1, 1]
    steps = [record["step"] for record in jsonl.read(Path("run/log.jsonl")) if record["kind"] == "step"]
    told = [rest for kind, *rest in lines(Path("run")) if kind == "log"]
    assert [step for step, values in told if "train/loss" in values] == steps


def test_two_processes_stopped_and_resumed(place: Path):
    """Ctrl-C on torchrun; Accelerate's launcher, which is the same underneath, takes it to the end."""
    assert codes(fork(*flags(**LONGER, out="whole"))) == [0, 0]
    # slow steps: on any machine the signal comes long before the training ends
    process = launch("torchrun", "compress", *flags(**LONGER, device=None), seconds_per_step=0.05)
    wait_for_log(lambda: process.poll() is None, Path("run"), 20)
    os.killpg(process.pid, signal.SIGINT)
    errors = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode != 0
    assert our_sentences(errors) == ["dkm: stopped; go on with the launcher and: -m dkm compress --resume --out run"]
    assert torch.load("run/checkpoints/last.pt", weights_only=True)["done"] < 80
    assert not Path("run/model.dkm").exists()

    process = launch("accelerate", "compress", "--resume", "--out", "run")
    printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert our_sentences(errors) == []
    assert printed.count("times smaller") == printed.count("from step") == 1  # one of them talks
    assert {path.name for path in Path("run").iterdir()} == {path.name for path in Path("whole").iterdir()}
    assert Path("run/model.dkm").read_bytes() == Path("whole/model.dkm").read_bytes()


@pytest.mark.parametrize("case", ["of all", "of the second"])
def test_a_problem_of_two_processes_is_one_sentence(place: Path, case: str):
    Path("images/b/19.png").write_bytes(b"no picture")  # the last of the two held out, which the second one reads
    process = launch("torchrun", "compress", *flags(data="nowhere" if case == "of all" else "images"))
    errors = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode != 0
    sentence = "there is no folder or file nowhere" if case == "of all" else "cannot read the image images/b/19.png"
    assert [line.startswith(f"dkm: {sentence}") for line in our_sentences(errors)] == [True], errors
    assert not Path("run").exists()


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in dict(TORCHELASTIC_RUN_ID="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", LOCAL_RANK="1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert runs_on_cpu(settings.make({"device": "cpu"}))
    with pytest.raises(Problem, match="2 processes need as many GPUs, and there are 1 here"):
        runs_on_cpu(settings.make())
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not runs_on_cpu(settings.make())
