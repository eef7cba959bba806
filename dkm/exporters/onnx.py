"""Target `onnx`: one file with codes and centroids, in standard operators, that onnxruntime runs without dkm.

torch.onnx makes the graph of the plain model.  While the graph is simplified, all tensors of the model are inputs of
it, so that none can be folded into a constant, merged or transposed.  Then each of them becomes what `onnx_nodes.py`
makes of it.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..formats.described import Codes, Described
from ..foundation.errors import ExportError
from .target import Checked, Job, Row, Target, needed, register

OPSET = 20
AXES = {"batch": 0, "length": 1}  # what `dynamic` can name
LARGEST = 2**31 - 2**20  # bytes of a file: protobuf ends at 2 GiB; the graph takes some
UNUSED = "the outputs do not depend on it"


@register("onnx")
@dataclass(frozen=True)
class Onnx(Target):
    """Tensors of 16 bits are computed with in float32."""

    suffix: ClassVar[str] = ".onnx"
    dynamic: str = ""  # axes of all inputs that may have another size: "batch", or "batch,length"

    def __post_init__(self) -> None:
        if not isinstance(self.dynamic, str) or not set(self.dynamic.split(",")) <= {"", *AXES}:
            raise ValueError(f'dynamic= must be "batch", "length" or "batch,length", got {self.dynamic!r}')

    def write(self, job: Job, path: Path) -> list[Row]:
        for module in ("onnxscript", "onnxruntime"):
            needed(module, self.name)
        ir = needed("onnx_ir", self.name)
        job = _in_float32(job)
        program = _exported(job, self._axes)
        found = _taken_out(program.model.graph, job)
        program.optimize()
        rows = _put_back(program.model.graph, job, found)
        ir.passes.common.ClearMetadataAndDocStringPass()(program.model)  # it has paths of this machine
        ir.passes.common.NameFixPass()(program.model)
        _check_standard(program.model)
        ir.save(program.model, path)
        return rows

    def check(self, job: Job, path: Path) -> Checked:
        runtime = needed("onnxruntime", self.name)
        job, axes = _in_float32(job), self._axes
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors
        try:
            session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            jobs = [job, _larger(job, axes, 2)] if axes else [job]
            furthest = max(each.furthest(_outputs(session, each)) for each in jobs)
        except Exception as error:  # those of onnxruntime have no common class
            if not type(error).__module__.startswith("onnxruntime"):
                raise
            raise ExportError(f"onnxruntime does not run what was written: {_first_line(error)}") from error
        how = f"outputs of onnxruntime {runtime.__version__} on the example"
        return Checked(furthest, how + (f", and with a larger {self.dynamic}" if axes else ""))

    @property
    def _axes(self) -> dict[int, str]:
        return {AXES[name]: name for name in self.dynamic.split(",") if name}


def _in_float32(job: Job) -> Job:
    """The same in float32 instead of 16 bits, which onnxruntime hardly computes with on a CPU."""
    from .onnx_nodes import HALVES, widened

    def wide(tensor: Tensor) -> Tensor:
        return tensor.to(widened(tensor.dtype)) if tensor.dtype in HALVES else tensor

    job.plain_model._apply(wide)  # a job's model is nobody else's
    return _with_inputs(job, wide)


def _exported(job: Job, axes: Mapping[int, str]) -> Any:
    """The model as a program of torch.onnx, not simplified."""
    traced = _larger(job, axes, 0)
    named = _with_inputs(traced, lambda each: {axis: name for axis, name in axes.items() if axis < each.ndim})
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.onnx.export(
                traced.plain_model,
                traced.args,
                kwargs=traced.kwargs,
                dynamic_shapes=(named.args or named.kwargs) if axes else None,
                opset_version=OPSET,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise ExportError(f"torch.onnx cannot export the model: {_first_line(error.__cause__ or error)}") from error


def _larger(job: Job, axes: Mapping[int, str], by: int) -> Job:
    """With an example whose axes are larger by so much, and at least 2, because torch.export takes 1 for a constant."""

    def larger(tensor: Tensor) -> Tensor:
        for axis in axes:
            if axis < tensor.ndim:
                size = tensor.shape[axis]
                tensor = tensor.index_select(axis, torch.arange(max(size, 2) + by) % size)
        return tensor

    return _with_inputs(job, larger)


def _with_inputs(job: Job, function: Callable[[Tensor], Any]) -> Job:
    """With what this function makes of those of the example."""
    kwargs = {name: function(each) for name, each in job.kwargs.items()}
    return replace(job, args=tuple(map(function, job.args)), kwargs=kwargs)


def _taken_out(graph: Any, job: Job) -> list[str]:
    """Make inputs, the last ones, of all initializers that are tensors of the job.  Returns whose they are."""
    own = {alias: each.name for each in job.tensors for alias in (each.name, *each.aliases)}
    state = job.plain_model.state_dict()
    memory = {state[name].untyped_storage().data_ptr(): name for name in own if state[name].numel()}
    found = []
    for name, value in list(graph.initializers.items()):
        if name not in own:  # a parameter in a list of the model is there under another name
            tensor = value.const_value.raw
            shared = memory.get(tensor.untyped_storage().data_ptr()) if isinstance(tensor, Tensor) else None
            if shared is None:
                continue
            if tensor.shape != state[shared].shape or tensor.stride() != state[shared].stride():
                raise ExportError(
                    f"the model has a view of {shared} that it made before forward(): make it in forward()"
                )
            name = shared
        del graph.initializers[value.name]
        value.const_value = None
        graph.inputs.append(value)
        found.append(own[name])
    return found


def _put_back(graph: Any, job: Job, found: list[str]) -> list[Row]:
    """Replace the last inputs by what is stored of the tensors of these names."""
    from .onnx_nodes import Nodes, tensor_nodes

    nodes = Nodes()
    used: dict[str, list[Any]] = {}
    first = len(graph.inputs) - len(found)
    for name, value in zip(found, graph.inputs[first:], strict=True):
        if value.uses():
            used.setdefault(name, []).append(value)
    del graph.inputs[first:]
    rows = {each.name: Row.of(each, "", 0, UNUSED) for each in job.tensors}
    for each in sorted(job.tensors, key=lambda each: each.name):  # a model and its file may have them in another order
        if each.name in used:
            before = nodes.bytes
            own = tensor_nodes(nodes, each)
            for value in used[each.name]:
                value.replace_all_uses_with(own)
            rows[each.name] = _row(each, nodes.bytes - before)
    if nodes.bytes > LARGEST:
        raise ExportError(f"the tensors take {nodes.bytes:,} bytes, and an ONNX file can have 2 GiB at most")
    nodes.place_in(graph)
    return list(rows.values())


def _row(each: Described, size: int) -> Row:
    own = each.content
    if isinstance(own, Codes):
        return Row.of(each, f"{own.bits}-bit codes" + (f", {own.outliers}" if own.outliers is not None else ""), size)
    return Row.of(each, str(own.dtype).removeprefix("torch."), size)


def _check_standard(model: Any) -> None:
    other = {f"{node.domain}.{node.op_type}" for node in model.graph.all_nodes() if node.domain not in ("", "ai.onnx")}
    if other:
        raise ExportError(f"the model needs operators that are not of ONNX itself: {', '.join(sorted(other))}")


def _outputs(session: Any, job: Job) -> list[Tensor]:
    names = [each.name for each in session.get_inputs()]
    feed = dict(zip(names, job.args, strict=False)) | {k: v for k, v in job.kwargs.items() if k in names}
    return [torch.from_numpy(each) for each in session.run(None, {name: each.numpy() for name, each in feed.items()})]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
