"""The errors that the command shows as one sentence."""

import contextlib
import sys
from collections.abc import Iterator

from ..foundation.errors import DKMError


class Problem(DKMError):
    """Something that the user can put right.  The message is one sentence: what is wrong, and what to do."""


class WriteProblem(Problem):
    """A file of a run could not be written, for example because the disk is full.  What is there already is whole."""


@contextlib.contextmanager
def as_problems() -> Iterator[None]:
    """Turn the library's ValueError and TypeError into a Problem: the user gave the arguments that they are about."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise Problem(" ".join(str(error).split())) from error


def reason_of(error: BaseException) -> str:
    """Why the operating system refused, in words: "No space left on device"."""
    return str(getattr(error, "strerror", None) or error)


def say(sentence: str) -> None:
    """Print a sentence of the command, as one line, where errors go."""
    print(f"dkm: {' '.join(sentence.split())}", file=sys.stderr, flush=True)
