"""Files that are nearly right: dkm refuses them with a FileError, or reads exactly what a strict reader reads.

300 cases; DKM_FUZZ=10000 makes it that many.
"""

import copy
import math
import os
import random
from collections.abc import Callable
from functools import cache, reduce
from pathlib import Path
from typing import Any

import ans
import numpy as np
import pytest
import safetensors.torch
import strict_reader
import torch
from dkm_files import BLANK, apart, coded, empty_like, grouped
from file_parts import File, Pairs, Raw, sealed, taken_apart
from memory_limit import limited_memory
from samples import SAMPLES
from torch import nn

import dkm
from dkm.formats.contents import describe
from dkm.formats.described import Described
from dkm.formats.dkm_file import decode, encode, encode_all

CASES = int(os.environ.get("DKM_FUZZ", "300"))


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 9)
        self.register_buffer("wave", torch.tensor([1 + 2j, -1j], dtype=torch.complex64))
        self.register_buffer("count", torch.arange(3, dtype=torch.int32))


def narrow() -> nn.Module:
    model = Many()
    dkm.cluster_weight(model.layer, bits=3, dim=2, tau=1.0)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.dtype]] = {
    **{name: (make, torch.float16) for name, make in SAMPLES.items()},
    "wide": (SAMPLES["layers"], torch.float32),
    "narrow": (narrow, torch.float8_e5m2),
}
TENSORS: dict[str, Callable[[], list[Described]]] = {"groups": grouped, "coded": coded, "outliers": apart}  # lists
NAMES = [*MODELS, *TENSORS]


@cache
def good(name: str) -> bytes:
    torch.manual_seed(0)
    if name in TENSORS:
        return encode_all(TENSORS[name](), coding="packed" if name == "groups" else "entropy")
    make, dtype = MODELS[name]
    return encode(make(), dtype)


@cache
def plain(name: str) -> nn.Module:
    return empty_like(TENSORS[name]()) if name in TENSORS else dkm.snap_(MODELS[name][0]())


# --- alterations ---------------------------------------------------------------------------------

ODD_VALUES = [
    *(0, -1, 1, 2, 3, 4, 5, 12, 13, 16, 17, 64, 2**31, 2**62, 2**63, 2**64, 10**30, 1.0, 2.5, True, False, None),
    *(Raw("1e999"), Raw("NaN"), Raw("-0"), Raw("1" * 5000), Raw("[" * 3000 + "]" * 3000)),
    *(
        "",
        "2",
        "3",
        "4",
        "ans",
        "ANS",
        "١",
        "float32",
        "float16",
        "bfloat16",
        "float64",
        "int64",
        "F16",
        "BF16",
        "U8",
        "I64",
        "\x1b[31m",
    ),
    *([2, None], [None, 5], [None, None], [3, 2], [0, 1], [2**60, 1], [1, 2**60 - 1], [2.0, 1]),
    *([], [0], [1], [1, 1], [2**40, 2**40], [0, 2**62, 2**62], [1] * 65, [-1, 3], [[1]]),
    *(Pairs(), Pairs([("a", 1)]), Pairs([("shape", [1]), ("dtype", "float32")])),
]


def objects(value: Any) -> list[Pairs]:
    """All objects in a value, itself included."""
    if isinstance(value, Pairs):
        return [value] + [each for _, item in value for each in objects(item)]
    return [each for item in value for each in objects(item)] if isinstance(value, list) else []


def some_object(file: File, rng: random.Random) -> Pairs:
    (part,) = rng.choices([file.tensors, file.ties, file.arrays, file.meta], [6, 1, 2, 1])
    return rng.choice(objects(part))


def change_a_value(file: File, rng: random.Random) -> None:
    chosen = some_object(file, rng)
    if not chosen:
        return
    i = rng.randrange(len(chosen))
    key, value = chosen[i]
    if isinstance(value, list) and not isinstance(value, Pairs) and value and rng.random() < 0.6:
        value = list(value)
        value[rng.randrange(len(value))] = rng.choice(ODD_VALUES)
        chosen[i] = (key, value)
    elif type(value) is int and rng.random() < 0.5:
        chosen[i] = (key, value + rng.choice([-1, 1]))
    else:
        chosen[i] = (key, rng.choice(ODD_VALUES))


def drop_a_key(file: File, rng: random.Random) -> None:
    if chosen := some_object(file, rng):
        i = rng.randrange(len(chosen))
        if chosen is file.arrays and rng.random() < 0.8:
            del file.data[i]
        del chosen[i]


