"""Tables of texts; what is wrong with them, in a sentence."""

import random
from pathlib import Path

import pytest

from dkm.app.errors import Problem
from dkm.app.settings import Settings
from dkm.app.tasks.tables import read_table
from dkm.app.tasks.texts import rows_held_out


def test_a_tenth_of_each_label_is_held_out():
    assert rows_held_out([0, 1] * 20) == {18, 38, 19, 39}
    assert rows_held_out(["a"] * 3 + ["b"]) == {2}


def test_csv_tsv_and_parquet_say_the_same(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    (tmp_path / "t.csv").write_text('idx,question,sentence,label\n0,"who, me?",yes,1\n1,why,no,0\n')
    (tmp_path / "t.tsv").write_text("idx\tquestion\tsentence\tlabel\n0\twho, me?\tyes\t1\n1\twhy\tno\t0\n")
    columns = {"idx": [0, 1], "question": ["who, me?", "why"], "sentence": ["yes", "no"], "label": [1, 0]}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    wanted = [(("who, me?", "yes"), 1), (("why", "no"), 0)]
    for ending in ("csv", "tsv", "parquet"):
        assert read_table(tmp_path / f"t.{ending}", Settings()) == wanted
    one = read_table(tmp_path / "t.csv", Settings(text_columns="sentence"))
    assert one == [(("yes",), 1), (("no",), 0)]


def test_damaged_parquet(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    columns = {"sentence": [f"text {i}" for i in range(200)], "label": [i % 2 for i in range(200)]}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    whole, rng = (tmp_path / "t.parquet").read_bytes(), random.Random(0)
    (tmp_path / "t.parquet").write_bytes(b"")
    with pytest.raises(Problem, match=r"t\.parquet is not a parquet file, or is cut off or damaged"):
        read_table(tmp_path / "t.parquet", Settings())
    problems = 0
    for _ in range(100):
        damaged = bytearray(whole)
        for _ in range(4):
            damaged[rng.randrange(4, len(whole) - 8)] ^= 1 << rng.randrange(8)
        (tmp_path / "t.parquet").write_bytes(damaged)
        try:
            read_table(tmp_path / "t.parquet", Settings())
        except Problem:
            problems += 1
    assert problems  # and nothing else was raised


def test_a_quotation_mark_in_a_tsv_quotes_nothing(tmp_path: Path):
    (tmp_path / "t.tsv").write_text('sentence\tlabel\n"so what\t0\nfine"\t1\n')
    assert read_table(tmp_path / "t.tsv", Settings()) == [(('"so what',), 0), (('fine"',), 1)]


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("sentence,stars\nx,1\n", {}, "has no column 'label'; it has sentence, stars: --label-column"),
        ("sentence,label\nx,1\n", {"text_columns": "text"}, "has no column 'text'; it has sentence, label"),
        ("a,b,c,label\nx,y,z,1\n", {}, "3 columns of text .*: name one or two of them, --text-columns"),
        ("sentence,label\nx,\n", {}, "row 1 of .* is not complete"),
        ("sentence,label\nx,1,2\n", {}, "line 2 of .* does not have the 2 columns"),
    ],
)
def test_tables_with_problems(tmp_path: Path, text: str, options: dict, sentence: str):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(Problem, match=sentence):
        read_table(tmp_path / "t.csv", Settings(**options))
