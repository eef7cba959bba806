"""Numbers and tables as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkm.foundation.text import clock_text, size_text, table


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (812, "812 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (12_345, "12.3 kB"),
        (1_000_000, "1.00 MB"),
        (999_949, "999.9 kB"),
        (999_960, "1.00 MB"),
        (999.6, "1.0 kB"),
        (1_094_948, "1.09 MB"),
        (5_000_000_000, "5,000.00 MB"),
    ],
)
def test_size(count: int, text: str):
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (9.4, "0:09"),
        (65, "1:05"),
        (59.6, "1:00"),
        (3599, "59:59"),
        (7209, "2:00:09"),
        (90_000, "25:00:00"),
    ],
)
def test_clock(seconds: float, text: str):
    assert clock_text(seconds) == text


def test_cells_are_aligned_and_no_line_ends_in_spaces():
    lines = [("name", "size", "why"), ("a", "1", ""), ("longer", "1,000", "because")]
    assert table(lines, "<><", 80).splitlines() == ["name    size why", "a          1", "longer 1,000 because"]


def test_a_long_name_is_abbreviated_from_the_left_and_numbers_stay():
    lines = [("distilbert.transformer.layer.3.attention.weight", "1"), ("bias", "2")]
    first = table(lines, "<>", 24).splitlines()[0]
    assert first.startswith("d.t.l.3.")
    assert first.split()[0].endswith("weight")
    assert len(first) <= 24


def test_a_word_that_is_too_long_loses_its_middle():
    (line,) = table([("beginning_of_a_name_without_dots_and_its_end", "1")], "<>", 20).splitlines()
    assert "…" in line
    assert line.split()[0].endswith("its_end")
    assert len(line) == 20


def test_free_text_goes_on_below_itself_where_that_is_asked_for():
    lines = [("tensor.weight", "7", "a reason of many words that nobody can fit into a narrow terminal")]
    assert table(lines, "<><", 40, shrink_last=True).splitlines() == [
        "tensor.weight 7 a reason of many words",
        "                that nobody can fit into",
        "                a narrow terminal",
    ]
    assert len(table(lines, "<><", 40)) > 40


names = st.text("abc.019_", min_size=1, max_size=60)


@given(st.lists(st.tuples(names, st.text("0123456789,", max_size=8), names), min_size=1, max_size=6))
def test_no_line_is_wider_than_the_terminal(lines: list[tuple[str, ...]]):
    text = table(lines, "<><", 60, shrink_last=True)
    assert len(text.split("\n")) == len(lines)
    assert max(map(len, text.split("\n"))) <= 60


@given(st.lists(st.tuples(names, names), min_size=1, max_size=6))
def test_what_fits_is_shown_whole(lines: list[tuple[str, ...]]):
    shown = table(lines, "<<", 200).split("\n")
    assert [line.split() for line in shown] == [list(line) for line in lines]


def test_spare_columns_go_before_names_become_short():
    lines = [["tensor", "shape", "bytes", "codes"], ["layer.weight", "1024x1024", "1,000,000", "abcdefgh"]]
    wide = table(lines, "<<><", 80, spare=("shape", "bytes"))
    assert wide.splitlines()[0].split() == lines[0]
    middle = table(lines, "<<><", 40, spare=("shape", "bytes"))
    assert middle.splitlines()[0].split() == ["tensor", "bytes", "codes"]
    narrow = table(lines, "<<><", 24, spare=("shape", "bytes"))
    assert narrow.splitlines()[0].split() == ["tensor", "codes"]
    assert all(len(line) <= columns for text, columns in ((middle, 40), (narrow, 24)) for line in text.splitlines())
