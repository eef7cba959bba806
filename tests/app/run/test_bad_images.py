"""--skip-bad-images: what cannot be read is left out, the same in every process and after a resume."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("accelerate")
from command_place import call, flags, make_place
from small_run import log

BAD = ("images/a/00.png", "images/a/18.png", "images/b/07.png")  # 18 is held out


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 20 images, of which one is empty, one no image and one cut off."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    make_place(tmp_path)
    contents = b"", b"no picture", Path(BAD[2]).read_bytes()[:100]
    for name, content in zip(BAD, contents, strict=True):
        Path(name).write_bytes(content)
    return tmp_path


@pytest.mark.usefixtures("place")
def test_off_by_default(capsys):
    call("compress", *flags(), code=2)
    printed = capsys.readouterr().err
    assert (
        "cannot read the image images/a/18.png: it is no image; repair it or take it away, or give --skip-bad"
        in printed
    )


@pytest.mark.usefixtures("place")
def test_they_are_left_out_counted_and_named(capsys):
    call("compress", *flags(), "--skip-bad-images")
    printed = capsys.readouterr().out
    assert f"left out 3 of 20 images, which cannot be read: {', '.join((BAD[1], BAD[0], BAD[2]))}\n" in printed
    assert "16 images to train on, 1 to measure with" in printed
    result = json.loads(Path("run/result.json").read_text())
    assert "--skip-bad-images" in result["command"].split()
    assert "skip-bad-images = true" in Path("run/config.toml").read_text()
    assert json.loads(Path("run/bad-images.json").read_text()) == {"eval": [0], "train": [0, 12]}
    call("eval", "run")
    printed = capsys.readouterr().out
    assert f"{result['accuracy_after']:.2f} % right" in printed
    assert "left out 1 of 2 images" in printed  # those to train on are not looked at


def test_the_same_run_without_them(place: Path):
    """The weights are those of a run on a folder that has only the good ones."""
    call("compress", *flags(), "--skip-bad-images")
    shutil.copytree("images", "good")
    Path("held").mkdir()
    for name in BAD:
        Path("good", *Path(name).parts[1:]).unlink()
    for name in ("a/18.png", "b/19.png"):
        Path("held", name).parent.mkdir()
        Path("good", name).exists() and Path("good", name).rename(Path("held", name))
    shutil.rmtree("held/a")
    call("compress", *flags(data="good", eval_data="held", out="other"))
    assert Path("run/model.dkm").read_bytes() == Path("other/model.dkm").read_bytes()


def test_a_resumed_run_leaves_out_what_it_left_out(place: Path, capsys):
    """Also where a file was repaired in between, and without looking at all of them again."""
    call("compress", *flags(epochs="2"), "--skip-bad-images")
    wanted = Path("run/model.dkm").read_bytes()
    for name in ("result.json", "model.dkm"):
        Path("run", name).unlink()
    shutil.rmtree("run/checkpoints")
    Path("run/checkpoints").mkdir()
    shutil.copy("images/b/01.png", BAD[2])
    capsys.readouterr()
    call("compress", "--resume", "--out", "run")
    assert "left out 3 of 20 images" in capsys.readouterr().out
    assert Path("run/model.dkm").read_bytes() == wanted
    assert log(Path("run"), "step")[-1]["step"] == 4


def test_nothing_is_left(place: Path, capsys):
    Path("images/b/19.png").write_bytes(b"")
    call("compress", *flags(), "--skip-bad-images", code=2)
    assert "none of the images to evaluate on can be read" in capsys.readouterr().err


def test_it_is_for_images(place: Path, capsys):
    call("compress", *flags(data="network.py:data"), "--skip-bad-images", code=2)
    assert "--skip-bad-images is for folders of images: leave it out" in capsys.readouterr().err


def test_a_wrong_value_in_a_config_file(place: Path, capsys):
    Path("c.toml").write_text("skip-bad-images = 1")
    call("compress", "--config", "c.toml", *flags(), code=2)
    assert "--skip-bad-images must be true or false, and not 1" in capsys.readouterr().err


def test_two_processes_leave_out_the_same(place: Path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    common = os.environ | dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
    command = [sys.executable, "-m", "dkm", "compress", *flags(epochs="1", batch_size="4"), "--skip-bad-images"]
    processes = [
        subprocess.Popen(
            command,
            env=common | dict(RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (printed, errors), others = processes[0].communicate(timeout=300), processes[1].communicate(timeout=300)
    assert [process.returncode for process in processes] == [0, 0], (errors, others)
    assert "left out 3 of 20 images" in printed
    assert json.loads(Path("run/bad-images.json").read_text()) == {"eval": [0], "train": [0, 12]}
    assert json.loads(Path("run/result.json").read_text())["steps"] == 2
