"""Files and folders that other libraries write: they appear whole, and only if nothing went wrong.

`atomic.py` writes bytes that we have; here a library wants a path to write to.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: what a killed process has left behind stays there
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A place of the same name in a new folder beside `path`, to write a file or a folder to.

    At the end it takes the place of `path`.  After an exception, `path` is as it was, and nothing else remains.  A file
    is replaced; a folder is not, unless it is empty, because it may hold what is not ours.  What a killed process has
    left behind of the same name is removed.  OSError where nothing can be written.
    """
    target = Path(os.path.realpath(path))
    _remove_leftovers(target)
    folder = target.with_name(f"{_prefix(target)}{secrets.token_hex(8)}.partial")
    folder.mkdir()
    handle = os.open(folder, os.O_RDONLY) if fcntl is not None else None
    try:
        if handle is not None:
            with contextlib.suppress(OSError):  # a file system without locks: nobody else gets one there either
                fcntl.flock(handle, fcntl.LOCK_EX)
        place = folder / target.name
        yield place
        os.replace(place, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def bytes_of(path: Path) -> int:
    """The size of a file, or of all files in a folder."""
    return sum(each.stat().st_size for each in ([path] if path.is_file() else path.rglob("*")) if each.is_file())


def _prefix(target: Path) -> str:
    return f".{target.name[:150]}.folder."


def _remove_leftovers(target: Path) -> None:
    """Remove the folders of this target that nobody writes to any more."""
    if fcntl is None:
        return
    form = re.compile(re.escape(_prefix(target)) + "[0-9a-f]{16}" + re.escape(".partial"))
    with contextlib.suppress(OSError):  # a folder may be writable and not readable
        for name in os.listdir(target.parent):
            if form.fullmatch(name):
                _remove_unlocked(target.with_name(name))


def _remove_unlocked(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is gone, locked, or not ours to remove
        handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(handle)
