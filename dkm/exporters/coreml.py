"""Target `coreml`: an .mlpackage whose weights are palettes, for iOS 18 and macOS 15 and later.

coremltools' own converter does it: it reads palettes from buffers named `_COREML_/...` beside a parameter.  It works on
any system.  Only a Mac can run the result, so the check is of what the package holds: every table, index and scale is
read back, and has to give the weights of the model, bit for bit.
"""

import contextlib
import copy
import hashlib
import importlib
import io
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..formats.described import Codes, Described
from ..foundation.errors import ExportError
from ..modelling.parameters import parameters
from .palettes import Palette, palette
from .target import Checked, Job, Row, Target, needed, register, tensors_in

SCALING = "constexpr_blockwise_shift_scale"
PALETTIZATION = 2  # of coremltools' kinds of compression
PRECISIONS = {"float16": torch.float16, "float32": torch.float32}
SYSTEMS = (18, 26)
CHECKED = "tables, indices and scales read back from the package; only a Mac can compute outputs"
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.MultiheadAttention)


@register("coreml")
@dataclass(frozen=True)
class CoreML(Target):
    """Fixed input shapes, those of the example.  Clustered weights that Core ML's palettes cannot hold are dense."""

    suffix: ClassVar[str] = ".mlpackage"
    precision: str = "float16"  # what Core ML computes in; "float32" is slower, and exact
    ios: int = 18  # the oldest system that reads the package; 26 has scales of rows as such, and for vectors, too

    def __post_init__(self) -> None:
        if self.ios not in SYSTEMS:
            raise ValueError(f"ios must be {' or '.join(map(str, SYSTEMS))}, got {self.ios!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be {' or '.join(PRECISIONS)}, got {self.precision!r}")

    def write(self, job: Job, path: Path) -> list[Row]:
        _coremltools()
        if path.suffix != self.suffix:
            raise ExportError(f"Core ML knows a model by the end of its name: let the path end in {self.suffix}")
        palettes, reasons = self._palettes(job)
        model = copy.deepcopy(job.plain_model).float()
        owners = {owned.name: owned.owners for owned in parameters(model)}
        model.register_buffer("_COREML_/metadata_version", torch.tensor(1))
        for name, own in palettes.items():
            for module, attribute in owners[name]:
                _register(module, attribute, own)
        with _quiet(), _known_indices(palettes):
            package = self._converted(_Flat(model, tuple(job.kwargs)).eval(), (*job.args, *job.kwargs.values()))
            package.save(str(path))
        found = {_key(own.values().numpy()) for own in read_palettes(path)}
        for name, own in palettes.items():
            if _key(own.values().numpy()) not in found:
                reasons[name] = "coremltools has made it dense: what uses it takes no palette"
        return [self._row(each, palettes, reasons) for each in job.tensors]

    def check(self, job: Job, path: Path) -> Checked:
        expected = {_key(own.values().numpy()) for own in self._palettes(job)[0].values()}
        strange = any(_key(own.values().numpy()) not in expected for own in read_palettes(path))
        return Checked(math.inf if strange else 0.0, CHECKED)

    def _palettes(self, job: Job) -> tuple[dict[str, Palette], dict[str, str]]:
        """What fits, by name, and why the other clustered tensors do not."""
        dtype, found, reasons = PRECISIONS[self.precision], {}, {}
        owners = {owned.name: owned.owners for owned in parameters(job.plain_model)}
        for each in job.tensors:
            if not isinstance(each.content, Codes):
                continue
            other = [module for module, _ in owners[each.name] if not _takes_palettes(module)]
            own = f"coremltools has no palettes in {type(other[0]).__name__}" if other else palette(each, dtype)
            own = self._allowed(own, each) if isinstance(own, Palette) else own
            if isinstance(own, Palette):
                found[each.name] = own
            else:
                reasons[each.name] = own
        return found, reasons

    def _allowed(self, own: Palette, each: Described) -> Palette | str:
        """The palette, or why this system does not have it: iOS 18 has scales in the form of a table for each row."""
        if own.scale is None or self.ios > 18:
            return own
        if own.vector_axis is not None:
            return "coremltools writes vectors with scales for iOS 26 only: ios=26"
        if self._bytes(own) >= each.numel * PRECISIONS[self.precision].itemsize:
            return "iOS 18 has scales as a table for each row, which take more than dense weights here: ios=26"
        return own

    def _bytes(self, own: Palette) -> int:
        """What a palette takes in the package."""
        table, scales = own.table.numel(), 0 if own.scale is None else own.scale.numel()
        if scales and self.ios == 18:
            table = table // own.table.shape[0] * scales
        return -(-own.indices.numel() * own.bits // 8) + (table + scales) * PRECISIONS[self.precision].itemsize

    def _row(self, each: Described, palettes: Mapping[str, Palette], reasons: Mapping[str, str]) -> Row:
        if each.name in palettes and each.name not in reasons:
            own = palettes[each.name]
            scaled = "" if own.scale is None else " and scales"
            return Row.of(each, f"{own.bits}-bit codes and a table{scaled}", self._bytes(own))
        size = each.numel * (PRECISIONS[self.precision].itemsize if each.dtype.is_floating_point else 4)
        return Row.of(each, f"dense {self.precision}", size, reasons.get(each.name, ""))

    def _converted(self, model: nn.Module, example: tuple[Tensor, ...]) -> Any:
        """The package.  coremltools reads what torch.export gives and what torch.jit.trace gives; some models get
        through one of them only."""
        ct = _coremltools()
        options = dict(
            minimum_deployment_target=getattr(ct.target, f"iOS{self.ios}"),
            compute_precision=getattr(ct.precision, self.precision.upper()),
            skip_model_load=True,
        )
        inputs = [ct.TensorType(shape=each.shape, dtype=_input_type(each)) for each in example]
        problems = []
        for way in (_exported, _traced):
            try:
                program = way(model, example)
                given = {"inputs": inputs} if way is _traced else {}
                return ct.convert(program, **options, **given)
            except Exception as error:  # whatever either of the libraries raises about a model
                problems.append(
                    f"{way.__name__[1:]}: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
                )
        raise ExportError(f"coremltools cannot convert the model ({'; '.join(problems)})")


def _takes_palettes(module: nn.Module) -> bool:
    return isinstance(module, LAYERS) or type(module).__name__ == "Conv1D"  # transformers' name for a linear layer


class _Flat(nn.Module):
    """A model with inputs by position only, and a tuple of tensors as output."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Any:
        first = len(inputs) - len(self.names)
        found = tensors_in(self.model(*inputs[:first], **dict(zip(self.names, inputs[first:], strict=True))))
        return found[0] if len(found) == 1 else tuple(found)


def _input_type(tensor: Tensor) -> Any:
    return np.float32 if tensor.is_floating_point() else np.int32


def _exported(model: nn.Module, example: tuple[Tensor, ...]) -> Any:
    with torch.no_grad():
        program = torch.export.export(model, example)
    # what coremltools does not know, such as `diff` in the attention masks of transformers, PyTorch can take apart
    known, registry = torch.export.default_decompositions(), _operators()
    used = {node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    return program.run_decompositions(
        {op: known[op] for op in used if op in known and not registry.get_func(op.name())}
    )


@cache
def _operators() -> Any:
    """The operators of PyTorch that coremltools knows, and `alias`, which taking others apart leaves behind."""
    registry = importlib.import_module("coremltools.converters.mil.frontend.torch.torch_op_registry")
    build = importlib.import_module("coremltools.converters.mil").Builder

    def alias(context: Any, node: Any) -> None:
        context.add(build.identity(x=context[node.inputs[0]], name=node.name))

    if registry._TORCH_OPS_REGISTRY.get_func("alias") is None:
        registry.register_torch_op(alias)
    return registry._TORCH_OPS_REGISTRY


def _traced(model: nn.Module, example: tuple[Tensor, ...]) -> Any:
    with torch.no_grad():
        return torch.jit.trace(model, example, check_trace=False)


def _register(module: nn.Module, attribute: str, own: Palette) -> None:
    """The buffers from which the converter reads the palette of a parameter."""
    prefix = f"_COREML_/{attribute}/"
    module.register_buffer(f"{prefix}compression_type", torch.tensor([PALETTIZATION]))
    module.register_buffer(f"{prefix}lut", own.table)
    if own.vector_axis is not None:
        module.register_buffer(f"{prefix}vector_axis", torch.tensor(own.vector_axis))
    if own.scale is not None:
        module.register_buffer(f"{prefix}palettization_scale", own.scale)


@contextlib.contextmanager
def _known_indices(palettes: Mapping[str, Palette]) -> Iterator[None]:
    """The converter looks for the nearest entry of every weight, in an array of weights times entries.  We know the
    indices; so that large layers fit into the memory, it gets them from here."""
    library = importlib.import_module("coremltools.optimize._utils")
    search = getattr(library, "find_indices_for_lut", None)
    if search is None:  # another version of coremltools has another way, and finds them itself
        yield
        return
    known = {}
    for own in palettes.values():
        divided = own.values() if own.scale is None else own.values() / own.scale
        known[_key(divided.numpy(), own.table.numpy())] = own.indices.numpy()

    def find(data: np.ndarray, lut: np.ndarray, vector_axis: Any = None) -> np.ndarray:
        own = known.get(_key(data, lut))
        return search(data, lut, vector_axis) if own is None else own

    library.find_indices_for_lut = find  # type: ignore[attr-defined]
    try:
        yield
    finally:
        library.find_indices_for_lut = search  # type: ignore[attr-defined]


def read_palettes(path: Path) -> list[Palette]:
    """All palettes in a package."""
    ct = _coremltools()
    with _quiet():
        model = ct.models.MLModel(str(path), skip_model_load=True)
        spec = model.get_spec()
        loader = importlib.import_module("coremltools.converters.mil.frontend.milproto.load")
        program = loader.load(spec, spec.specificationVersion, model.weights_dir)
    return [
        _palette_of(op)
        for function in program.functions.values()
        for op in _operations(function)
        if op.op_type == "constexpr_lut_to_dense"
    ]


def _operations(block: Any) -> Iterator[Any]:
    for op in block.operations:
        yield op
        for inner in op.blocks:
            yield from _operations(inner)


def _palette_of(op: Any) -> Palette:
    axis = None if op.vector_axis is None else int(op.vector_axis.val)
    after = [each for each in op.outputs[0].child_ops if each.op_type == SCALING]
    scale = torch.from_numpy(after[0].scale.val.astype(np.float32)) if after else None
    if op.lut.val is None:  # coremltools applies scales of rows to tables of rows
        table = op.lut.op.data.val.astype(np.float32) * op.lut.op.scale.val.astype(np.float32)
    else:
        table = op.lut.val.astype(np.float32)
    return Palette(torch.from_numpy(op.indices.val.astype(np.uint8)), torch.from_numpy(table), axis, scale)


def _key(*arrays: np.ndarray) -> bytes:
    """Equal for equal arrays, bit for bit."""
    digest = hashlib.sha256()
    for each in arrays:
        digest.update(f"{each.dtype} {each.shape} ".encode())
        digest.update(np.ascontiguousarray(each).data)
    return digest.digest()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without coremltools' advice, which is about versions and renamed inputs, and without its progress bars."""
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@cache
def _coremltools() -> Any:
    with _quiet():
        return needed("coremltools", "coreml")
