"""Codes <-> entropy-coded bytes: asymmetric numeral systems with one table of counts for each tensor.

`docs/file-format.md` says what the bytes mean, without reference to this code or to constriction, which does the work.

The centroids of each group are put in the order of how many codes they have, most first.  The order of centroids means
nothing, so this costs nothing; codes of different groups then have much the same distribution, and no other order
gives all of them together a lower entropy; and the differences of counts that only fall are small numbers.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..foundation.errors import FileError
from .codec import CHUNK, pack, packed_size
from .described import Codes, Described
from .usage import Usage, blocks

CODINGS = ("packed", "entropy")  # what `coding` may be
TOTAL = 2**24  # what the frequencies of a table add up to
MARGIN = 32  # bytes: more than the header needs to say that codes are entropy-coded
LARGEST_GAIN = 64  # times: packed codes take at most so many times the bytes of entropy-coded ones
LONGEST = 60  # zeros before the first one of a number: counts are less than 2^60


class Coded(NamedTuple):
    """A tensor's codes as entropy-coded bytes, and its centroids in the order that these codes mean."""

    data: Tensor  # (bytes,) uint8
    centroids: Tensor


class CodeBytes(NamedTuple):
    """What the codes of a tensor take, in bytes; its centroids and scales come on top in all cases."""

    packed: int
    coded: int  # where coding="entropy"; as many as packed where this would not be less
    bound: int  # at their entropy, with nothing to say what the distribution is; rounded up


def check_coding(coding: str) -> None:
    """ValueError unless `coding` is a known one; FileError where this machine cannot write it."""
    if coding not in CODINGS:
        raise ValueError(f"coding must be {' or '.join(map(repr, CODINGS))}, got {coding!r}")
    if coding == "entropy":
        _stream()


def encode(each: Described) -> Coded | None:
    """A clustered tensor's codes, entropy-coded; None where they had better stay packed.

    Besides the result this takes two bytes per code, and what the packed codes take anyway.
    """
    content = each.content
    assert isinstance(content, Codes)
    bits = torch.uint8 if content.centroids.element_size() == 1 else torch.int16  # 8-bit floats cannot be gathered
    own = content.centroids.cpu().view(bits).view(-1, 2**content.bits, content.dim)
    ranks, centroids = np.empty(each.grouping.codes, np.uint16), torch.empty_like(own)
    counts = torch.zeros(2**content.bits, dtype=torch.int64)
    for block in blocks(each):
        order = block.counts.argsort(dim=1, descending=True, stable=True)
        counts += block.counts.gather(1, order).sum(0)
        centroids[block.groups] = own[block.groups].gather(1, order[:, :, None].expand(-1, -1, content.dim))
        rank = order.argsort(1).view(-1)
        for at, codes in block.pieces():
            ranks[at : at + len(codes)] = rank[codes].numpy()
    data = table(counts.tolist()) + _encoded(ranks, counts.tolist())
    if not _is_better(len(data), content.packed.nbytes):
        return None
    stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return Coded(stored, centroids.view(content.centroids.dtype).view(content.centroids.shape))


