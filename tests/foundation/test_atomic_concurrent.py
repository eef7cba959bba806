"""Files that appear whole or not at all, however many write them and however they end."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dkm
from dkm.foundation import atomic
from dkm.foundation.atomic import write_atomically

posix = pytest.mark.skipif(os.name != "posix", reason="permissions, links and locks as POSIX has them")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.bin"


def python(code: str, *arguments: object, **options: Any) -> subprocess.Popen:
    """A process with `write_atomically`; it imports that file alone, because PyTorch takes seconds."""
    environment = {**os.environ, "PYTHONPATH": str(Path(atomic.__file__).parent)}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], env=environment, text=True, **options)


def others(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.iterdir() if each != path)


# --- several at once -----------------------------------------------------------------------------


def test_threads_that_write_one_path(path):
    texts = [bytes([i]) * (50_000 + i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(lambda i: write_atomically(path, texts[i % 8]), range(200)))
    assert sizes == [len(texts[i % 8]) for i in range(200)]
    assert path.read_bytes() in texts
    assert not others(path)


def test_threads_that_save_one_model(path):
    model = nn.Sequential(nn.Linear(8, 8))
    dkm.compress_(model, "0.weight:2", tau=1.0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: dkm.save(model, path), range(40)))
    assert dkm.load(path).keys() == {"0.weight", "0.bias"}
    assert not others(path)


WRITE = """
import sys
from pathlib import Path
from atomic import write_atomically
path, letter = Path(sys.argv[1]), sys.argv[2]
for _ in range(100):
    write_atomically(path, letter * 100_000)
"""


def test_processes_that_write_one_path(path):
    writers = [python(WRITE, path, letter) for letter in "abc"]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    assert path.read_text() in [letter * 100_000 for letter in "abc"]
    assert not others(path)


# --- killed --------------------------------------------------------------------------------------

HALF = """
import sys, time
from pathlib import Path
from atomic import write_atomically

def half(stream):
    stream.write(b"half")
    stream.flush()
    print("here", flush=True)
    time.sleep(600)

