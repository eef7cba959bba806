"""A limit of memory for a few lines of a test."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def limited_memory(extra: int) -> Iterator[None]:
    """No more address space than there is now and `extra` bytes, where the system knows such a limit."""
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
