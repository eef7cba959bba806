"""Texts, or pairs of texts, to be classified by a model of transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import Problem
from ..settings import Settings
from .labels import Label, as_values, label_ids
from .metrics import Classification, Metric
from .regression import Regression, check_for_regression
from .tables import TABLES, TextRow, find_table, read_table
from .task import Task, check_that_paths_exist, held_out
from .transformer_files import tokenizer_and_config

EVALUATION = ("dev", "validation", "val", "valid")  # names of tables to evaluate on
LENGTH = 128  # tokens of a text, where the user gives no number


class TextTask(Task):
    """Tables of texts.  A batch is as long as its longest text."""

    unit: ClassVar[str] = "texts"
    default_batch_size: ClassVar[int] = 32
    default_lr: ClassVar[float] = 5e-5

    def metric(self, device: torch.device) -> Metric:
        """Accuracy; of two classes also F1 and Matthews' correlation, as for GLUE's tasks."""
        return Classification(device, pairs=True)

    @classmethod
    def recognizes(cls, settings: Settings) -> bool:
        """A table, or a folder with one that is called `train`."""
        return find_table(settings.data[0], "train") is not None

    @classmethod
    def open(cls, settings: Settings) -> "TextTask":
        """Read the tables and turn all texts into tokens."""
        check_that_paths_exist(settings)
        tables = _find_tables(settings)
        tokenizer, config = tokenizer_and_config(str(settings.model))
        train = [row for path in tables.train for row in read_table(path, settings)]
        evaluation = train
        if tables.eval not in ([], tables.train):
            evaluation = [row for path in tables.eval for row in read_table(path, settings)]
        values = _are_values([row.label for row in (*train, *evaluation)], settings, config, tables.train[0])
        if not tables.eval:
            kept_back = rows_held_out([None if values else row.label for row in train])
            evaluation = [row for i, row in enumerate(train) if i in kept_back]
            train = [row for i, row in enumerate(train) if i not in kept_back]
        if not train or not evaluation:
            raise Problem(f"{(tables.train if not train else tables.eval or tables.train)[0]} has too few rows")

        def encode(rows: list[TextRow], labels: Sequence[int | float]) -> Texts:
            columns = [list(column) for column in zip(*(row.texts for row in rows), strict=True)]
            encoded = tokenizer(*columns, truncation=True, max_length=settings.max_length or LENGTH)
            tokens = [{key: encoded[key][i] for key in encoded} for i in range(len(rows))]
            return Texts(tokens, labels)

        if values:
            check_for_regression(settings)
            numbers = as_values((row.label for row in train), tables.train[0])
            measured = as_values((row.label for row in evaluation), (tables.eval or tables.train)[0])
            examples = encode(train, numbers), encode(evaluation, measured)
            task: TextTask = TextRegression(*examples, 1, Pad(tokenizer))
            task.notes.append("the labels are numbers to be predicted: regression, by a model of one output")
        else:
            ids = label_ids((row.label for row in train), config, tables.train[0])
            unknown = [row.label for row in evaluation if row.label not in ids]
            if unknown:
                raise Problem(f"{tables.eval[0]} has the label {unknown[0]!r}, which {tables.train[0]} has not")
            classes = [[ids[row.label] for row in rows] for rows in (train, evaluation)]
            examples = encode(train, classes[0]), encode(evaluation, classes[1])
            task = cls(*examples, max(ids.values()) + 1, Pad(tokenizer))
        task.measured_places, task.is_held_out = list(map(str, tables.eval or tables.train)), not tables.eval
        return task


class TextRegression(Regression, TextTask):
    """Texts, or pairs of texts, each with a number to be predicted."""


class Texts(Dataset):
    """A dict of tokens and so on for each text, with "labels"."""

    def __init__(self, tokens: list[dict[str, list[int]]], labels: Sequence[int | float]):
        self.tokens, self.labels = tokens, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.tokens[index], "labels": self.labels[index]}


class Pad:
    """Makes a batch of texts, as long as the longest.  A class, so that it can be sent to worker processes."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        return dict(self.tokenizer.pad(items, return_tensors="pt"))


def rows_held_out(labels: Sequence[Any]) -> set[int]:
    """The numbers of the rows to evaluate on: of each label the last of every ten."""
    of_label: dict[Any, list[int]] = {}
    for row, label in enumerate(labels):
        of_label.setdefault(label, []).append(row)
    return {row for rows in of_label.values() for row in held_out(rows)}


class _Tables(NamedTuple):
    """The tables to train on and to evaluate on."""

    train: list[Path]
    eval: list[Path]  # empty: a part of those to train on is held out


def _find_tables(settings: Settings) -> _Tables:
    """What the user names; of a folder with tables of both kinds, these two.

    Where both are to be the same, that is all of it, unless it has a table of its own to evaluate on.
    """
    train = _tables(settings.data, "train")
    inside = find_table(settings.data[0], *EVALUATION)
    own = [] if inside in (None, train[0]) else [inside]
    if settings.eval_data == settings.data:
        return _Tables(train, [table for table in own if table is not None] or train)
    if settings.eval_data:
        return _Tables(train, _tables(settings.eval_data, *EVALUATION))
    return _Tables(train, [table for table in own if table is not None])


def _are_values(labels: Sequence[Label], settings: Settings, config: Any, path: Path) -> bool:
    """Whether the labels are to be predicted as numbers, which one output does: because they have fractions, or because
    the user or the model's folder says one output."""
    fraction = next((label for label in labels if isinstance(label, float)), None)
    if fraction is not None and settings.classes not in (None, 1):
        raise Problem(
            f"{path} has the label {fraction}, which is none of {settings.classes} classes: leave out --classes to "
            "predict such numbers (regression), or name the column with the classes, --label-column"
        )
    one_output = (settings.classes or getattr(config, "num_labels", None)) == 1
    return fraction is not None or one_output


def _tables(paths: Sequence[str], *stems: str) -> list[Path]:
    """The table for each path; Problem where one has none."""
    found = [find_table(path, *stems) for path in paths]
    for path, table in zip(paths, found, strict=True):
        if table is None:
            raise Problem(f"{path} is not a table ({', '.join(TABLES)})")
    return [table for table in found if table is not None]
