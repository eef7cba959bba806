"""The text of a plan, and of a size: what is understood, and what the error says of the rest."""

import pytest
from example_models import resnet_like
from hypothesis import given
from hypothesis import strategies as st

import dkm
from dkm import PlanError
from dkm.clustering.groups import Group
from dkm.clustering.spec import Spec
from dkm.plans.language import Entry, parse, parse_size, parse_spec, parse_target, quoted

ACCEPTED = {
    "cv:4": [Entry("cv", Spec(4))],
    "cv:4/4": [Entry("cv", Spec(4, 4))],
    "cv:12/16": [Entry("cv", Spec(12, 16))],
    "cv:04/02": [Entry("cv", Spec(4, 2))],
    "cv:keep": [Entry("cv", None)],
    "  cv : 4 / 4  ": [Entry("cv", Spec(4, 4))],
    "cv:6/8, fc:6/10": [Entry("cv", Spec(6, 8)), Entry("fc", Spec(6, 10))],
    "cv:6/8,fc:keep,cv:2": [Entry("cv", Spec(6, 8)), Entry("fc", None), Entry("cv", Spec(2))],
    "all:1\n,\tfirst:8": [Entry("all", Spec(1)), Entry("first", Spec(8))],
    "layer4.*:4": [Entry("layer4.*", Spec(4))],
    "layer4.0.conv1.weight:keep": [Entry("layer4.0.conv1.weight", None)],
    "a:b:4": [Entry("a:b", Spec(4))],
    "no.such.thing:3/3": [Entry("no.such.thing", Spec(3, 3))],
    "lin:2 scaled": [Entry("lin", Spec(2, scaled=True))],
    "all:3 per 8x64 e4m3": [Entry("all", Spec(3, group=Group(8, 64), float8=True))],
    "lin:4/4 scaled per 4096": [Entry("lin", Spec(4, 4, scaled=True, group=Group(None, 4096)))],
    "emb:2 per row": [Entry("emb", Spec(2, group=Group(1)))],
    "emb:2 per 1 rows": [Entry("emb", Spec(2, group=Group(1)))],
    "cv:2 per 8 rows": [Entry("cv", Spec(2, group=Group(8)))],
    "cv:2 per 8 x 64": [Entry("cv", Spec(2, group=Group(8, 64)))],
    "cv : 3 / 2\te4m3  per\n08 rows scaled": [Entry("cv", Spec(3, 2, scaled=True, group=Group(8), float8=True))],
    "lin:2 scaled, lin:keep": [Entry("lin", Spec(2, scaled=True)), Entry("lin", None)],
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


GROUPS = "after 'per' comes 'row', '8 rows', '8x64' or '4096', with numbers of at least 1, not"
WORDS = "After the bits come 'scaled', 'per GROUP' or 'e4m3'"
REJECTED_SPECS = {  # what follows the colon -> what the error says
    "2 per": f"{GROUPS} nothing",
    "2 per scaled": f"{GROUPS} nothing",
    "2 per 0": f"{GROUPS} '0'",
    "2 per 0 rows": f"{GROUPS} '0 rows'",
    "2 per 8x0": f"{GROUPS} '8x0'",
    "2 per 8x": f"{GROUPS} '8x'",
    "2 per x64": f"{GROUPS} 'x64'",
    "2 per 8x64x3": f"{GROUPS} '8x64x3'",
    "2 per 8 row": f"{GROUPS} '8 row'",
    "2 per rows": f"{GROUPS} 'rows'",
    "2 per 8 columns": f"{GROUPS} '8 columns'",
    "2 per row row": f"{GROUPS} 'row row'",
    "2 per -8": f"{GROUPS} '-8'",
    "2 per 1e3": f"{GROUPS} '1e3'",
    "2 per ٤": f"{GROUPS} '٤'",
    "2 per " + "9" * 5000: f"{GROUPS} '{'9' * 5000}'",
    "2 per 8x" + "9" * 10: f"{GROUPS} '8x9999999999'",
    "2 per row 8": f"{GROUPS} 'row 8'",
    "2 per row per row": "says 'per' twice",
    "2 scaled scaled": "says 'scaled' twice",
    "2 e4m3 scaled e4m3": "says 'e4m3' twice",
    "2 scale": f"unknown word 'scale'. did you mean 'scaled'? {WORDS}",
    "2 e4m4": f"unknown word 'e4m4'. did you mean 'e4m3'? {WORDS}",
    "2 rows": f"unknown word 'rows'. did you mean 'per row'? {WORDS}",
    "2 8x64": f"unknown word '8x64'. {WORDS}",
    "2 Scaled": f"unknown word 'Scaled'. did you mean 'scaled'? {WORDS}",
    "2 scaled 3": f"unknown word '3'. {WORDS}",
    "2 keep": f"unknown word 'keep'. {WORDS}",
    "scaled 2": "is not 'keep', and does not begin with 'bits' or 'bits/dim'",
    "keep scaled": "is not 'keep', and does not begin with 'bits' or 'bits/dim'",
    "13 scaled": "bits must be from 1 to 12, got 13",
    "4/0 scaled": "dim must be at least 1, got 0",
}


@pytest.mark.parametrize("spec", REJECTED_SPECS, ids=lambda spec: spec[:20])
def test_rejected_specs(spec: str):
    with pytest.raises(dkm.PlanError) as caught:
        dkm.plan(resnet_like(), f"cv:4, all: {spec}")
    message = str(caught.value)
    assert message.startswith(f"'{spec}' in plan 'cv:4, all: {spec}'")
    assert message.endswith(REJECTED_SPECS[spec])


sizes = st.integers(1, 999_999_999)
groups = st.one_of(
    st.none(),
    st.builds(Group, sizes),
    st.builds(Group, sizes, sizes),
    st.builds(Group, st.none(), sizes),
)
specs = st.builds(
    Spec, st.integers(1, 12), st.integers(1, 99), scaled=st.booleans(), group=groups, float8=st.booleans()
)


@given(specs)
def test_every_spec_can_be_written_and_read(spec: Spec):
    assert parse_spec(spec.label, "a test") == spec
    assert parse(f"all:{spec.label}") == [Entry("all", spec)]


@pytest.mark.parametrize("text", ["", " ", "\n\t"])
def test_empty_text(text):
    with pytest.raises(dkm.PlanError, match="plan is empty"):
        parse(text)


@pytest.mark.parametrize("text", [None, 4, b"cv:4", ["cv:4"], {"cv": 4}])
def test_not_text(text):
    with pytest.raises(TypeError, match=f"a plan is text .* got {type(text).__name__}"):
        dkm.plan(resnet_like(), text)


selectors = st.text("abz09._*?[]:", min_size=1, max_size=8)


entries = st.lists(st.builds(Entry, selectors, st.none() | specs), min_size=1, max_size=6)


@given(entries, st.sampled_from(["", " ", "  ", "\n"]))
def test_parse_inverts_format(entries, space):
    def format(entry):
        label = "keep" if entry.spec is None else entry.spec.label.replace("/", f"{space}/{space}")
        return f"{space}{entry.selector}{space}:{space}{label.replace(' ', ' ' + space)}"

    assert parse(",".join(map(format, entries))) == entries


@given(st.text(max_size=20))
def test_parse_raises_nothing_but_plan_errors(text):
    try:
        result = parse(text)
    except dkm.PlanError:
        return
    assert all(entry.selector and (entry.spec is None or 1 <= entry.spec.bits <= 12) for entry in result)


# --- sizes ---------------------------------------------------------------------------------------

SIZES = {
    "1.0MB": 10**6,
    "1MB": 10**6,
    "1mb": 10**6,
    "1 MiB": 2**20,
    "0.5MB": 500_000,
    ".5MB": 500_000,
    "40kB": 40_000,
    "40KB": 40_000,
    "40 KiB": 40 * 1024,
    "1.5GB": 1_500_000_000,
    "1.5 GiB": 3 * 2**29,
    "800B": 800,
    " 800 ": 800,
    "1.0009kB": 1000,  # down to whole bytes
    800: 800,
}


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size):
    assert parse_size(size) == SIZES[size]


def test_what_a_size_is_of():
    assert parse_target("40kB") == (40_000, False)
    assert parse_target(800) == (800, False)
    assert parse_target("40 kB paper") == parse_target("40000 Paper") == (40_000, True)
    for wrong in ("paper", "40kBpaper", "40kB papers", "paper 40kB"):
        with pytest.raises(dkm.PlanError, match="is not a size"):
            parse_target(wrong)


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
    assert parse(f"{quoted(name)}:3/2, all:4") == [Entry(name, Spec(3, 2)), Entry("all", Spec(4))]


@pytest.mark.parametrize("text", ['"a:4', 'a":4', '"a"b:4', '"\\x":4'])
def test_quotation_marks_that_do_not_fit(text: str):
    with pytest.raises(PlanError, match=r"quot|not a name|is not .selector"):
        parse(text)
