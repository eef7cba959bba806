"""The text of a plan, and of a size: what is understood, and what the error says of the rest."""

import pytest
from example_models import resnet_like
from hypothesis import given
from hypothesis import strategies as st

import dkm
from dkm import PlanError
from dkm.plans.language import Entry, parse, parse_size, quoted

ACCEPTED = {
    "cv:4": [Entry("cv", 4, 1)],
    "cv:4/4": [Entry("cv", 4, 4)],
    "cv:12/16": [Entry("cv", 12, 16)],
    "cv:04/02": [Entry("cv", 4, 2)],
    "cv:keep": [Entry("cv", None, 1)],
    "  cv : 4 / 4  ": [Entry("cv", 4, 4)],
    "cv:6/8, fc:6/10": [Entry("cv", 6, 8), Entry("fc", 6, 10)],
    "cv:6/8,fc:keep,cv:2": [Entry("cv", 6, 8), Entry("fc", None, 1), Entry("cv", 2, 1)],
    "all:1\n,\tfirst:8": [Entry("all", 1, 1), Entry("first", 8, 1)],
    "layer4.*:4": [Entry("layer4.*", 4, 1)],
    "layer4.0.conv1.weight:keep": [Entry("layer4.0.conv1.weight", None, 1)],
    "a:b:4": [Entry("a:b", 4, 1)],
    "no.such.thing:3/3": [Entry("no.such.thing", 3, 3)],
}


@pytest.mark.parametrize("text", ACCEPTED)
def test_accepted(text):
    assert parse(text) == ACCEPTED[text]


REJECTED = {  # text -> the word that the error quotes
    "cv": "cv",
    "cv:": "cv:",
    ":4": ":4",
    ":": ":",
    "cv 4": "cv 4",
    "cv:4/": "4/",
    "cv:/4": "/4",
    "cv:4/4/4": "4/4/4",
    "cv:0": "0",
    "cv:13": "13",
    "cv:4/0": "4/0",
    "cv:-1": "-1",
    "cv:+1": "+1",
    "cv:4/-2": "4/-2",
    "cv:4.5": "4.5",
    "cv:1e1": "1e1",
    "cv:1_0": "1_0",
    "cv:0x4": "0x4",
    "cv:four": "four",
    "cv:Keep": "Keep",
    "cv:keep/4": "keep/4",
    "cv:４": "４",  # a full-width digit
    "cv:²": "²",
    "cv:٤/٤": "٤/٤",
    "cv:4 4": "4 4",
    "cv:4;fc:8": "8",  # the selector 'cv:4;fc' is read, and no tensor has that name
    "cv:4,,fc:8": "",
    "cv:4,": "",
    ",cv:4": "",
    ",": "",
    "cv:" + "9" * 5000: "9" * 5000,  # more digits than int() takes
    "cv:4/" + "9" * 5000: "4/" + "9" * 5000,
}


@pytest.mark.parametrize("text", REJECTED, ids=lambda text: text[:20])
def test_rejected(text):
    with pytest.raises(dkm.PlanError) as caught:
        dkm.plan(resnet_like(), text)
    word = "cv:4;fc" if ";" in text else REJECTED[text]
    assert f"'{word}'" in str(caught.value)
    assert f"plan '{text}'" in str(caught.value)


@pytest.mark.parametrize("text", ["", " ", "\n\t"])
def test_empty_text(text):
    with pytest.raises(dkm.PlanError, match="plan is empty"):
        parse(text)


@pytest.mark.parametrize("text", [None, 4, b"cv:4", ["cv:4"], {"cv": 4}])
def test_not_text(text):
    with pytest.raises(TypeError, match=f"a plan is text .* got {type(text).__name__}"):
        dkm.plan(resnet_like(), text)


selectors = st.text("abz09._*?[]:", min_size=1, max_size=8)


bits_dims = st.tuples(st.integers(1, 12), st.integers(1, 99))


entries = st.lists(
    st.one_of(
        st.builds(lambda s, bd: Entry(s, *bd), selectors, bits_dims), st.builds(lambda s: Entry(s, None, 1), selectors)
    ),
    min_size=1,
    max_size=6,
)


@given(entries, st.sampled_from(["", " ", "  ", "\n"]))
def test_parse_inverts_format(entries, space):
    def format(entry):
        return f"{space}{entry.selector}{space}:{space}" + (
            "keep" if entry.bits is None else f"{entry.bits}{space}/{space}{entry.dim}"
        )

    assert parse(",".join(map(format, entries))) == entries


@given(st.text(max_size=20))
def test_parse_raises_nothing_but_plan_errors(text):
    try:
        result = parse(text)
    except dkm.PlanError:
        return
    assert all(entry.selector and (entry.bits is None or 1 <= entry.bits <= 12) for entry in result)


# --- sizes ---------------------------------------------------------------------------------------

SIZES = {
    "1.0MB": 2**20,
    "1MB": 2**20,
    "1mb": 2**20,
    "1 MiB": 2**20,
    "0.5MB": 2**19,
    ".5MB": 2**19,
    "40kB": 40 * 1024,  # 1024 as the paper's MB is 1024 * 1024
    "40KB": 40 * 1024,
    "40 KiB": 40 * 1024,
    "1.5GB": 3 * 2**29,
    "800B": 800,
    " 800 ": 800,
    "1.0009kB": 1024,  # down to whole bytes
    800: 800,
}


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size):
    assert parse_size(size) == SIZES[size]


@pytest.mark.parametrize("size", ["", "MB", "1.0", "-1MB", "1TB", "1k", "1,5MB", "1e3", "1 000", "nan", "１MB", "1iB"])
def test_not_a_size(size: str):
    with pytest.raises(dkm.PlanError, match=r"is not a size: write 1\.0MB, 40kB or a whole number of bytes"):
        parse_size(size)


@pytest.mark.parametrize("size", [0, -5, "0MB", "0.1B"])
def test_a_size_of_nothing(size):
    with pytest.raises(dkm.PlanError, match="at least 1 byte"):
        parse_size(size)


@pytest.mark.parametrize("size", [1.5, True, b"1MB", ["1MB"]])
def test_a_size_of_another_type(size):
    with pytest.raises(TypeError, match=r"a size is text such as '1\.0MB', or an integer"):
        parse_size(size)


names = st.text(min_size=1, max_size=12).filter(lambda name: "\x00" not in name)


@given(names)
def test_any_name_can_be_written_as_a_selector(name: str):
    assert parse(f"{quoted(name)}:3/2, all:4") == [Entry(name, 3, 2), Entry("all", 4, 1)]


@pytest.mark.parametrize("text", ['"a:4', 'a":4', '"a"b:4', '"\\x":4'])
def test_quotation_marks_that_do_not_fit(text: str):
    with pytest.raises(PlanError, match=r"quot|not a name|is not .selector"):
        parse(text)