def add_a_key(file: File, rng: random.Random) -> None:
    chosen = some_object(file, rng)
    if chosen is not file.arrays:
        new = ["extra", "bits", "dim", "shape", "group", "scaled", "exponent", "coding", "", "checksum", "\ud800"]
        key = rng.choice([*new, *(key for key, _ in chosen)])
        chosen.insert(rng.randrange(len(chosen) + 1), (key, rng.choice(ODD_VALUES)))


def repeat_a_key(file: File, rng: random.Random) -> None:
    chosen = some_object(file, rng)
    if chosen and chosen is not file.arrays:
        chosen.append(rng.choice(chosen))


def rename(file: File, rng: random.Random) -> None:
    """A name in one place, or in all of them."""
    old = rng.choice([key for part in (file.tensors, file.ties) for key, _ in part] or [""])
    others = [key for key, _ in file.tensors]
    new = rng.choice(["new", "", "\x1b[2J", "\u202egnp", "größe", "a/b", "\ud800", "__metadata__", *others])
    everywhere = rng.random() < 0.7
    for part in (file.tensors, file.ties, file.arrays):
        for i, (key, value) in enumerate(part):
            kind, slash, name = key.partition("/") if part is file.arrays else ("", "", key)
            if name == old and (everywhere or rng.random() < 0.3):
                part[i] = (f"{kind}{slash}{new}", value)
            if part is file.ties and value == old and everywhere:
                part[i] = (part[i][0], new)


def tie(file: File, rng: random.Random) -> None:
    names = [key for key, _ in file.tensors] + [key for key, _ in file.ties]
    file.ties.append((rng.choice(["other", "more", *names]), rng.choice(["nowhere", "other", *names])))


def change_bytes(file: File, rng: random.Random) -> None:
    i = rng.randrange(len(file.data))
    if file.data[i]:
        data = bytearray(file.data[i])
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        file.data[i] = bytes(data)


def change_length(file: File, rng: random.Random) -> None:
    """Cut or lengthen an array; sometimes its shape and offsets say so."""
    i = rng.randrange(len(file.data))
    data = file.data[i]
    data = data[: rng.randrange(len(data) + 1)] if rng.random() < 0.6 else data + rng.randbytes(rng.randint(1, 9))
    file.data[i] = data
    if rng.random() < 0.7:
        entry = dict(file.arrays[i][1])
        entry["shape"] = [len(data)] if rng.random() < 0.5 else entry["shape"]
        file.arrays[i] = (file.arrays[i][0], Pairs(entry.items()))
        file.lay_out()


def reorder(file: File, rng: random.Random) -> None:
    """Arrays and keys in another order: the same file."""
    order = rng.sample(range(len(file.data)), len(file.data))
    file.arrays[:] = [file.arrays[i] for i in order]
    file.data[:] = [file.data[i] for i in order]
    file.lay_out()
    for chosen in (file.tensors, file.ties, file.arrays):
        if rng.random() < 0.5:
            rng.shuffle(chosen)  # of the arrays: only the header's order


def set_key(entry: Any, key: str, value: Any) -> None:
    for i, (name, _) in enumerate(entry if isinstance(entry, Pairs) else ()):
        if name == key:
            entry[i] = (key, value)


def change_dtype(file: File, rng: random.Random) -> None:
    """Of centroids, of a stored tensor or of the tensor in the model; the number of bytes may still fit."""
    if rng.random() < 0.5 and file.tensors:
        names = [*strict_reader.WIDTHS, "float33", "nn", "quint8"]
        set_key(rng.choice(file.tensors)[1], "dtype", rng.choice(names))
    elif file.arrays:
        set_key(rng.choice(file.arrays)[1], "dtype", rng.choice([*strict_reader.STORED, "F4", "F17"]))


def reshape(file: File, rng: random.Random) -> None:
    """Another shape with the same number of values, in the entry and, mostly, in the array."""
    if not file.tensors:
        return
    name, entry = rng.choice(file.tensors)
    shape = dict(entry).get("shape") if isinstance(entry, Pairs) else None
    if not isinstance(shape, list):
        return
    shape = [*shape, 1] if rng.random() < 0.5 else [1] * rng.randint(1, 64) + shape
    set_key(entry, "shape", shape)
    for key, array in file.arrays:
        if key == f"dense/{name}" and rng.random() < 0.8:
            set_key(array, "shape", shape)


