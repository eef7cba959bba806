"""Codes to bytes, and back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dkm.formats import codec
from dkm.formats.codec import pack, packed_size, unpack

BITS = range(1, 13)


def random_codes(n: int, bits: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 1 << bits, n))


def as_one_integer(codes: torch.Tensor, bits: int) -> bytes:
    """The docstring, literally: code i takes bits i*b .. i*b + b - 1 of one little-endian integer."""
    number = sum(code << (i * bits) for i, code in enumerate(codes.tolist()))
    return number.to_bytes(-(-len(codes) * bits // 8), "little")


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=30)
@given(n=st.integers(0, 3000), seed=st.integers(0, 1000))
def test_unpack_inverts_pack(bits, n, seed):
    codes = random_codes(n, bits, seed)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (-(-n * bits // 8),)
    assert torch.equal(unpack(packed, bits, n), codes)


@given(bits=st.sampled_from(BITS), n=st.integers(0, 60), seed=st.integers(0, 1000))
def test_bit_order_is_the_documented_one(bits, n, seed):
    codes = random_codes(n, bits, seed)
    assert bytes(pack(codes, bits).numpy()) == as_one_integer(codes, bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [7, 8, 9, 15, 16, 17, 23, 24, 25])
def test_chunks_leave_no_trace(n, bits, monkeypatch):
    monkeypatch.setattr(codec, "CHUNK", 8)
    codes = random_codes(n, bits)
    packed = pack(codes, bits)
    assert bytes(packed.numpy()) == as_one_integer(codes, bits)
    assert torch.equal(unpack(packed, bits, n), codes)


@pytest.mark.parametrize("bits", [3, 8, 11])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_real_chunk(extra, bits):
    codes = random_codes(codec.CHUNK + extra, bits)
    packed = pack(codes, bits)
    assert len(packed) == packed_size(len(codes), bits)
    assert torch.equal(unpack(packed, bits, len(codes)), codes)


def test_chunks_end_on_a_byte():
    assert codec.CHUNK % 8 == 0


@pytest.mark.parametrize("bits", BITS)
def test_extreme_codes(bits):
    codes = torch.tensor([0, (1 << bits) - 1] * 9)
    assert torch.equal(unpack(pack(codes, bits), bits, 18), codes)


@pytest.mark.parametrize("bits", BITS)
def test_the_last_byte_is_filled_with_zeros(bits):
    packed = pack(torch.tensor([(1 << bits) - 1]), bits)
    assert int.from_bytes(bytes(packed.numpy()), "little") == (1 << bits) - 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_codes_of_any_integer_dtype(dtype):
    codes = torch.tensor([0, 3, 1, 2, 3], dtype=dtype)
    assert unpack(pack(codes, 2), 2, 5).tolist() == codes.tolist()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("wrong", [-1, "2^bits", 1 << 16, 1 << 40])
def test_codes_out_of_range(bits, wrong):
    wrong = 1 << bits if wrong == "2^bits" else wrong
    with pytest.raises(ValueError, match=rf"codes from .* to .* do not fit {bits} bits"):
        pack(torch.tensor([0, wrong, 0]), bits)


@pytest.mark.parametrize("change", [-1, 1])
def test_the_wrong_number_of_bytes(change):
    with pytest.raises(ValueError, match="10 codes of 5 bits take 7 bytes, got"):
        unpack(torch.zeros(7 + change, dtype=torch.uint8), 5, 10)


def test_the_wrong_dtype_of_bytes():
    with pytest.raises(ValueError, match="take 7 bytes, got 7 int64"):
        unpack(torch.zeros(7, dtype=torch.int64), 5, 10)
