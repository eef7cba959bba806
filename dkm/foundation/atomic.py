"""Files that appear whole or not at all."""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: partial files that a killed process has left behind stay there
    fcntl = None  # type: ignore[assignment]

Writer = Callable[[IO[bytes]], object]

FLAGS = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)


def write_atomically(path: Path, content: bytes | str | Writer) -> int:
    """Write a file and return its size in bytes; `content` may be a function that writes to the stream it is given.

    The bytes go to a partial file in the same folder, which then takes the place of `path`.  A reader, or a crash at
    any moment, sees either the old file or the new one.  Errors (an OSError, or whatever the function raises) leave
    neither a new file nor a partial one behind.  Several threads and processes may write the same path at once: the
    last one to finish wins.

    A file that exists keeps its permissions, and a symbolic link stays one: the file that it leads to is replaced.
    What a killed process has left behind of the same file is removed.
    """
    target = _real(path)
    old = _status(target)
    _remove_leftovers(target)
    # A file that exists may be secret: nobody else may read the new one before it has the old one's permissions.
    partial, handle = _new_partial(target, 0o666 if old is None else 0o600)
    try:
        with os.fdopen(handle, "wb") as stream:
            if callable(content):
                content(stream)
            else:
                stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
            size = stream.tell()
            if old is not None:
                _copy_permissions(old, partial)
            if fcntl is not None:  # before the lock ends, or the file could be taken for a leftover
                os.replace(partial, target)
        if fcntl is None:  # Windows does not rename a file that is open
            os.replace(partial, target)
        return size
    finally:
        with contextlib.suppress(OSError):  # after os.replace there is none
            partial.unlink(missing_ok=True)


def _real(path: Path) -> Path:
    """Where the bytes shall be, past all symbolic links."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


def _status(target: Path) -> os.stat_result | None:
    """The status of the file that will be replaced, or None.  Only a regular file can be: think of /dev/null."""
    try:
        old = os.stat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(old.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if not stat.S_ISREG(old.st_mode):
        raise OSError(errno.EINVAL, "it is a device, pipe or socket", str(target))
    return old


def _copy_permissions(old: os.stat_result, partial: Path) -> None:
    new = os.stat(partial)
    if hasattr(os, "chown") and (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(OSError):  # only root may give files away
            os.chown(partial, old.st_uid, old.st_gid)
    os.chmod(partial, stat.S_IMODE(old.st_mode))


# --- partial files.  Whoever writes one holds an exclusive lock on it, which ends with the process, however it ends.


def _new_partial(target: Path, mode: int) -> tuple[Path, int]:
    """A new, empty, locked file next to the target, under a name that no other process has; and its descriptor."""
    while True:
        partial = target.with_name(f"{_prefix(target)}{secrets.token_hex(8)}.partial")
        try:
            handle = os.open(partial, FLAGS | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            continue
        if fcntl is None:
            return partial, handle
        with contextlib.suppress(OSError):  # a file system without locks: nobody else gets one there either
            fcntl.flock(handle, fcntl.LOCK_EX)
        # Before it was locked, someone who removes leftovers may have taken it for one.
        if partial.exists():
            return partial, handle
        os.close(handle)


def _prefix(target: Path) -> str:
    """How the names of its partial files begin.  A long name gives way to its hash, or they would be too long."""
    name = os.fsencode(target.name)
    return f".{target.name if len(name) <= 200 else hashlib.sha256(name).hexdigest()}."


def _remove_leftovers(target: Path) -> None:
    """Remove the partial files of this target that nobody writes any more."""
    if fcntl is None:
        return
    for partial in _partials(target):
        with contextlib.suppress(OSError):  # it is gone, or not ours to remove
            handle = os.open(partial, FLAGS | os.O_NONBLOCK)
            try:
                if stat.S_ISREG(os.fstat(handle).st_mode):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where someone writes it
                    partial.unlink()
            finally:
                os.close(handle)


def _partials(target: Path) -> Iterator[Path]:
    form = re.compile(re.escape(_prefix(target)) + "[0-9a-f]{16}" + re.escape(".partial"))
    try:
        names = os.listdir(target.parent)
    except OSError:  # a folder may be writable and not readable
        return
    yield from (target.parent / name for name in names if form.fullmatch(name))
