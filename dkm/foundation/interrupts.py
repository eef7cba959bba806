"""Ctrl-C while the command is still being imported, which takes seconds: it ends without a traceback."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

STOPPED = 130  # the exit code after Ctrl-C, as shells have it


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Import in this block: Ctrl-C then ends the process at once, with a sentence, where the process is the command.

    An exception would not do: some of the libraries catch every exception that is raised while they are imported, and
    the others show it with a traceback.  In any other program Ctrl-C means what it always means.
    """
    if not _is_the_command() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    try:
        signal.signal(signal.SIGINT, _stop)
    except ValueError:  # in another thread than the main one
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_the_command() -> bool:
    """Whether the process was started as `dkm` or `python -m dkm`.  The latter is known from `-m`: while Python looks
    for the package, that stands where the name of the script will be."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if program == "-m":
        return "dkm" in sys.orig_argv
    name = os.path.basename(program).removesuffix(".exe")
    return name == "dkm" or program.endswith(os.path.join("dkm", "__main__.py"))


def _stop(number: int, frame: Any) -> None:
    if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
        os.write(2, b"dkm: stopped\n")
    os._exit(STOPPED)
