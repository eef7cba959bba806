"""A lock on a run folder: two processes that train in one folder would spoil each other's log and checkpoints."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import Problem

try:
    import fcntl
except ImportError:  # Windows: there is no lock
    fcntl = None  # type: ignore[assignment]

_held: set[int] = set()  # the open files that hold a lock


@contextlib.contextmanager
def locked(folder: Path, file: Path) -> Iterator[None]:
    """Hold the lock on a run folder; Problem where another process holds it.

    The lock is on `file`, which must be there and must not be replaced while the run goes on; its content stays as it
    is.  The system ends the lock with the process, however that ends.
    """
    if fcntl is None:
        yield
        return
    try:
        handle = os.open(file, os.O_RDWR)  # network file systems lock only what may be written
    except PermissionError:
        handle = os.open(file, os.O_RDONLY)
    _held.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Problem(
                f"another process is running {folder}: wait until it has ended, or stop it, and then --resume"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        if handle in _held:  # it is not in a forked process, which has closed it
            _held.discard(handle)
            os.close(handle)


def _close_in_child() -> None:
    """Close the copies of a forked process: a worker that reads data may live longer than a run that was killed, and
    must not keep its lock."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
