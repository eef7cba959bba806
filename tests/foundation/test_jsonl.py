"""Files of records, one per line, and what is read after a crash."""

from pathlib import Path

import pytest

from dkm.foundation import jsonl


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "file.jsonl"


def test_no_file_is_no_records(path):
    assert jsonl.read(path) == []


def test_appended_records_are_read(path):
    for i in range(3):
        jsonl.append(path, {"i": i, "text": "two\nlines"})
    assert jsonl.read(path) == [{"i": i, "text": "two\nlines"} for i in range(3)]
    assert path.read_text().count("\n") == 3


def test_a_line_cut_off_does_not_count_and_is_replaced(path):
    jsonl.append(path, {"i": 0})
    with open(path, "a") as stream:
        stream.write('{"i": 1, "te')
    assert jsonl.read(path) == [{"i": 0}]
    jsonl.append(path, {"i": 2})
    assert path.read_text() == '{"i": 0}\n{"i": 2}\n'


def test_keep_cuts(path):
    for i in range(3):
        jsonl.append(path, {"i": i})
    jsonl.keep(path, 1)
    assert jsonl.read(path) == [{"i": 0}]


@pytest.mark.parametrize("text", ["hello\n", "[1]\n", '{"i": NaN\n', "\x00\xff\n"])
def test_another_kind_of_file_is_named(path, text):
    jsonl.append(path, {"i": 0})
    with open(path, "a") as stream:
        stream.write(text)
    with pytest.raises(ValueError, match=r"line 2 of .*file\.jsonl is not a JSON object"):
        jsonl.read(path)


def test_nan_is_refused_before_the_file_is_touched(path):
    with pytest.raises(ValueError, match="JSON"):
        jsonl.append(path, {"i": float("nan")})
    assert not path.exists()