def cluster_anew(file: File, rng: random.Random) -> None:
    """A clustered tensor gets other bits, dim, group, codes, centroids and scales, and one of the numbers may be wrong.

    In version 1, it gets neither a group nor scales, and its codes are entropy-coded from version 3 on only.
    """
    name, entry = rng.choice([(name, entry) for name, entry in file.tensors if "bits" in dict(entry)])
    bits, dim, off = rng.randint(1, 6 if rng.random() < 0.8 else 12), rng.randint(1, 6), [0] * 6
    if rng.random() < 0.5:
        off[rng.randrange(6)] = rng.choice([-1, 1])
    shape, version = dict(entry)["shape"], dict(file.meta)["version"]
    newer, codable = version in ("2", "3", "4"), version in ("3", "4") and rng.random() < 0.7
    if math.prod(shape) > 10_000:  # by an earlier alteration
        return
    sizes = [rng.randint(1, 9), rng.randint(1, 12)]
    group = rng.choice([None, [sizes[0], None], sizes, [None, sizes[1]]]) if newer else None
    R, K, r, c = strict_reader.tiling(shape, group, group is not None)
    vectors, groups = sum(1 for _ in strict_reader.counting(R, K, r, c, dim)), -(-R // r) * -(-K // c)
    if codable:
        codes = some_coded(max(0, vectors + off[0]), 2**bits, rng)
    else:
        codes = bytearray(rng.randbytes(max(0, -(-vectors * bits // 8) + off[0])))
        if rng.random() < 0.9 and vectors * bits % 8:
            codes[-1] &= (1 << vectors * bits % 8) - 1
    k, dtype = 2**bits + off[1], rng.choice(["F16", "BF16", "F8_E4M3"][: 3 if newer else 2])
    lead = [] if group is None else [groups + off[4]]
    arrays = {
        "codes": ("U8", [len(codes)], bytes(codes)),
        "centroids": (dtype, [*lead, k, dim], some_floats(math.prod(lead) * k * dim, dtype, rng)),
    }
    if newer and rng.random() < 0.5:
        rows, dtype = (shape[0] if shape else 1) + off[5], rng.choice(["F16", "BF16"])
        arrays["scales"] = (dtype, [rows], some_floats(rows, dtype, rng, positive=rng.random() < 0.9))
    changes = {"bits": bits + off[2], "dim": dim + off[3]}
    changes |= ({"group": group} if group is not None else {}) | ({"scaled": True} if "scales" in arrays else {})
    changes |= {"coding": "ans"} if codable else {}
    kept = [(key, value) for key, value in entry if key not in ("bits", "dim", "group", "scaled", "coding")]
    entry[:] = [*kept, *changes.items()]
    replace_arrays(file, name, arrays)


def some_coded(n: int, k: int, rng: random.Random) -> bytearray:
    """n codes, entropy-coded; sometimes the table, the words or the codes are not what they should be."""
    drawn = [int(k * rng.random() ** rng.choice([1, 3, 9])) for _ in range(n)]
    order = sorted(range(k), key=drawn.count, reverse=True)
    codes, harm = [order.index(code) for code in drawn], rng.choice([*["no"] * 5, "count", "codes", "words", "bytes"])
    counts = [codes.count(code) for code in range(k)]
    words = bytearray(ans.words(codes if harm != "codes" else [*codes[1:], rng.choice(codes)], counts) if n else b"")
    if harm == "count":
        counts[rng.randrange(k)] += 1
        counts[rng.randrange(k)] -= 1
        counts = sorted((max(0, count) for count in counts), reverse=True)
    table = ans.table(counts)
    if harm == "words":
        at = 4 * rng.randrange(len(words) // 4 + 1)
        words[at : at + rng.choice([0, 4])] = rng.choice([bytes(4), rng.randbytes(4), b"", rng.randbytes(1)])
    data = table + words
    if harm == "bytes" and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def code_anew(file: File, rng: random.Random) -> None:
    """The codes of an entropy-coded tensor become others, which may be harmed."""
    name, entry = rng.choice([(name, dict(entry)) for name, entry in file.tensors if "coding" in dict(entry)])
    shape, group, dim = entry["shape"], entry.get("group"), entry["dim"]
    if math.prod(shape) > 10_000:  # by an earlier alteration
        return
    try:
        n = sum(1 for _ in strict_reader.counting(*strict_reader.tiling(shape, group, "group" in entry), dim))
    except strict_reader.Refused:  # by an earlier alteration, too
        return
    i = [key for key, _ in file.arrays].index(f"codes/{name}")
    file.data[i] = bytes(some_coded(n, 2 ** entry["bits"], rng))
    set_key(file.arrays[i][1], "shape", [len(file.data[i])])
    file.lay_out()


def change_outliers(file: File, rng: random.Random) -> None:
    """A clustered tensor gets outliers, or others, and something about them may be wrong."""
    names = [(name, entry) for name, entry in file.tensors if "bits" in dict(entry)]
    name, entry = rng.choice([each for each in names if "outliers" in dict(each[1])] * 3 + names)
    shape, dtype = dict(entry)["shape"], dict(entry)["dtype"]
    numel = math.prod(shape)
    if numel > 10_000 or (dict(file.meta)["version"] != "4" and rng.random() < 0.9):
        return
    count = rng.randint(1, min(numel, 9))
    positions = sorted(rng.sample(range(numel), count))
    kind = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    width = np.dtype(strict_reader.STORED[kind]).itemsize
    values = np.arange(1, count + 1).astype("<u4").repeat(width // 4 or 1)[: count * width // 4 + 1].tobytes()
    values, lengths = values[: count * width], [count, count, count]
    harm = rng.choice([*["no"] * 6, "order", "twice", "far", "dtype", "nan", "count", "length", "wide"])
    if harm == "order":
        rng.shuffle(positions)
    elif harm == "twice":
        positions[rng.randrange(count)] = rng.choice(positions)
    elif harm == "far":
        positions[-1] = rng.choice([numel, numel + 1, 2**32 - 1])
    elif harm == "dtype":
        kind = rng.choice(["F64", "F32", "F16", "BF16", "I32"])
    elif harm == "nan":
        values = values[:-width] + rng.choice([b"\xff", b"\x00"]) * (width - 2) + b"\x80\x7f"
    elif harm in ("count", "length"):
        lengths[rng.randrange(3)] += rng.choice([-1, 1])
    wide = 8 if harm == "wide" else 4
    places = np.array(positions, f"<u{wide}").tobytes()
    set_or_add(entry, "outliers", lengths[2])
    arrays = {
        "positions": ("I64" if harm == "wide" else "U32", [lengths[0]], places.ljust(99, b"\0")[: wide * lengths[0]]),
        "outliers": (kind, [lengths[1]], values.ljust(99, b"\0")[: width * lengths[1]]),
    }
    replace_arrays(file, name, arrays)


def set_or_add(entry: Pairs, key: str, value: Any) -> None:
    if key not in dict(entry):
        entry.append((key, value))
    set_key(entry, key, value)


def some_floats(count: int, dtype: str, rng: random.Random, positive: bool = False) -> bytes:
    """Mostly finite ones of moderate size."""
    width = np.dtype(strict_reader.STORED[dtype]).itemsize
    bits = np.frombuffer(rng.randbytes(width * count), f"<u{width}")
    if rng.random() < 0.95:  # one of the upper bits of the exponent is zero
        bits = bits & (0xBBFF if width == 2 else 0xF7)
    if positive:
        bits = bits & 0x7FFF | 1
    return bits.astype(f"<u{width}").tobytes()


def replace_arrays(file: File, name: str, arrays: dict[str, tuple[str, list[int], bytes]]) -> None:
    """Arrays of a clustered tensor become these: dtype, shape and data of each kind."""
    own = {f"{kind}/{name}" for kind in (*arrays, *(["scales"] if "codes" in arrays else []))}
    kept = [(array, data) for array, data in zip(file.arrays, file.data, strict=True) if array[0] not in own]
    for kind, (dtype, shape, data) in arrays.items():
        entry = Pairs([("dtype", dtype), ("shape", shape), ("data_offsets", [])])
        kept.append(((f"{kind}/{name}", entry), data))
    file.arrays[:], file.data[:] = Pairs(array for array, _ in kept), [data for _, data in kept]
    file.lay_out()


ALTERATIONS = [
    *(change_a_value, drop_a_key, add_a_key, repeat_a_key, rename, tie),
    *(change_bytes, change_length, reorder, change_dtype, reshape, cluster_anew, cluster_anew, code_anew, code_anew),
    *(change_outliers, change_outliers),
]


def altered(rng: random.Random) -> tuple[str, bytes]:
    """A model's name, and a file that was one of that model."""
    name = rng.choice([*NAMES, *TENSORS, *TENSORS, *TENSORS])
    file = taken_apart(good(name))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        try:
            rng.choice(ALTERATIONS)(file, rng)
        except (LookupError, TypeError, ValueError, AttributeError):
            continue  # an alteration of what an earlier one has left over
    data = file.to_bytes()
    return name, with_another_character(data, rng) if rng.random() < 0.1 else data


def with_another_character(data: bytes, rng: random.Random) -> bytes:
    """Anywhere in the header; the checksum is right again, where there is still a place for it."""
    place = b'"checksum":"'
    at = data.find(place) + len(place)
    changed = bytearray(data[:at] + BLANK.encode() + data[at + 64 :])
    header = int.from_bytes(data[:8], "little")
    changed[rng.randrange(8, 8 + header)] = rng.choice(b'{}[]",:0123456789 eE-.\\\x00\xff')
    return sealed(bytes(changed))


# --- the property --------------------------------------------------------------------------------


def strictly(data: bytes) -> dict[str, strict_reader.Tensor] | None:
    """What the strict reader reads, or None where it refuses."""
    try:
        return strict_reader.read(data)
    except strict_reader.Refused:
        return None


def outcome(read: Callable[[], Any]) -> Any:
    """What it returns, or None where it refuses.  Nothing but FileError is raised, and not for want of memory."""
    try:
        return read()
    except dkm.FileError as error:
        message = str(error)
    assert "memory" not in message
    assert message.isprintable()
    return None


def assert_same(state: dict[str, torch.Tensor], expected: dict[str, strict_reader.Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        values = expected[name].values
        assert (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) == (expected[name].dtype, values.shape)
        exact = tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        with np.errstate(invalid="ignore"):  # some kinds of NaN
            wide = values.astype(np.float32) if values.dtype == np.float16 else values
        np.testing.assert_array_equal(exact.numpy(), wide, strict=True)


def copies(name: str) -> list[nn.Module]:
    """Plain models to be packed: with values, whose dtypes they keep, and without any."""
    return [copy.deepcopy(plain(name)), copy.deepcopy(plain(name)).to("meta")]


def held(model: nn.Module, name: str) -> torch.Tensor:
    """A tensor by its name in the state_dict of the plain model; a packed one is decoded."""
    return reduce(getattr, name.split("."), model).detach()


def check(name: str, data: bytes, path: Path) -> bool:
    """Whether the file is a valid one; all readers must agree."""
    path.write_bytes(data)
    expected = strictly(data)
    state, printed = outcome(lambda: decode(data)), outcome(lambda: describe(path))
    assert (state is None) == (printed is None) == (expected is None)
    loaded = outcome(lambda: dkm.load(path, into=plain(name)))
    packed = [outcome(lambda: dkm.load(path, into=model, packed=True)) for model in copies(name)]  # noqa: B023
    assert all((loaded is None) == (each is None) for each in packed)
    if state is None or expected is None:
        assert loaded is None
        return False
    assert_same(state, expected)
    if loaded is not None:
        here, on_meta = ({key: held(model, key) for key in loaded.state_dict()} for model in packed)
        torch.testing.assert_close(here, dict(loaded.state_dict()), rtol=0, atol=0, equal_nan=True)
        assert_same(on_meta, expected)
    safetensors.torch.load(data)  # what we read, any safetensors library opens
    assert all(line.isprintable() for line in printed.splitlines())
    return True


@pytest.mark.parametrize("name", NAMES)
def test_the_strict_reader_agrees_on_valid_files(name, tmp_path):
    assert check(name, good(name), tmp_path / "model.dkm")
    assert check(name, taken_apart(good(name)).to_bytes(), tmp_path / "model.dkm")


def test_altered_files_are_refused_or_read_exactly(tmp_path):
    for name in NAMES:
        good(name), plain(name)
    valid = 0
    with limited_memory(512 * 2**20):
        for case in range(CASES):
            name, data = altered(random.Random(case))
            try:
                valid += check(name, data, tmp_path / "model.dkm")
            except BaseException as error:
                error.add_note(f"case {case}: {name}, {data[:3000]!r}")
                raise
    assert 0.05 * CASES < valid < 0.7 * CASES  # or the alterations do not test much


def test_harmed_files_are_always_refused(tmp_path):
    path, names = tmp_path / "model.dkm", NAMES
    for case in range(CASES):
        rng = random.Random(case)
        data = bytearray(good(rng.choice(names)))
        at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(len(data), 800))
        data[at] ^= rng.randint(1, 255)
        path.write_bytes(data)
        for read in (lambda: decode(bytes(data)), lambda: describe(path), lambda: dkm.load(path)):  # noqa: B023
            with pytest.raises(dkm.FileError):
                read()
