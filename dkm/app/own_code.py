"""Functions of the user's own, named on the command line as FILE.py:FUNCTION, and what goes wrong in them."""

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .errors import Problem

_FOLDERS: set[Path] = set()  # of the files that were imported: what lies beside them is the user's code, too
_DKM = Path(__file__).resolve().parents[1]
_INSTALLED = {"site-packages", "dist-packages"}


class OwnCodeProblem(Problem):
    """An exception in the user's own code.  `frames` is the part of the traceback that is theirs."""

    frames = ""


def names_function(name: str) -> bool:
    """Whether a text has the form FILE.py:FUNCTION."""
    file, colon, _ = name.rpartition(":")
    return bool(colon) and file.endswith(".py")


def load_function(name: str) -> Callable[..., Any] | None:
    """FILE.py:FUNCTION -> the function; None where the text has another form.  Imports the file."""
    if not names_function(name):
        return None
    file, _, function_name = name.rpartition(":")
    function = getattr(_imported(file), function_name, None)
    if not callable(function):
        raise Problem(f"{file} has no function '{function_name}'")
    return function


def _imported(file: str) -> ModuleType:
    """The module that a file holds, under the file's own name: worker processes import it again by that name."""
    path = Path(file).resolve()
    if not path.is_file():
        raise Problem(f"there is no file {file}")
    _FOLDERS.add(path.parent)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # so that it can import the files beside it
    module = sys.modules.get(path.stem)
    if module is not None and getattr(module, "__file__", None) == str(path):
        return module
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None  # a path that ends in .py always has a loader
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    try:
        found.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[path.stem]  # half a module would be found by the next one who looks for it
        if before is not None:
            sys.modules[path.stem] = before
        if isinstance(error, SyntaxError) and error.filename == str(path):
            raise Problem(f"{file} is not Python: {error.msg}, line {error.lineno}") from None
        raise
    return module


@contextlib.contextmanager
def own_problems() -> Iterator[None]:
    """Turn an exception in the user's own code into a Problem; others stay what they are."""
    try:
        yield
    except Exception as error:
        problem = problem_in_own_code(error)
        if problem is None:
            raise
        raise problem from error


def problem_in_own_code(error: Exception) -> OwnCodeProblem | None:
    """The problem for an exception in the user's code, or in what that has called; None where dkm is to blame: where it
    was called by the user's code, or where none of that was running."""
    frames = traceback.extract_tb(error.__traceback__)
    last = max((at for at, frame in enumerate(frames) if _is_own(frame.filename)), default=-1)
    if (
        last < 0
        or isinstance(error, Problem | torch.OutOfMemoryError)
        or any(_is_dkms(frame.filename) for frame in frames[last:])
    ):
        return None
    where = frames[last]
    said = " ".join(str(error).split())
    problem = OwnCodeProblem(
        f"{Path(where.filename).name}, line {where.lineno}, in {where.name}: {type(error).__name__}"
        f"{': ' if said else ''}{said}"
    )
    own = [frame for frame in frames if _is_own(frame.filename)]
    problem.frames = "Traceback, of your code alone:\n" + "".join(traceback.format_list(own))
    return problem


def _is_own(file: str) -> bool:
    path = Path(file)
    return (
        any(path.is_relative_to(folder) for folder in _FOLDERS)
        and not _INSTALLED.intersection(path.parts)
        and not _is_dkms(file)
    )


def _is_dkms(file: str) -> bool:
    return Path(file).is_relative_to(_DKM)
