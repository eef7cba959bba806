"""Functions of the user's own, named on the command line as FILE.py:FUNCTION."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import Problem


def load_function(name: str) -> Callable[..., Any] | None:
    """FILE.py:FUNCTION -> the function; None where the text has another form.  Imports the file."""
    file, colon, function_name = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        return None
    function = getattr(_imported(file), function_name, None)
    if not callable(function):
        raise Problem(f"{file} has no function '{function_name}'")
    return function


def _imported(file: str) -> ModuleType:
    """The module that a file holds, under the file's own name: worker processes import it again by that name."""
    path = Path(file).resolve()
    if not path.is_file():
        raise Problem(f"there is no file {file}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # so that it can import the files beside it
    module = sys.modules.get(path.stem)
    if module is not None and getattr(module, "__file__", None) == str(path):
        return module
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None  # a path that ends in .py always has a loader
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    try:
        found.loader.exec_module(module)
    except SyntaxError as error:
        raise Problem(f"{file} is not Python: {error.msg}, line {error.lineno}") from None
    return module
