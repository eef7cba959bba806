"""Which output of the model each class folder is."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..errors import Problem, reason_of

BY_LIST = "name all classes in the order of the outputs, --class-list FILE"


class Numbered(NamedTuple):
    """The output of each class, and what the user should know about it."""

    labels: dict[str, int]
    classes: int  # how many there are, with those that have no folder
    by_name: bool  # neither a list nor the names say which output is which: they have the order of the names
    notes: list[str]


def number_classes(names: Iterable[str], others: Iterable[str], *, outputs: int | None, file: str | None) -> Numbered:
    """The outputs of the folders with these `names`, to train on, and of those of the `others`, to evaluate on.

    A class list (`file`) says it.  Without one, names that all are whole numbers below the number of outputs are the
    outputs.  All other names have their places in alphabetical order, as in torchvision's ImageFolder.  `outputs` is
    None where the model is made for as many classes as there are.  Raises Problem where it cannot be meant.
    """
    ordered = sorted(names)
    if file is not None:
        return _listed(ordered, outputs, file)
    wanted = outputs or len(ordered)
    if len(ordered) > wanted:
        raise Problem(f"there are {len(ordered)} class folders for a model of {wanted} outputs (--classes): {BY_LIST}")
    everything = sorted({*ordered, *others})
    if all(_is_below(name, wanted) for name in everything) and len({int(name) for name in everything}) == len(
        everything
    ):
        notes = []
        if len(ordered) == wanted and sorted(ordered, key=int) != ordered:
            notes.append(
                "the class folders are numbers, and each is the output of its number; torchvision's ImageFolder would "
                f"take them in the order {', '.join(ordered[:3])}, ...: if your model was trained so, {BY_LIST}"
            )
        return Numbered({name: int(name) for name in everything}, wanted, by_name=False, notes=notes)
    labels = {name: label for label, name in enumerate(ordered)}
    notes = [differing(len(ordered), wanted)] if len(ordered) != wanted else []
    return Numbered(labels, wanted, by_name=True, notes=notes)


def differing(folders: int, outputs: int) -> str:
    """The warning where there are fewer class folders than outputs, and nothing says which output each is."""
    return (
        f"warning: there are {folders} class folders for {outputs} outputs, and they are taken as the outputs 0 to "
        f"{folders - 1} in the order of their names; if they are others, {BY_LIST}"
    )


def _is_below(name: str, outputs: int) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10 and int(name) < outputs


def _listed(names: list[str], outputs: int | None, file: str) -> Numbered:
    listed = _read(file)
    if outputs is not None and len(listed) > outputs:
        raise Problem(f"{file} has {len(listed)} classes, and the model has {outputs} outputs (--classes)")
    labels = {name: label for label, name in enumerate(listed)}
    for name in names:
        if name not in labels:
            raise not_listed(name, labels, file)
    return Numbered(labels, outputs or len(listed), by_name=False, notes=[])


def not_listed(name: str, labels: Iterable[str], file: str) -> Problem:
    """The problem of a class folder that is not in the list."""
    close = difflib.get_close_matches(name, labels, n=1)
    hint = f"did you mean '{close[0]}'?" if close else "each line must be the name of a folder"
    return Problem(f"the class '{name}' is not in {file}: {hint}")


def _read(file: str) -> list[str]:
    """The names in a class list, one in each line."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise Problem(f"{file} is not a list of classes: it is no text file in UTF-8") from None
    except OSError as error:
        raise Problem(f"cannot read the class list {file}: {reason_of(error)}") from None
    names = [line.strip() for line in lines]
    while names and not names[-1]:
        names.pop()
    seen: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if not name:
            raise Problem(f"line {number} of {file} is empty: each line is the class of one output")
        if name in seen:
            raise Problem(f"lines {seen[name]} and {number} of {file} are both '{name}'")
        seen[name] = number
    if not names:
        raise Problem(f"{file} has no classes in it: write the name of a class folder in each line")
    return names
