"""Tensors as nodes of ONNX: onnxruntime decodes them to our weights, bit for bit."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx_ir")
import onnx_ir as ir
import onnxruntime
from dkm_files import apart

from dkm.clustering.groups import Group
from dkm.clustering.precision import FLOAT8
from dkm.clustering.spec import Spec
from dkm.exporters.onnx_nodes import Nodes, tensor_nodes, widened
from dkm.formats.codec import pack
from dkm.formats.described import Codes, Described


def clustered(spec: Spec, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, exponent: int = 0) -> Described:
    """A tensor with random codes."""
    generator = torch.Generator().manual_seed(spec.bits)
    grouping = spec.grouping(shape)
    groups = () if spec.group is None else (grouping.count,)
    stored = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16
    centroids = torch.randn(*groups, 2**spec.bits, spec.dim, generator=generator)
    codes = torch.randint(2**spec.bits, (grouping.codes,), generator=generator)
    scales = torch.rand(shape[0] if shape else 1, generator=generator) + 0.1
    content = Codes(
        bits=spec.bits,
        dim=spec.dim,
        exponent=exponent,
        packed=pack(codes, spec.bits),
        centroids=centroids.to(FLOAT8 if spec.float8 else stored),
        group=spec.group,
        scales=scales.to(stored) if spec.scaled else None,
    )
    return Described("weight", shape, dtype, content)


def read(each: Described) -> tuple[Tensor, int]:
    """The tensor as onnxruntime has it, and the bytes of the file."""
    nodes = Nodes()
    value = tensor_nodes(nodes, each)
    value.type = ir.TensorType(ir.tensor_adapters.from_torch_dtype(widened(each.dtype)))
    value.shape = ir.Shape(each.shape)
    graph = ir.Graph([], [value], nodes=[], opset_imports={"": 19}, name="test")
    nodes.place_in(graph)
    data = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {})[0]), len(data)


def assert_exact(each: Described) -> None:
    found, _ = read(each)
    expected = each.values()
    assert found.shape == expected.shape
    assert torch.equal(found, expected.to(widened(expected.dtype)))


@pytest.mark.parametrize("bits", range(1, 13))
def test_all_numbers_of_bits(bits: int):
    for dim, shape in ((1, (5, 7)), (3, (4, 3, 3, 3)), (16, (9, 11)), (1, (16,))):
        assert_exact(clustered(Spec(bits, dim), shape))


@pytest.mark.parametrize(
    "each", [each for each in apart() if isinstance(each.content, Codes)], ids=lambda each: each.name
)
def test_outliers(each: Described):
    assert_exact(each)


GROUPS = {
    "rows that fit": (Group(2), (6, 5), 1),
    "rows that do not": (Group(4), (6, 5), 2),
    "each row": (Group(1), (3, 7), 4),
    "runs": (Group(None, 8), (4, 6), 2),
    "runs that end early": (Group(None, 10), (3, 9), 4),
    "tiles": (Group(2, 4), (6, 8), 2),
    "tiles, narrow at the right": (Group(2, 4), (6, 11), 2),
    "tiles, low at the bottom": (Group(4, 4), (6, 8), 1),
    "tiles at both edges": (Group(4, 6), (10, 15), 2),
    "one tile and an edge": (Group(4, 8), (4, 9), 8),
    "vectors across rows of a tile": (Group(4, 5), (8, 10), 3),
    "vectors across rows, at both edges": (Group(4, 5), (7, 13), 3),
    "vectors that do not count": (Group(3, 8), (7, 10), 4),
    "a tile larger than the tensor": (Group(100, 100), (3, 4), 1),
    "a convolution": (Group(2), (4, 3, 3, 3), 8),
}


@pytest.mark.parametrize("case", GROUPS)
@pytest.mark.parametrize("scaled", [False, True])
def test_groups(case: str, scaled: bool):
    group, shape, dim = GROUPS[case]
    for bits in (3, 4, 8):
        assert_exact(clustered(Spec(bits, dim, scaled, group), shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("exponent", [0, -14, 3])
def test_dtypes_and_exponents(dtype: torch.dtype, exponent: int):
    for spec in (Spec(3, 2), Spec(5, 1, True), Spec(2, 1, True, Group(2, 4), True)):
        assert_exact(clustered(spec, (5, 6), dtype, exponent))


def test_a_number():
    assert_exact(clustered(Spec(2, 1, True), ()))


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float64),
        (torch.int64, torch.int64),
        (torch.bool, torch.bool),
    ],
)
def test_what_is_not_clustered(stored: torch.dtype, dtype: torch.dtype):
    assert_exact(Described("bias", (2, 3), dtype, torch.tensor([[0, 1, 2], [3, -1, 0]]).to(stored)))


@pytest.mark.parametrize("bits", range(1, 13))
def test_codes_take_their_bits(bits: int):
    each = clustered(Spec(bits), (100, 1000))
    own = each.content
    assert isinstance(own, Codes)
    _, size = read(each)
    assert size - math.ceil(100_000 * bits / 8) - own.centroids.nbytes < 2500  # the graph