write_atomically(Path(sys.argv[1]), half)
"""


@posix
def test_what_a_killed_process_leaves_is_removed_and_what_a_live_one_writes_is_not(path):
    path.write_text("old")
    writer = python(HALF, path, stdout=subprocess.PIPE)
    try:
        assert writer.stdout.readline() == "here\n"
        (partial,) = others(path)
        write_atomically(path, "new")
        assert others(path) == [partial]  # someone is writing it
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(60)
        writer.stdout.close()
    assert others(path) == [partial]
    assert path.read_text() == "new"
    write_atomically(path, "newer")
    assert path.read_text() == "newer"
    assert not others(path)


@posix
def test_only_our_own_partial_files_of_this_file_are_removed(path):
    foreign = [
        ".file.bin.partial",
        ".file.bin.notes.partial",
        ".file.bin.0123456789abcdef.partial.txt",
        ".file.binary.0123456789abcdef.partial",
        ".other.bin.0123456789abcdef.partial",
        "file.bin.0123456789abcdef.partial",
    ]
    for name in foreign:
        (path.parent / name).write_text("keep")
    (path.parent / ".file.bin.0123456789abcdef.partial").write_text("ours")
    (path.parent / ".file.bin.aaaaaaaaaaaaaaaa.partial").symlink_to(path.parent / foreign[0])
    (path.parent / ".file.bin.bbbbbbbbbbbbbbbb.partial").mkdir()
    os.mkfifo(path.parent / ".file.bin.cccccccccccccccc.partial")
    write_atomically(path, "new")
    assert ".file.bin.0123456789abcdef.partial" not in others(path)
    assert set(foreign) < set(others(path))
    assert len(others(path)) == len(foreign) + 3


def test_a_file_with_the_number_of_this_process_is_in_nobodys_way(path):
    """In a container every process has the same number."""
    for name in (f".file.bin.{os.getpid()}.partial", f"file.bin.{os.getpid()}", f".file.bin.{os.getpid()}"):
        (path.parent / name).write_text("left behind")
    write_atomically(path, "new")
    assert path.read_text() == "new"


def test_a_name_as_long_as_names_can_be(tmp_path):
    path = tmp_path / ("n" * 255)
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert not others(path)


def test_an_error_of_the_writer_leaves_nothing(path):
    def fail(stream):
        stream.write(b"half")
        raise KeyError("mine")

    path.write_text("old")
    with pytest.raises(KeyError, match="mine"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert not others(path)


# --- permissions and links -----------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@posix
@pytest.mark.parametrize("permissions", [0o600, 0o640, 0o444, 0o755])
def test_permissions_are_kept(permissions, path):
    path.write_text("old")
    path.chmod(permissions)
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert mode(path) == permissions


@posix
def test_a_secret_file_is_never_readable_by_others(path):
    path.write_text("old")
    path.chmod(0o600)
    seen = []

    def watch(stream):
        seen.append(stat.S_IMODE(os.fstat(stream.fileno()).st_mode))
        stream.write(b"secret")

    write_atomically(path, watch)
    assert seen == [0o600]


UMASK = """
import os, sys
from pathlib import Path
from atomic import write_atomically
os.umask(int(sys.argv[2], 8))
write_atomically(Path(sys.argv[1]), "new")
"""


@posix
@pytest.mark.parametrize(("umask", "expected"), [("022", 0o644), ("077", 0o600), ("002", 0o664)])
def test_a_new_file_follows_the_umask(umask, expected, path):
    assert python(UMASK, path, umask).wait(60) == 0
    assert mode(path) == expected


@posix
def test_the_umask_of_other_threads_is_left_alone(path, monkeypatch):
    def fail(_: int) -> int:
        raise AssertionError("a file that another thread makes meanwhile would get other permissions")

    monkeypatch.setattr(os, "umask", fail)
    write_atomically(path, "new")
    write_atomically(path, "newer")


@posix
def test_a_symbolic_link_stays_one(path, tmp_path):
    (tmp_path / "folder").mkdir()
    real = tmp_path / "folder" / "real.bin"
    real.write_text("old")
    real.chmod(0o600)
    path.symlink_to(Path("folder") / "real.bin")
    write_atomically(path, "new")
    assert path.is_symlink()
    assert real.read_text() == "new"
    assert mode(real) == 0o600
    assert [each.name for each in real.parent.iterdir()] == ["real.bin"]


@posix
def test_a_link_to_a_file_that_does_not_exist_yet(path, tmp_path):
    path.symlink_to(tmp_path / "later.bin")
    write_atomically(path, "new")
    assert path.is_symlink()
    assert (tmp_path / "later.bin").read_text() == "new"


@posix
def test_links_in_a_circle(path, tmp_path):
    other = tmp_path / "other"
    path.symlink_to(other)
    other.symlink_to(path)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        write_atomically(path, "new")
    assert path.is_symlink()
    assert others(path) == ["other"]


@posix
def test_pipes_and_devices_are_not_replaced(path):
    os.mkfifo(path)
    with pytest.raises(OSError, match="it is a device, pipe or socket"):
        write_atomically(path, "new")
    assert stat.S_ISFIFO(path.stat().st_mode)
    model = nn.Sequential(nn.Linear(8, 8))
    dkm.compress_(model, "0.weight:2", tau=1.0)
    with pytest.raises(dkm.FileError, match=f"cannot write {path}: it is a device, pipe or socket"):
        dkm.save(model, path)


def test_saving_while_leftovers_are_removed(path):
    """A partial file that is not locked yet may look like a leftover: whoever makes it notices and makes another."""
    stop = threading.Event()

    def remove() -> None:
        while not stop.is_set():
            write_atomically(path, b"sweeper")

    sweeper = threading.Thread(target=remove)
    sweeper.start()
    try:
        for i in range(300):
            write_atomically(path, str(i))
    finally:
        stop.set()
        sweeper.join()
    assert path.read_text() in ("sweeper", "299")
    assert not others(path)


def test_values_survive_many_saves(path):
    model = nn.Sequential(nn.Linear(4, 4))
    dkm.compress_(model, "0.weight:2", tau=1.0)
    for _ in range(3):
        dkm.save(model, path)
    assert torch.equal(dkm.load(path)["0.weight"], dkm.snap_(model)[0].weight)
