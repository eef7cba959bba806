"""A small network, compressed and trained for two steps; files made by hand; tensors with groups and scales."""

import hashlib
import json
import struct
from dataclasses import replace

import torch
from samples import grid
from torch import Tensor, nn

import dkm
from dkm.clustering.decode import Outliers
from dkm.clustering.groups import Group
from dkm.clustering.precision import stored_dtype
from dkm.clustering.spec import Spec
from dkm.formats.codec import pack
from dkm.formats.container import DTYPES
from dkm.formats.described import Codes, Described

BLANK = "0" * 64
STORED = {torch.uint8: "U8", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.bool: "BOOL"}
STORED |= {torch.int64: "I64", torch.uint32: "U32", torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3"}
STORED |= {torch.float8_e5m2: "F8_E5M2"}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 7, 3),
        nn.BatchNorm2d(7),
        nn.ReLU(),
        nn.Conv2d(7, 5, (1, 3), bias=False),
        nn.BatchNorm2d(5),
        nn.Flatten(),
        nn.Linear(40, 11),
    ).to(dtype)


def images(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(6, 3, 6, 6, generator=torch.Generator().manual_seed(7)).to(dtype)


def trained(text: str = "0:3/2, 3:2, 6:4/3", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Compressed and trained for two steps, so that no weight is at its centroid; in evaluation mode."""
    model = net(dtype)
    dkm.compress_(model, text, steps=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(2):
        model(torch.randn(6, 3, 6, 6).to(dtype)).float().square().mean().backward()
        optimizer.step()
    return model.eval()


def header(data: bytes) -> dict:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


def raw(header: str, data: bytes = b"") -> bytes:
    """A file with this header and the right checksum."""
    text = header.encode()
    file = len(text).to_bytes(8, "little") + text + data
    return file.replace(BLANK.encode(), hashlib.sha256(file).hexdigest().encode(), 1)


def built(tensors: object, arrays: dict[str, Tensor], ties: object = None, /, **metadata: object) -> bytes:
    """A file with these contents and the right checksum."""
    entries, data = {}, b""
    for name, tensor in arrays.items():
        own = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        offsets = [len(data), len(data) + len(own)]
        entries[name] = {"dtype": STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += own
    texts = {
        "tensors": tensors if isinstance(tensors, str) else json.dumps(tensors),
        "ties": ties if isinstance(ties, str) else json.dumps(ties or {}),
    }
    meta = {"format": "dkm", "version": "1", **texts, "checksum": BLANK, **metadata}
    return raw(json.dumps({"__metadata__": meta, **entries}, separators=(",", ":")), data)


def tensor(
    name: str, shape: tuple[int, ...], spec: Spec, *, dtype: torch.dtype = torch.float32, exponent: int = 0
) -> Described:
    """A clustered tensor with known codes, centroids and scales, the same on every machine."""
    grouping, k = spec.grouping(shape), 2**spec.bits
    centroids = grid(grouping.count, k, spec.dim, step=0.125)
    centroids = centroids.to(torch.float8_e4m3fn if spec.float8 else stored_dtype(dtype))
    scales = (torch.arange(shape[0] if shape else 1) * 3 % 7 + 1) / 13  # 16 bits have to round them
    codes = (torch.arange(grouping.codes) * 7 + torch.arange(grouping.codes) // 5) % k
    content = Codes(
        bits=spec.bits,
        dim=spec.dim,
        exponent=exponent,
        packed=pack(codes, spec.bits),
        centroids=centroids if spec.group is not None else centroids[0],
        group=spec.group,
        scales=scales.to(stored_dtype(dtype)) if spec.scaled else None,
    )
    return Described(name, shape, dtype, content)


def grouped() -> list[Described]:
    """Tensors with groups of all kinds, at whose edges vectors do not count, and with scales and 8 bits."""
    small = {"dtype": torch.bfloat16, "exponent": -20}
    return [
        tensor("rows", (9, 5), Spec(2, 2, scaled=True, group=Group(2))),
        tensor("row", (4, 3, 2), Spec(1, 4, group=Group(1)), dtype=torch.float16),
        tensor("tiles", (10, 3, 7), Spec(3, 3, scaled=True, group=Group(4, 8), float8=True)),
        tensor("narrow", (5, 9), Spec(2, 2, group=Group(3, 8)), **small),
        tensor("runs", (7, 11), Spec(4, 1, scaled=True, group=Group(None, 24)), dtype=torch.bfloat16),
        tensor("beyond", (3, 4), Spec(2, 5, scaled=True, group=Group(8, 64), float8=True), dtype=torch.float64),
        tensor("scaled", (6, 4), Spec(2, 1, scaled=True), dtype=torch.float16, exponent=-3),
        tensor("eight", (6, 4), Spec(2, 3, float8=True)),
        tensor("number", (), Spec(1, 2, scaled=True, group=Group(3))),
        Described("kept", (3,), torch.float32, grid(3)),
    ]


def skewed(name: str, shape: tuple[int, ...], spec: Spec, **options: object) -> Described:
    """The same with codes of which a few are frequent: those take less when they are entropy-coded."""
    each = tensor(name, shape, spec, **options)
    n, k = each.grouping.codes, 2**spec.bits
    codes = ((torch.arange(n) * 7919 % 10007) ** 3 * k // 10007**3 * 5 + 3) % k
    return replace(each, content=replace(each.content, packed=pack(codes, spec.bits)))


def coded() -> list[Described]:
    """Tensors whose codes take less when they are entropy-coded, and some whose codes do not."""
    constant = tensor("constant", (20, 32), Spec(2))
    constant = replace(constant, content=replace(constant.content, packed=pack(torch.full((640,), 2), 2)))
    bit, small = Spec(1, 3, group=Group(None, 700)), {"dtype": torch.bfloat16, "exponent": -20}
    return [
        skewed("plain", (30, 41), Spec(3), dtype=torch.float16),
        skewed("tiles", (31, 50), Spec(4, 2, scaled=True, group=Group(8, 20), float8=True)),
        skewed("runs", (2, 75, 50), bit, **small),
        skewed("fine", (23, 29), Spec(7, scaled=True), dtype=torch.float64),
        constant,
        skewed("few", (5, 7), Spec(3)),
        tensor("even", (24, 32), Spec(2)),
        Described("kept", (3,), torch.float32, grid(3)),
    ]


def with_outliers(each: Described, every: int) -> Described:
    """The same, with an outlier at each place of so many, the last one included."""
    positions = torch.arange(each.numel - 1, -1, -every).flip(0)
    values = ((torch.arange(len(positions)) * 37 % 19 - 9) / 3).to(each.dtype)
    return replace(each, content=replace(each.content, outliers=Outliers(positions, values)))


def apart() -> list[Described]:
    """Tensors with outliers, of every dtype, and with all that a tensor may have besides."""
    small = {"dtype": torch.bfloat16, "exponent": -20}
    return [
        with_outliers(tensor("plain", (9, 5), Spec(2)), 7),
        with_outliers(tensor("vectors", (4, 3, 2), Spec(1, 4, group=Group(1)), dtype=torch.float16), 5),
        with_outliers(tensor("tiles", (10, 3, 7), Spec(3, 3, scaled=True, group=Group(4, 8), float8=True)), 50),
        with_outliers(tensor("runs", (7, 11), Spec(4, 1, scaled=True, group=Group(None, 24)), **small), 30),
        with_outliers(tensor("long", (3, 4), Spec(2, 5, group=Group(8, 64)), dtype=torch.float64), 1),
        with_outliers(skewed("coded", (30, 41), Spec(3)), 100),
        with_outliers(tensor("number", (), Spec(1, 2)), 1),
        tensor("none", (6, 4), Spec(2)),
        Described("kept", (3,), torch.float32, grid(3)),
    ]


def empty_like(tensors: list[Described]) -> nn.Module:
    """A plain model with these parameters."""
    model = nn.Module()
    for each in tensors:
        model.register_parameter(each.name, nn.Parameter(torch.zeros(each.shape, dtype=each.dtype)))
    return model


def every_dtype() -> list[Described]:
    """A tensor of every dtype that a file can hold, each with its first, its last and some values between them."""
    patterns = torch.tensor([0x00, 0x01, 0x38, 0x3D, 0x7B, 0x80, 0x81, 0xB9, 0xFB, 0x55], dtype=torch.uint8)
    tensors = []
    for name, dtype in DTYPES.items():
        if dtype == torch.bool:
            values = torch.tensor([False, True])
        elif dtype.itemsize == 1:
            values = patterns.view(dtype)
        elif dtype.is_complex:
            values = torch.complex(torch.tensor([1.0, -0.5]), torch.tensor([2.0, float("inf")]))
        elif dtype.is_floating_point:
            values = torch.tensor([0.0, 1.5, -(2.0**-14), float("inf"), float("nan")]).to(dtype)
        else:
            limits = torch.iinfo(dtype)
            values = torch.tensor([limits.min, 7, limits.max], dtype=dtype)
        tensors.append(Described(name, tuple(values.shape), values.dtype, values))
    return tensors
