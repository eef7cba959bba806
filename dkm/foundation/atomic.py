"""Files that appear whole or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

Writer = Callable[[IO[bytes]], object]


def write_atomically(path: Path, content: bytes | str | Writer) -> int:
    """Write a file and return its size in bytes; `content` may be a function that writes to the stream it is given.

    The bytes go to a temporary file in the same folder, which then takes the place of `path`.  A reader, or a crash at
    any moment, sees either the old file or the new one.  Errors (an OSError, or whatever the function raises) leave
    neither a new file nor a temporary one behind.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            if callable(content):
                content(stream)
            else:
                stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
            size = stream.tell()
        os.chmod(partial, 0o666 & ~_umask())  # mkstemp lets nobody but the owner read
        os.replace(partial, path)
        return size
    finally:
        with contextlib.suppress(OSError):  # after os.replace there is none
            partial.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)  # the only way to read it is to set it
    os.umask(mask)
    return mask