def decode(data: np.ndarray, bits: int, n: int) -> Tensor:
    """The inverse: `(bytes,)` uint8 -> n codes of so many bits, packed.  ValueError, which goes on from "the codes of
    NAME", for all bytes that are not what `encode` makes of some codes."""
    counts, at = _read_table(data, 2**bits)
    if sum(counts) != n:
        raise ValueError(f"are {n}, and the counts in their table add up to {sum(counts)}")
    if (len(data) - at) % 4:
        raise ValueError("are not followed by whole words")
    words = np.frombuffer(data[at:].tobytes(), "<u4").astype(np.uint32)
    if len(words) and not words[-1]:
        raise ValueError("have a last word that is zero")
    coder, model = _stream().stack.AnsCoder(words), _model(counts)
    left, packed = np.array(counts), torch.empty(packed_size(n, bits), dtype=torch.uint8)
    for start in range(0, n, CHUNK):
        stop = min(start + CHUNK, n)
        codes = np.zeros(stop - start, np.int32) if model is None else coder.decode(model, stop - start)
        left -= np.bincount(codes, minlength=2**bits)
        if left.min() < 0:  # a code comes too often: do not go on for as long as the counts claim
            break
        packed[start * bits // 8 : packed_size(stop, bits)] = pack(torch.from_numpy(codes), bits)
    if left.any() or not coder.is_empty():
        raise ValueError("contradict the counts in their table")
    return packed


def code_bytes(each: Described, use: Usage) -> CodeBytes:
    """What the codes of a clustered tensor take.  `coded` is computed from the counts, and may be a word too small."""
    assert isinstance(each.content, Codes)
    counts, packed = use.by_count.tolist(), each.content.packed.nbytes
    own = [count for count in counts if count]
    information = sum(count * (24 - math.log2(f)) for count, f in zip(own, frequencies(counts), strict=True))
    coded = len(table(counts)) + 4 * math.ceil(information / 32)
    return CodeBytes(packed, coded if _is_better(coded, packed) else packed, math.ceil(use.bound / 8))


def totals(codes: Iterable[CodeBytes]) -> str:
    """What the codes of several tensors take together, in words."""
    packed, coded, bound = (sum(numbers) for numbers in zip(CodeBytes(0, 0, 0), *codes, strict=True))
    return f"{packed:,} bytes packed, {coded:,} entropy-coded, {bound:,} at their entropy"


def frequencies(counts: Sequence[int]) -> list[int]:
    """Integers of at least 1 that add up to TOTAL, for the counts that are not zero, which come first."""
    own = [count for count in counts if count]
    found = [1 + count * (TOTAL - len(own)) // sum(own) for count in own]
    return [found[0] + TOTAL - sum(found), *found[1:]]


def _is_better(coded: int, packed: int) -> bool:
    return coded + MARGIN < packed <= LARGEST_GAIN * coded


def _encoded(ranks: np.ndarray, counts: list[int]) -> bytes:
    """The words, as bytes; the last symbol is coded first, so that the first one is decoded first."""
    coder, model = _stream().stack.AnsCoder(), _model(counts)
    for at in reversed(range(0, len(ranks) if model is not None else 0, CHUNK)):
        coder.encode_reverse(ranks[at : at + CHUNK].astype(np.int32), model)
    return coder.get_compressed().astype("<u4").tobytes()


def table(counts: list[int]) -> bytes:
    """The counts as differences, from the last to the first, plus 1, in Elias's gamma code."""
    differences = [a - b + 1 for a, b in zip(counts, [*counts[1:], 0], strict=True)]
    digits = [f"{number:b}" for number in reversed(differences)]
    text = "".join("0" * (len(own) - 1) + "1" + own[:0:-1] for own in digits)
    return np.packbits(np.frombuffer(text.encode(), np.uint8) & 1, bitorder="little").tobytes()


def _read_table(data: np.ndarray, k: int) -> tuple[list[int], int]:
    """The k counts at the beginning of the data, and how many bytes they take."""
    text = (np.unpackbits(data[: k * (2 * LONGEST // 8 + 1)], bitorder="little") + ord("0")).tobytes()
    counts, at = [0], 0
    for _ in range(k):
        one = text.find(b"1", at)
        width = one - at
        at = one + 1 + width
        if one < 0 or width > LONGEST or at > len(text):
            raise ValueError("have a table that breaks off")
        counts.append(counts[-1] + int(b"1" + text[one + 1 : at][::-1], 2) - 1)
    if b"1" in text[at : at + -at % 8]:
        raise ValueError("have a table whose unused bits are not zero")
    return counts[:0:-1], -(-at // 8)


def _model(counts: list[int]) -> Any:
    """constriction's model of symbols with these frequencies; None where there is only one symbol, which takes nothing.

    It gives each symbol 1 of TOTAL, and divides the rest in proportion to the numbers that it is given.  These add up
    to that rest, so nothing is left to round.
    """
    own = frequencies(counts)
    return None if len(own) == 1 else _stream().model.Categorical(np.array(own, np.float64) - 1, perfect=False)


@cache
def _stream() -> Any:
    """constriction's stream codes, once it is clear that they do what docs/file-format.md says."""
    try:
        from constriction import stream
    except ImportError:
        raise FileError('entropy-coded files need constriction: pip install "torch-dkm[entropy]"') from None
    coder, known = stream.stack.AnsCoder(), np.array([TOTAL - 70_003, 70_000, 2, 1], np.float64) - 1
    coder.encode_reverse(np.array([1, 3, 0, 2, 1, 0, 2], np.int32), stream.model.Categorical(known, perfect=False))
    if coder.get_compressed().tolist() != [13_630_462, 385_875_692, 7_424_417]:
        raise FileError(
            'this version of constriction codes in another way than .dkm files: pip install "constriction==0.5"'
        )
    return stream
