"""The labels of a table: values of its label column -> whole numbers or names -> classes."""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import Problem

MOST_CLASSES = 100_000  # a whole number as large as this is no class but an id, a year, a price, ...
MANY_LABELS = 1_000  # from here on, labels of which most occur only once are no classes either

_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?(nan|inf|infinity)", re.IGNORECASE)
_MISSPELT_NUMBER = re.compile(r"[-+]*[\d²³¹⁰-⁹₀-₉]+")

ANOTHER_COLUMN = "name the column with the classes, --label-column"

Label = int | float | str  # a float only where it has a fraction


def is_number(value: Any) -> bool:
    """Whether a value of a table is a number, or text that spells one."""
    return isinstance(value, int | float) or (isinstance(value, str) and _NUMBER.fullmatch(value.strip()) is not None)


def read_labels(values: Sequence[Any], path: Path) -> list[Label]:
    """The labels in a column: numbers where every value is one, otherwise names.  Problem where a value can be neither.
    None of the values is None."""
    for row, value in enumerate(values, 1):
        if not isinstance(value, int | float | str):
            raise Problem(
                f"row {row} of {path} has a label that is a {type(value).__name__}: labels are whole numbers or names"
            )
        if isinstance(value, str) and _MISSPELT_NUMBER.fullmatch(value.strip()) and not is_number(value):
            raise Problem(
                f"row {row} of {path} has the label {value!r}, which is neither a whole number nor a name: write it "
                "with the digits 0 to 9, and at most one sign"
            )
    if all(is_number(value) for value in values):
        return [_number(value, f"row {row} of {path}") for row, value in enumerate(values, 1)]
    return [str(value) for value in values]


def _number(value: Any, where: str) -> int | float:
    number = float(value) if _length(value) < 400 else math.inf
    if math.isnan(number):
        raise Problem(f"{where} has the label {value}, which is no number: fill it or take the row away")
    if abs(number) >= 2**53:  # past these a float is not exact
        raise Problem(f"{where} has a label that is too large for the number of a class: {ANOTHER_COLUMN}")
    return int(number) if number.is_integer() else number


def _length(value: Any) -> int:
    """About how many digits a whole number or a text has; float() and int() refuse those with thousands of them."""
    return len(value) if isinstance(value, str) else value.bit_length() // 3 if isinstance(value, int) else 0


def as_values(labels: Iterable[Label], path: Path) -> list[float]:
    """The labels of a table as what regression predicts; Problem where one is a name."""
    found = list(labels)
    for label in found:
        if isinstance(label, str):
            raise Problem(f"{path} has the label {label!r}, and regression needs numbers: {ANOTHER_COLUMN}")
    return [float(label) for label in found]


def label_ids(labels: Iterable[Label], config: Any, path: Path) -> dict[Label, int]:
    """Label -> class, for the labels of all rows to train on, none of which has a fraction.

    Whole numbers that could be those of classes are their own classes, and so are those between them that do not occur.
    Other whole numbers, such as 10, 20 and 30, are numbered in their order.  A name has the class that the config of
    the model gives it, or, where the config does not know all names, its place in alphabetical order.
    """
    rows = list(labels)
    occurring = set(rows)
    numbers = sorted(label for label in occurring if isinstance(label, int))
    names = sorted(label for label in occurring if isinstance(label, str))
    if numbers and names:
        raise Problem(f"{path} and the tables beside it have numbers and names as labels: {numbers[0]}, {names[0]!r}")
    if names:
        known = getattr(config, "label2id", None) or {}
        if all(name in known for name in names):
            return dict(known)
    elif numbers[0] < 0:
        raise Problem(f"{path} has the label {numbers[0]}: rows without a label cannot be trained on")
    elif numbers[-1] >= MOST_CLASSES:
        raise Problem(f"{path} has the label {numbers[-1]}, too large for the number of a class: {ANOTHER_COLUMN}")
    if len(occurring) > max(MANY_LABELS, len(rows) / 2):
        raise Problem(
            f"{path} has {len(occurring):,} different labels in {len(rows):,} rows, too many for classes: "
            f"{ANOTHER_COLUMN}"
        )
    if numbers and numbers[-1] < max(2 * len(numbers), getattr(config, "num_labels", None) or 0):
        return {label: label for label in range(numbers[-1] + 1)}
    in_order: list[Label] = [*numbers, *names]  # only one of the two has entries
    return {label: index for index, label in enumerate(in_order)}
