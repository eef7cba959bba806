"""What a target is: the contract between `export` and the files of this folder, and the registry of their names."""

import difflib
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..formats.described import Codes, Described
from ..foundation.errors import ExportError
from ..foundation.text import shown, size_text, table


class Row(NamedTuple):
    """What became of one tensor."""

    name: str
    shape: tuple[int, ...]
    source: str  # in the .dkm file: "4/4 scaled", or the dtype of what is not clustered
    written: str  # in words: "4-bit codes and a table", "float32"; "" where nothing of it was written
    bytes: int
    why: str = ""  # a clustered tensor that was written dense: the reason.  A tensor that was not written: the reason

    @classmethod
    def of(cls, each: Described, written: str, bytes: int, why: str = "") -> "Row":
        """The row of a tensor."""
        content = each.content
        source = content.spec.label if isinstance(content, Codes) else str(content.dtype).removeprefix("torch.")
        return cls(each.name, each.shape, source, written, bytes, why)


class Checked(NamedTuple):
    """How far what was written is from the model, and how that was found out."""

    difference: float  # the largest absolute one
    how: str  # "outputs of onnxruntime on the example"


@dataclass
class Job:
    """What a target gets: the tensors as plain data and, where it asks for it, the model and an example input."""

    tensors: tuple[Described, ...]
    model: nn.Module | None = None  # plain, on the CPU, in evaluation mode, with the values of `tensors`
    args: tuple[Tensor, ...] = ()  # the example, by position
    kwargs: dict[str, Tensor] = field(default_factory=dict)  # and by name

    @property
    def plain_model(self) -> nn.Module:
        """The model, for a target that needs one."""
        assert self.model is not None
        return self.model

    @cached_property
    def outputs(self) -> list[Tensor]:
        """What the model makes of the example: all tensors in its output, in their order."""
        with torch.no_grad():
            return tensors_in(self.plain_model(*self.args, **self.kwargs))

    def furthest(self, outputs: Iterable[Tensor]) -> float:
        """The largest absolute difference of these outputs from those of the model; infinite where shapes differ."""
        found = list(outputs)
        if [tuple(each.shape) for each in found] != [tuple(each.shape) for each in self.outputs]:
            return math.inf
        return max(map(largest_difference, found, self.outputs), default=0.0)


class Target(ABC):
    """A format.  A subclass is a dataclass whose fields, all with defaults, are the options of the target."""

    name: ClassVar[str]
    suffix: ClassVar[str]  # of a path that the command makes up
    needs_model: ClassVar[bool] = True  # a model, and no .dkm file alone
    needs_example: ClassVar[bool] = True

    @abstractmethod
    def write(self, job: Job, path: Path) -> list[Row]:
        """Write a file or a folder at `path`, where nothing is yet.  Returns a row for every tensor of the job."""

    @abstractmethod
    def check(self, job: Job, path: Path) -> Checked:
        """Read what `write` has written with the means of its readers, and compare it with the model."""


@dataclass(frozen=True)
class Report:
    """What was written: `print` shows a row for each tensor, and what was exported dense and why."""

    path: Path
    target: str
    bytes: int
    rows: tuple[Row, ...]
    checked: Checked
    tolerance: float

    @property
    def dense(self) -> tuple[Row, ...]:
        """The clustered tensors that were written dense."""
        return tuple(row for row in self.rows if "/" in row.source and row.why and row.written)

    def table(self, columns: int = 100) -> str:
        """A row for each tensor, at most `columns` wide where that is possible."""
        head = ("tensor", "shape", "in dkm", "written as", "bytes", "why")
        lines = [
            (shown(r.name), "x".join(map(str, r.shape)) or "()", r.source, r.written or "-", f"{r.bytes:,}", r.why)
            for r in self.rows
        ]
        return table([head, *lines], "<<<<><", columns, shrink_last=any(row.why for row in self.rows), spare=("shape",))

    def summary(self) -> str:
        """Three lines, and one for each clustered tensor that was written dense, or not at all."""
        clustered = [row for row in self.rows if "/" in row.source]
        other = [row for row in clustered if row.why]
        lines = [f"{len(clustered) - len(other)} of {len(clustered)} clustered tensors are written as codes"]
        lines += [f"{'dense' if row.written else 'not written'}: {shown(row.name)}, {row.why}" for row in other]
        difference = f"{self.checked.difference:.2g}" if self.checked.difference else "0"
        lines += [f"largest difference from the model: {difference} (allowed {self.tolerance:g}; {self.checked.how})"]
        return "\n".join([*lines, f"{self.path}: {self.bytes:,} bytes ({size_text(self.bytes)})"])

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.summary()}"


TARGETS: dict[str, type[Target]] = {}

Kind = TypeVar("Kind", bound=type[Target])


def register(name: str) -> Callable[[Kind], Kind]:
    """A class decorator for a subclass of `Target`: `export(..., to=name)` then uses it."""

    def decorate(kind: Kind) -> Kind:
        TARGETS[name] = kind
        kind.name = name
        return kind

    return decorate


def named(to: str, options: dict[str, Any]) -> Target:
    """The target of this name with these options; an error names what there is."""
    if to not in TARGETS:
        raise ValueError(f"to= must be one of {', '.join(TARGETS)}, got {to!r}{_hint(to, TARGETS)}")
    known = option_types(to)
    for name in options:
        if name not in known:
            takes = f"it takes {', '.join(known)}{_hint(name, known)}" if known else "it takes no options"
            raise TypeError(f'to="{to}" has no option {name}: {takes}')
    return TARGETS[to](**options)


def option_types(to: str) -> dict[str, Any]:
    """The options of a target, and the type of each."""
    return {each.name: each.type for each in fields(TARGETS[to])}  # type: ignore[arg-type]  # all are dataclasses


def needed(module: str, target: str) -> Any:
    """A module that a target needs; ExportError with what to install where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        raise ExportError(f'to="{target}" needs {missing}: pip install "torch-dkm[{target}]"') from error


def tensors_in(output: Any) -> list[Tensor]:
    """All tensors in what a model returns: a tensor, or tuples, lists and dicts of them."""
    return [each.detach() for each in tree_leaves(output) if isinstance(each, Tensor)]


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference of two tensors of one shape; infinite where one of them is NaN and the other is
    not.  Equal infinities differ by 0."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(math.inf, math.inf).amax()) if a.numel() else 0.0


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
