"""Tables of texts with labels: .parquet, .tsv and .csv files."""

import csv
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import Problem
from ..settings import Settings
from .labels import Label, is_number, read_labels

TABLES = (".parquet", ".tsv", ".csv")


class TextRow(NamedTuple):
    """A row of a table."""

    texts: tuple[str, ...]  # one or two
    label: Label  # a number where all labels of the table look like one, otherwise a name


def find_table(path: str, *stems: str) -> Path | None:
    """The table that `path` is, or that the folder `path` holds under one of these names; None where there is none."""
    if Path(path).suffix in TABLES:
        return Path(path)
    candidates = [Path(path, stem + ending) for stem in stems for ending in TABLES]
    return next((file for file in candidates if file.is_file()), None)


def read_table(path: Path, settings: Settings) -> list[TextRow]:
    """The rows of a table, every one of them complete; Problem otherwise."""
    columns = _columns(path)
    if settings.label_column not in columns:
        has = f"it has {', '.join(columns)}: --label-column" if columns else "it has none at all"
        raise Problem(f"{path} has no column '{settings.label_column}'; {has}")
    labels = columns[settings.label_column]
    names = _text_columns(columns, settings)
    for name in names:
        if name not in columns:
            raise Problem(f"{path} has no column '{name}'; it has {', '.join(columns)}: --text-columns")
    if labels and not 1 <= len(names) <= 2:
        raise Problem(
            f"{path} has {len(names)} columns of text ({', '.join(names)}): name one or two of them, --text-columns"
        )
    for row, label in enumerate(labels):
        if label is None or label == "" or any(columns[name][row] is None for name in names):
            raise Problem(f"row {row + 1} of {path} is not complete: fill it or take it away")
    labels = read_labels(labels, path)
    texts = zip(*([str(value) for value in columns[name]] for name in names), strict=True)
    return [TextRow(*row) for row in zip(texts, labels, strict=True)]


def _text_columns(columns: dict[str, list[Any]], settings: Settings) -> list[str]:
    """Those that the user names, or all that hold something else than numbers."""
    if settings.text_columns is not None:
        return [name.strip() for name in settings.text_columns.split(",")]
    return [
        name
        for name, values in columns.items()
        if name != settings.label_column and values and not all(is_number(value) for value in values)
    ]


def _columns(path: Path) -> dict[str, list[Any]]:
    """The name of each column -> its values."""
    return _parquet_columns(path) if path.suffix == ".parquet" else _text_file_columns(path)


def _parquet_columns(path: Path) -> dict[str, list[Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise Problem(f"{path} needs pyarrow: pip install pyarrow") from None
    try:
        return pyarrow.parquet.read_table(path).to_pydict()
    except Exception as error:  # a damaged file raises many kinds, from OSError to TypeError
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Problem(f"{path} is not a parquet file, or is cut off or damaged: {reason}") from None


def _text_file_columns(path: Path) -> dict[str, list[Any]]:
    try:
        with open(path, newline="", encoding="utf-8") as stream:
            if path.suffix == ".tsv":  # the .tsv files of GLUE hold quotation marks that quote nothing
                rows = csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
            else:
                rows = csv.DictReader(stream)
            columns: dict[str, list[Any]] = {name: [] for name in rows.fieldnames or ()}
            for row in rows:
                if None in row or None in row.values():
                    raise Problem(
                        f"line {rows.line_num} of {path} does not have the {len(columns)} columns of the first"
                    )
                for name, value in row.items():
                    columns[name].append(value)
    except (UnicodeDecodeError, csv.Error) as error:
        raise Problem(f"{path} is not a table of text: {error}") from None
    return columns
