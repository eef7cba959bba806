"""Files that appear whole or not at all."""

import errno
import os
import stat
from pathlib import Path

import pytest

from dkm.foundation.atomic import write_atomically


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.bin"


@pytest.mark.parametrize(
    ("content", "written"),
    [
        (b"bytes \x00\xff", b"bytes \x00\xff"),
        ("text, ä…", "text, ä…".encode()),
        ("", b""),
        (lambda stream: [stream.write(b"one "), stream.write(b"two")], b"one two"),
    ],
    ids=["bytes", "text", "nothing", "a function"],
)
def test_the_file_holds_the_content_and_its_size_is_returned(content, written: bytes, path: Path):
    assert write_atomically(path, content) == len(written)
    assert path.read_bytes() == written
    assert list(path.parent.iterdir()) == [path]


def test_an_old_file_is_replaced(path: Path):
    path.write_bytes(b"a longer old content")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_nothing_is_seen_before_all_is_written(path: Path):
    path.write_bytes(b"old")

    def halfway(stream) -> None:
        stream.write(b"half")
        stream.flush()
        assert path.read_bytes() == b"old"

    write_atomically(path, halfway)
    assert path.read_bytes() == b"half"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("existing", [True, False])
def test_a_function_that_fails_leaves_what_was_there(error: type[BaseException], existing: bool, path: Path):
    if existing:
        path.write_bytes(b"old")

    def fails(stream) -> None:
        stream.write(b"half")
        raise error("no")

    with pytest.raises(error):
        write_atomically(path, fails)
    assert [file.read_bytes() for file in path.parent.iterdir()] == [b"old"] * existing


@pytest.mark.parametrize("call", ["fsync", "chmod", "replace"])
def test_a_system_call_that_fails_leaves_what_was_there(call: str, path: Path, monkeypatch: pytest.MonkeyPatch):
    path.write_bytes(b"old")

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert [file.read_bytes() for file in path.parent.iterdir()] == [b"old"]


def test_a_folder_that_does_not_exist(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "nowhere" / "file.bin", b"new")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0o000, 0o666)])
def test_permissions_follow_the_umask(umask: int, mode: int, path: Path):
    before = os.umask(umask)
    try:
        write_atomically(path, b"new")
        assert os.umask(umask) == umask  # reading the mask has not changed it
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
