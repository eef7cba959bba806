"""Entropy-coded codes: what the bytes are, that nothing else decodes, and that a file never grows by it."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import ans
import constriction
import numpy as np
import pytest
import strict_reader
import torch
from dkm_files import coded, header, net, skewed, tensor, trained
from file_parts import taken_apart
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_limit import limited_memory
from torch import nn

import dkm
from dkm.clustering.groups import Group
from dkm.clustering.spec import Spec
from dkm.formats import codec, entropy, usage
from dkm.formats.codec import pack, unpack
from dkm.formats.contents import describe
from dkm.formats.described import Codes, Described
from dkm.formats.dkm_file import encode_all, read_tensors
from dkm.formats.entropy import CodeBytes, code_bytes, decode, encode, frequencies


def described(codes: list[int], bits: int) -> Described:
    """A tensor with these codes, of which the centroids are 0, 1, 2, ..."""
    centroids = torch.arange(2.0**bits)[:, None].to(torch.bfloat16)
    return Described("w", (len(codes),), torch.float32, Codes(bits, 1, 0, pack(torch.tensor(codes), bits), centroids))


@st.composite
def some_codes(draw: st.DrawFn) -> tuple[list[int], int]:
    """Codes, and the bits of one: from even ones to those of which nearly all are the same."""
    bits, n, seed = draw(st.integers(1, 12)), draw(st.integers(1, 3000)), draw(st.integers(0, 1000))
    skew = draw(st.sampled_from([1, 2, 5, 40]))
    drawn = np.random.default_rng(seed).random(n) ** skew * 2**bits
    return drawn.astype(int).tolist(), bits


def as_bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@settings(max_examples=80, deadline=None)
@given(case=some_codes())
def test_the_bytes_are_those_of_the_rule_alone(case):
    """What is written is what `ans.py` writes, in integers of Python; and it decodes, here and by the strict reader."""
    codes, bits = case
    order = sorted(range(2**bits), key=lambda code: (-codes.count(code), code)) if bits < 7 else None
    found = encode(described(codes, bits))
    if found is None:
        return
    ranks = unpack(decode(found.data.numpy(), bits, len(codes)), bits, len(codes)).tolist()
    assert [int(found.centroids[rank]) for rank in ranks] == [int(torch.tensor(c).bfloat16()) for c in codes]
    assert bytes(found.data.numpy()) == ans.encoded(ranks, 2**bits)
    assert strict_reader.decoded(bytes(found.data.numpy()), 2**bits, len(codes)) == ranks
    if order is not None:
        assert found.centroids[:, 0].tolist() == order


@settings(max_examples=200, deadline=None)
@given(counts=st.lists(st.integers(0, 2**40), min_size=1, max_size=300).filter(any))
def test_frequencies_add_up_and_are_never_zero(counts):
    counts = sorted(counts, reverse=True)
    own = frequencies(counts)
    assert sum(own) == 2**24
    assert min(own) >= 1
    assert len(own) == sum(count > 0 for count in counts)


@given(counts=st.lists(st.integers(0, 2**59), min_size=1, max_size=64))
def test_tables_are_read_back(counts):
    counts = sorted(counts, reverse=True)
    data = entropy.table(counts)
    assert data == ans.table(counts)
    assert strict_reader.counts_of(data, len(counts)) == (counts, len(data))


def test_an_example_by_hand():
    """Counts of 5, 2, 1, 0: the numbers 1, 2, 2, 4, which are the bits 1 010 010 00100."""
    assert entropy.table([5, 2, 1, 0]) == bytes([0b00100101, 0b0010])
    assert frequencies([5, 2, 1, 0]) == [2**24 - 4194304 - 2097152 + 1 - 1, 4194304, 2097152]


def test_ties_keep_the_order_of_the_centroids():
    found = encode(described([3] * 400 + [2] * 10 + [0] * 10, 2))
    assert found.centroids[:, 0].tolist() == [3, 0, 2, 1]


def test_chunks_leave_no_trace(monkeypatch):
    each = skewed("w", (40, 90), Spec(5, group=Group(7, 11)))
    whole = encode(each)
    for module in (codec, entropy, usage):
        monkeypatch.setattr(module, "CHUNK", 64)
    pieces = encode(each)
    assert torch.equal(whole.data, pieces.data)
    assert torch.equal(whole.centroids, pieces.centroids)
    n = each.grouping.codes
    assert torch.equal(decode(whole.data.numpy(), 5, n), decode(pieces.data.numpy(), 5, n))


@pytest.mark.parametrize("each", coded(), ids=lambda each: each.name)
def test_a_tensor_has_the_same_values_in_its_new_order(each):
    found = encode(each) if isinstance(each.content, Codes) else None
    if found is not None:
        n, bits = each.grouping.codes, each.content.bits
        content = replace(each.content, packed=decode(found.data.numpy(), bits, n), centroids=found.centroids)
        assert torch.equal(replace(each, content=content).values(), each.values())
    assert (found is None) == (each.name in ("few", "even", "kept"))


def test_one_table_serves_all_groups():
    """Each group has a centroid that nearly all of its codes have, always another one."""
    k, groups, size = 8, 64, 512
    generator = torch.Generator().manual_seed(0)
    rare = torch.rand(groups, size, generator=generator) < 0.1
    codes = torch.where(rare, torch.randint(k, (groups, size), generator=generator), torch.arange(groups)[:, None] % k)
    content = Codes(3, 1, 0, pack(codes.view(-1), 3), torch.randn(groups, k, 1).half(), Group(None, size))
    each = Described("w", (groups * size,), torch.float32, content)
    found, taken = encode(each), code_bytes(each, usage.usage(each))
    assert taken.packed == 3 * groups * size // 8
    assert taken.bound < len(found.data) < 1.05 * taken.bound < taken.packed / 2


# --- sizes ---------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(case=some_codes())
def test_figures_from_counts_are_those_of_the_bytes(case):
    each = described(*case)
    taken, found = code_bytes(each, usage.usage(each)), encode(each)
    own = taken.packed if found is None else len(found.data)
    difference = abs(taken.coded - own)  # a word more or less, or what a word more or less decides
    assert difference <= 4 or (difference <= entropy.MARGIN + 4 and taken.packed in (taken.coded, own))
    assert taken.bound <= taken.coded + 8


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8, 12])
def test_codes_of_a_normal_distribution_take_what_their_entropy_says(bits):
    n = 2**19
    x = torch.randn(n, generator=torch.Generator().manual_seed(bits))
    codes = ((x + 4).clamp(0, 7.999) / 8 * 2**bits + 0.3).long().clamp(max=2**bits - 1)
    counts = torch.bincount(codes, minlength=2**bits).double()
    bound = float(-(torch.xlogy(counts, counts / n)).sum() / np.log(2)) / 8
    found = encode(described(codes.tolist(), bits))
    assert bound <= len(found.data) <= 1.001 * (bound + len(entropy.table(sorted(map(int, counts), reverse=True)))) + 8


@settings(max_examples=40, deadline=None)
@given(cases=st.lists(some_codes(), min_size=1, max_size=3))
def test_a_file_never_grows(cases):
    tensors = [replace(described(*case), name=f"{'long' * i}{i}") for i, case in enumerate(cases)]
    packed, own = encode_all(tensors), encode_all(tensors, coding="entropy")
    if header(own)["__metadata__"]["version"] == "3":
        assert len(own) < len(packed)
    else:
        assert own == packed


def test_a_file_that_gains_nothing_is_the_packed_one(path):
    model = trained()
    assert dkm.save(model, path, coding="entropy") == dkm.save(model, path.with_name("packed.dkm"))
    assert path.read_bytes() == path.with_name("packed.dkm").read_bytes()


def normal() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 50), nn.BatchNorm1d(50), nn.Linear(50, 40), nn.Linear(40, 3))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.normal_()
    return model


def compressed() -> nn.Module:
    model = normal()
    dkm.compress_(model, "0.weight:3, 2.weight:2 scaled per 8x10, 3.weight:2", tau=1e-3)
    return model.eval()


def test_a_model_saved_so_loads_as_it_was(path):
    model, packed = compressed(), path.with_name("packed.dkm")
    size = dkm.size(model, coding="entropy")
    assert dkm.save(model, path, coding="entropy") == size.file_bytes == path.stat().st_size
    assert size.file_bytes < dkm.save(model, packed) == dkm.size(model).file_bytes
    assert header(path.read_bytes())["__metadata__"]["version"] == "3"
    expected = dkm.load(packed)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in dkm.load(path).items())
    loaded = dkm.load(path, into=normal())
    assert torch.equal(loaded[0].weight, expected["0.weight"])


def test_codes_of_a_file_are_packed_in_memory(path):
    """Who reads codes from a file need not know how it holds them."""
    path.write_bytes(encode_all(coded(), coding="entropy"))
    for each, original in zip(read_tensors(path), sorted(coded(), key=lambda each: each.name), strict=True):
        assert torch.equal(each.values(), original.values().to(each.dtype))
        if isinstance(each.content, Codes):
            assert each.content.packed.shape == original.content.packed.shape
            assert each.content.spec == original.content.spec
            n = each.grouping.codes
            assert torch.equal(each.content.codes(n - 3, n), unpack(each.content.packed, each.content.bits, n)[-3:])


def test_wrong_codes_leave_the_model_alone(path):
    good = encode_all([skewed("a", (40, 50), Spec(3)), skewed("b", (40, 50), Spec(3))], coding="entropy")
    file = taken_apart(good)
    at = [name for name, _ in file.arrays].index("codes/b")
    file.data[at] = file.data[at][:-1] + b"\1"  # of the last word, which is read first
    path.write_bytes(file.to_bytes())
    model = nn.Module()
    for name in ("a", "b"):
        model.register_parameter(name, nn.Parameter(torch.zeros(40, 50)))
    with pytest.raises(dkm.FileError, match="the codes of b contradict the counts in their table"):
        dkm.load(path, into=model)
    assert not model.a.any()
    assert not model.b.any()


def test_size_shows_all_three(path):
    model = compressed()
    dkm.save(model, path, coding="entropy")
    size, stored = dkm.size(model, coding="entropy"), header(path.read_bytes())
    for name, taken in size.codes.items():
        begin, end = stored[f"codes/{name}"]["data_offsets"]
        assert taken.coded == end - begin <= taken.packed
        assert taken.bound <= taken.coded
        about = dkm.size(model).codes[name]
        assert (about.packed, about.bound) == (taken.packed, taken.bound)
        assert abs(about.coded - taken.coded) <= 4
    assert size.codes["0.weight"].coded < size.codes["0.weight"].packed == 60 * 50 * 3 // 8
    assert size.codes["3.weight"].coded == size.codes["3.weight"].packed
    totals = [sum(getattr(taken, key) for taken in size.codes.values()) for key in CodeBytes._fields]
    assert f"codes: {totals[0]:,} bytes packed, {totals[1]:,} entropy-coded, {totals[2]:,} at their entropy" in str(
        size
    )
    row = next(line for line in size.table(120).splitlines() if line.startswith("0.weight"))
    assert [f"{number:,}" for number in size.codes["0.weight"]] == row.split()[-4:-1]
    head = size.table(50).splitlines()[0]
    assert "coded" in head
    assert "bound" not in head  # there is no room


def test_more_than_64_times_smaller_stays_packed():
    """So that a few bytes of a file cannot stand for gigabytes."""
    n = 200_000
    assert len(ans.table([n, 0])) == 5
    assert encode(described([1] * n, 1)) is None
    mostly = ([0] * 99 + [1]) * (n // 100)
    assert len(encode(described(mostly, 1)).data) > n // 8 / 64


# --- what does not decode ------------------------------------------------------------------------

CODES = [0, 0, 1, 0, 2, 0, 0, 1] * 40
COUNTS, WORDS = [200, 80, 40, 0], ans.words(CODES, [200, 80, 40, 0])
GOOD = ans.table(COUNTS) + WORDS
NO_END = "contradict the counts in their table"
REFUSED = {
    "nothing": (b"", "have a table that breaks off"),
    "zeros": (bytes(100), "have a table that breaks off"),
    "half a table": (ans.table(COUNTS)[:2], "have a table that breaks off"),
    "a table of huge numbers": (bytes(9) + b"\xff" * 30, "have a table that breaks off"),
    "counts that are too few": (
        ans.table([199, 80, 40, 0]) + WORDS,
        "are 320, and the counts in their table add up to 319",
    ),
    "counts that are too many": (ans.table([201, 80, 40, 0]) + WORDS, "are 320, and the counts .* add up to 321"),
    "counts of all zero": (ans.table([0, 0, 0, 0]) + WORDS, "are 320, and the counts .* add up to 0"),
    "other counts": (ans.table([199, 81, 40, 0]) + WORDS, NO_END),
    "a count of zero": (ans.table([220, 100, 0, 0]) + WORDS, NO_END),
    "bits after the table": (
        bytes([GOOD[0], GOOD[1], GOOD[2], GOOD[3], GOOD[4] | 0x80]) + WORDS,
        "unused bits are not zero",
    ),
    "no words": (ans.table(COUNTS), NO_END),
    "a word too few": (GOOD[:-4], NO_END),
    "a word too few at the front": (ans.table(COUNTS) + WORDS[4:], NO_END),
    "a word too many": (GOOD + b"\1\0\0\0", NO_END),
    "a word too many at the front": (ans.table(COUNTS) + b"\1\0\0\0" + WORDS, NO_END),
    "a zero word": (GOOD + bytes(4), "have a last word that is zero"),
    "part of a word": (GOOD + b"\1", "are not followed by whole words"),
    "words where one code takes nothing": (ans.table([320, 0, 0, 0]) + b"\1\0\0\0", NO_END),
    "one changed bit": (GOOD[:-9] + bytes([GOOD[-9] ^ 4]) + GOOD[-8:], NO_END),
    "codes in another order": (ans.table(COUNTS) + ans.words([*CODES[:-2], 1, 1], COUNTS), NO_END),
}


def test_the_bytes_of_these_tests_decode_where_nothing_is_changed():
    assert unpack(decode(as_bytes(GOOD), 2, 320), 2, 320).tolist() == CODES
    assert bytes([*GOOD[:5]]) == ans.table(COUNTS)


@pytest.mark.parametrize("case", REFUSED)
def test_everything_else_is_refused(case):
    data, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        decode(as_bytes(data), 2, 320)
    with pytest.raises(strict_reader.Refused):
        strict_reader.decoded(data, 4, 320)


def test_bytes_are_refused_or_the_only_ones_of_their_codes():
    for at in range(8 * len(GOOD)):
        data = bytearray(GOOD)
        data[at // 8] ^= 1 << at % 8
        try:
            codes = unpack(decode(as_bytes(bytes(data)), 2, 320), 2, 320).tolist()
        except ValueError:
            continue
        assert codes != CODES
        assert ans.encoded(codes, 4) == data


def test_decoding_takes_little_more_than_the_packed_codes():
    n = 2**24
    found = encode(described_large(n))
    with limited_memory(n // 8 + 100 * 2**20):
        decode(found.data.numpy(), 1, n)


def described_large(n: int) -> Described:
    packed = torch.full((n // 8,), 0b10000000, dtype=torch.uint8)
    return Described("w", (n,), torch.float32, Codes(1, 1, 0, packed, torch.tensor([[0.0], [1.0]]).half()))


# --- constriction --------------------------------------------------------------------------------


@pytest.fixture
def again():
    """constriction is looked for anew, before the test and after it."""
    entropy._stream.cache_clear()
    yield
    entropy._stream.cache_clear()


def test_without_constriction_the_error_says_what_to_install(again, path, monkeypatch):
    path.write_bytes(encode_all(coded(), coding="entropy"))
    entropy._stream.cache_clear()
    monkeypatch.setitem(sys.modules, "constriction", None)
    words = r'need constriction: pip install "torch-dkm\[entropy\]"'
    other = path.with_name("other.dkm")
    for call in (
        lambda: dkm.load(path),
        lambda: describe(path),
        lambda: dkm.save(trained(), other, coding="entropy"),
        lambda: dkm.size(trained(), coding="entropy"),
    ):
        with pytest.raises(dkm.FileError, match=words):
            call()
    assert not other.exists()
    assert dkm.size(model := trained()).file_bytes == dkm.save(model, other)
    assert dkm.load(other).keys() == net().state_dict().keys()
    assert describe(other)


def test_a_constriction_that_codes_differently_is_refused(again, monkeypatch):
    class Other:
        def encode_reverse(self, codes: np.ndarray, model: object) -> None: ...

        def get_compressed(self) -> np.ndarray:
            return np.array([7], np.uint32)

    other = SimpleNamespace(stack=SimpleNamespace(AnsCoder=Other), model=constriction.stream.model)
    monkeypatch.setattr(constriction, "stream", other)
    with pytest.raises(dkm.FileError, match="this version of constriction codes in another way"):
        entropy.check_coding("entropy")


@pytest.mark.parametrize("coding", ["zip", None, "", 3])
def test_an_unknown_coding(coding, path):
    for call in (lambda: dkm.save(net(), path, coding=coding), lambda: dkm.size(net(), coding=coding)):
        with pytest.raises(ValueError, match="coding must be 'packed' or 'entropy', got"):
            call()
    assert not path.exists()


def test_even_codes_stay_packed():
    assert encode(tensor("w", (64, 64), Spec(2))) is None
