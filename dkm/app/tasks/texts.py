"""Texts, or pairs of texts, to be classified by a model of transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import Problem
from ..settings import Settings
from .labels import label_ids
from .metrics import Classification, Metric
from .tables import TABLES, TextRow, find_table, read_table
from .task import Task, check_that_paths_exist, held_out
from .transformer_files import tokenizer_and_config

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
    def open(cls, settings: Settings) -> Self:
        """Read the tables and turn all texts into tokens."""
        check_that_paths_exist(settings)
        train_at = _tables(settings.data, "train")
        names = ("dev", "validation", "val", "valid")
        eval_at = _tables(settings.eval_data, *names) or [find_table(settings.data[0], *names) or train_at[0]]
        tokenizer, config = tokenizer_and_config(str(settings.model))
        train = [row for path in train_at for row in read_table(path, settings)]
        if eval_at == train_at[:1]:  # nothing was given to evaluate on
            kept_back = rows_held_out([row.label for row in train])
            evaluation = [row for i, row in enumerate(train) if i in kept_back]
            train = [row for i, row in enumerate(train) if i not in kept_back]
        else:
            evaluation = [row for path in eval_at for row in read_table(path, settings)]
        if not train or not evaluation:
            raise Problem(f"{(train_at if not train else eval_at)[0]} has too few rows")
        ids = label_ids((row.label for row in train), config, train_at[0])
        unknown = [row.label for row in evaluation if row.label not in ids]
        if unknown:
            raise Problem(f"{eval_at[0]} has the label {unknown[0]!r}, which {train_at[0]} has not")

        def encode(rows: list[TextRow]) -> Texts:
            columns = [list(column) for column in zip(*(row.texts for row in rows), strict=True)]
            encoded = tokenizer(*columns, truncation=True, max_length=settings.max_length or LENGTH)
            tokens = [{key: encoded[key][i] for key in encoded} for i in range(len(rows))]
            return Texts(tokens, [ids[row.label] for row in rows])

        return cls(encode(train), encode(evaluation), max(ids.values()) + 1, Pad(tokenizer))


class Texts(Dataset):
    """A dict of tokens and so on for each text, with "labels"."""

    def __init__(self, tokens: list[dict[str, list[int]]], labels: list[int]):
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


def _tables(paths: Sequence[str], *stems: str) -> list[Path]:
    """The table for each path; Problem where one has none."""
    found = [find_table(path, *stems) for path in paths]
    for path, table in zip(paths, found, strict=True):
        if table is None:
            raise Problem(f"{path} is not a table ({', '.join(TABLES)})")
    return [table for table in found if table is not None]
