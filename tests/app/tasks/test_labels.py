"""Labels of tables: which of them are classes; those that cannot be get a sentence."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dkm.app.errors import Problem
from dkm.app.settings import Settings
from dkm.app.tasks.labels import label_ids, read_labels
from dkm.app.tasks.tables import read_table

HERE = Path("t.csv")
CONFIG = SimpleNamespace(num_labels=2, label2id={"LABEL_0": 0, "LABEL_1": 1})


def read_csv(folder: Path, labels: list[str]) -> list[Any]:
    (folder / "t.csv").write_text("sentence,label\n" + "".join(f"x,{label}\n" for label in labels), encoding="utf-8")
    return [row.label for row in read_table(folder / "t.csv", Settings())]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["0", "1", "-1"], [0, 1, -1]),
        (["0.0", "1.0"], [0, 1]),
        (["0.2", "1"], [0.2, 1]),
        (["yes", "no"], ["yes", "no"]),
        (["1", "no"], ["1", "no"]),
        (["0.5", "unknown"], ["0.5", "unknown"]),  # names, as one of them is no number
        (["5-stars", "m²"], ["5-stars", "m²"]),
    ],
)
def test_whole_numbers_and_names(tmp_path: Path, written: list[str], read: list[Any]):
    assert read_csv(tmp_path, written) == read


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (["1", "²"], "row 2 of .* has the label '²', which is neither a whole number nor a name"),
        (["1", "٣"], "row 2 of .* has the label '٣', which is neither"),
        (["0", "--5"], "row 2 of .* has the label '--5', which is neither"),
        (["0", "NaN"], "row 2 of .* has the label NaN, which is no number"),
        (["0", "inf"], "row 2 of .* has a label that is too large"),
        (["0", "9" * 5000], "row 2 of .* has a label that is too large"),
    ],
)
def test_text_that_is_no_label(tmp_path: Path, written: list[str], sentence: str):
    with pytest.raises(Problem, match=sentence):
        read_csv(tmp_path, written)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([0.0, math.nan], "row 2 of .* has the label nan, which is no number"),
        ([1, math.inf], "too large for the number of a class"),
        ([1, 10**5000], "too large for the number of a class"),
        ([[1], [2]], "row 1 of .* has a label that is a list"),
        ([{"a": 1}], "row 1 of .* has a label that is a dict"),
        ([b"yes"], "row 1 of .* has a label that is a bytes"),
    ],
)
def test_values_that_are_no_labels(values: list[Any], sentence: str):
    with pytest.raises(Problem, match=sentence):
        read_labels(values, HERE)


def test_parquet_with_lists_and_nan(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    for labels, sentence in (([[1], [2]], "is a list"), ([0.0, math.nan], "has the label nan")):
        pyarrow.parquet.write_table(pa.table({"sentence": ["x", "y"], "label": labels}), tmp_path / "t.parquet")
        with pytest.raises(Problem, match=sentence):
            read_table(tmp_path / "t.parquet", Settings())


@pytest.mark.parametrize(
    ("labels", "ids"),
    [
        ([0, 1, 1], {0: 0, 1: 1}),
        ([0, 2, 3], {0: 0, 1: 1, 2: 2, 3: 3}),
        ([1], {0: 0, 1: 1}),
        ([10, 30, 20, 10], {10: 0, 20: 1, 30: 2}),
        ([99_999, 0], {0: 0, 99_999: 1}),
        (["b", "a"], {"a": 0, "b": 1}),
        (["LABEL_1"], {"LABEL_0": 0, "LABEL_1": 1}),
    ],
)
def test_classes(labels: list[Any], ids: dict[Any, int]):
    assert label_ids(labels, CONFIG, HERE) == ids


def test_the_model_may_have_more_classes_than_the_table():
    config = SimpleNamespace(num_labels=50, label2id={})
    assert label_ids([49, 3], config, HERE) == {label: label for label in range(50)}


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ([3_000_000_000, 1], "has the label 3000000000, too large for the number of a class: .*--label-column"),
        (list(range(1500)), "has 1,500 different labels in 1,500 rows, too many for classes"),
        ([f"name {i}" for i in range(1500)], "has 1,500 different labels"),
        ([-1, 0], "has the label -1: rows without a label"),
        ([0, "a"], "have numbers and names as labels: 0, 'a'"),
    ],
)
def test_labels_that_are_no_classes(labels: list[Any], sentence: str):
    with pytest.raises(Problem, match=sentence):
        label_ids(labels, CONFIG, HERE)
