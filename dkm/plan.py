"""Which tensors to cluster, and how finely: text + rules -> a row for every tensor of the model.

A plan is entries `selector:bits/dim` or `selector:keep`, separated by commas; later entries win.  `/dim`
defaults to 1.  This file reads a model and never touches it.
"""

import difflib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

from .clustered import MAX_BITS, Clustered

MEGABYTE = 2**20
SMALL = 10_000  # "we applied 8 bit clustering to a layer with fewer than 10,000 parameters"

WORDS = {
    "cv": "the convolutions",
    "fc": "the last fully connected layer",
    "lin": "every matrix: linear layers, attention projections, recurrent weights",
    "xform": "a transformer's linear layers (lin without recurrent weights)",
    "emb": "the embeddings",
    "all": "every convolution, matrix and embedding",
    "first": "the first convolution, matrix or embedding",
    "last": "the last convolution, matrix or embedding",
}
# Words about a kind of layer leave small tensors at 8/1; words that point at one tensor, and names, do not.
_KINDS = ("cv", "fc", "lin", "xform", "emb", "all")


class PlanError(ValueError):
    """A plan's text that cannot be understood or does not fit the model."""


@dataclass(frozen=True)
class Row:
    """One tensor of the model and what becomes of it."""

    name: str
    shape: tuple[int, ...]
    kind: str  # cv, lin, rnn, emb: may be clustered; bare: if named; "" never
    bits: int | None  # None: kept as it is
    dim: int
    reason: str
    aliases: tuple[str, ...] = ()  # other names of the same tensor
    width: int = 16  # bits a value takes where the tensor is kept

    @property
    def parameters(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def stored_bits(self) -> int:
        """Codes and centroids, or 16 bit a value: the paper's count."""
        if self.bits is None:
            return self.parameters * self.width
        return -(-self.parameters // self.dim) * self.bits + 2**self.bits * self.dim * 16


@dataclass(frozen=True)
class Plan:
    """A row for every tensor; prints as a table."""

    rows: tuple[Row, ...]

    @property
    def bytes(self) -> int:
        """The paper's count, see `megabytes`, up to whole bytes."""
        return -(-sum(row.stored_bits for row in self.rows) // 8)

    @property
    def text(self) -> str:
        """The plan as text, a name for every clustered tensor: `plan(model, this)` decides the same."""
        clustered = [row for row in self.rows if row.bits is not None]
        return ", ".join(f"{row.name}:{row.bits}/{row.dim}" for row in clustered)

    @property
    def megabytes(self) -> float:
        """The paper's count: 2^20 bytes; codes, 16-bit centroids and other parameters; no running statistics."""
        return sum(row.stored_bits for row in self.rows) / 8 / MEGABYTE

    @property
    def parameters(self) -> int:
        return sum(row.parameters for row in self.rows)

    @property
    def bits_per_weight(self) -> float:
        """The codes of the clustered tensors over their weights."""
        clustered = [row for row in self.rows if row.bits is not None]
        codes = sum(-(-row.parameters // row.dim) * row.bits for row in clustered)
        return codes / max(1, sum(row.parameters for row in clustered))

    @property
    def ratio(self) -> float:
        """How many times smaller than the parameters in float32."""
        return self.parameters * 4 / MEGABYTE / max(self.megabytes, 1e-12)

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if name == row.name or name in row.aliases:
                return row
        raise KeyError(name)

    def summary(self) -> str:
        clustered = sum(row.bits is not None for row in self.rows)
        return (
            f"{clustered} of {len(self.rows)} tensors clustered at {self.bits_per_weight:.3f} bits a weight\n"
            f"{self.megabytes:.2f} MB as the paper counts, {self.ratio:.1f}x smaller than float32"
        )

    def __str__(self) -> str:
        return table(self.rows) + "\n" + self.summary()


def table(rows: tuple[Row, ...], columns: int | None = None) -> str:
    """The rows as text, no wider than the terminal; long names lose their middle."""
    columns = columns or shutil.get_terminal_size((100, 24)).columns
    head = ("tensor", "shape", "params", "b/d", "k", "bytes", "why")
    cells = [
        (
            row.name,
            "x".join(map(str, row.shape)) or "()",
            f"{row.parameters:,}",
            "keep" if row.bits is None else f"{row.bits}/{row.dim}",
            "" if row.bits is None else str(2**row.bits),
            f"{-(-row.stored_bits // 8):,}",
            row.reason + (f", also {', '.join(row.aliases)}" if row.aliases else ""),
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
    room = columns - sum(widths[1:-1]) - len(head) + 1
    widths[0] = min(widths[0], max(room - widths[-1], room // 2, 12))  # the name has what the reason leaves
    widths[-1] = max(room - widths[0], 8)
    align = ("<", "<", ">", ">", ">", ">", "<")
    return "\n".join(
        " ".join(f"{_shorten(c, w):{a}{w}}" for c, w, a in zip(line, widths, align, strict=True)).rstrip()
        for line in [head, *((_abbreviate(name, widths[0]), *rest) for name, *rest in cells)]
    )


def _abbreviate(name: str, width: int) -> str:
    """Words of a name to their first letters, from the left, until it fits: its numbers tell layers apart."""
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if len(".".join(parts)) > width:
            parts[i] = re.sub(r"^(\D)\D+", r"\1", part)
    return ".".join(parts)


def _shorten(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head = (width - 1) // 3  # the end of a name tells more than its beginning
    return text[:head] + "…" + text[len(text) - (width - 1 - head) :]


@dataclass(frozen=True)
class Entry:
    """One `selector:bits/dim` of a plan's text; bits None is `keep`."""

    selector: str
    bits: int | None
    dim: int


def parse(text: str) -> list[Entry]:
    """Text -> entries.  No model involved."""
    if not isinstance(text, str):
        raise TypeError(f"a plan is text such as 'cv:4/4, fc:8', got {type(text).__name__}")
    if not text.strip():
        raise PlanError("the plan is empty: say at least one 'selector:bits/dim', for example 'all:4'")
    return [_parse_entry(part.strip(), text) for part in text.split(",")]


def _parse_entry(part: str, text: str) -> Entry:
    selector, colon, spec = (piece.strip() for piece in part.rpartition(":"))
    if not part or not colon or not selector or not spec:
        raise PlanError(f"'{part}' in plan '{text}' is not 'selector:bits/dim' or 'selector:keep'")
    if spec == "keep":
        return Entry(selector, None, 1)
    bits, slash, dim = (piece.strip() for piece in spec.partition("/"))
    if not _is_number(bits) or (slash and not _is_number(dim)):
        raise PlanError(f"'{spec}' in plan '{text}' is not 'bits', 'bits/dim' or 'keep'")
    if not 1 <= int(bits) <= MAX_BITS:
        raise PlanError(f"'{spec}' in plan '{text}': bits must be from 1 to {MAX_BITS}, got {int(bits)}")
    if slash and int(dim) < 1:
        raise PlanError(f"'{spec}' in plan '{text}': dim must be at least 1, got {int(dim)}")
    return Entry(selector, int(bits), int(dim) if slash else 1)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def plan(
    model: nn.Module,
    text: str | None = None,
    *,
    size: int | str | None = None,
    loss: Callable[[nn.Module], Any] | None = None,
    **options,
) -> Plan:
    """What `compress_(model, text)` would do: a row for every tensor, with bits, bytes and the reason.

    With a `size`, "1.0MB" or bytes, the tensors that the text does not select get the bits and dim that cost the
    `loss` least within it; `options` are those of `dkm.allocate.allocate`.
    """
    if size is not None:
        from .allocate import allocate

        return allocate(model, size, loss, text=text, **options)
    if loss is not None or options:
        given = ", ".join([*(["loss"] if loss is not None else []), *options])
        raise TypeError(f"{given} would choose a plan for a size: give size= too, or a text alone")
    return Plan(tuple(apply(model, text)[0]))


def apply(model: nn.Module, text: str) -> tuple[list[Row], set[int]]:
    """A row for every tensor after the entries of the text, and the indices of those that an entry selects."""
    entries = parse(text)
    rows, selected = _survey(model), set()
    for entry in entries:
        found = _select(entry.selector, rows, text)
        selected.update(found)
        for i in found:
            rows[i] = _decide(rows[i], entry)
    return rows, selected


def _decide(row: Row, entry: Entry) -> Row:
    frozen = ", frozen" if row.reason.endswith(", frozen") else ""
    if entry.bits is None:
        return replace(row, bits=None, dim=1, reason=f"{entry.selector}:keep{frozen}")
    if entry.selector in _KINDS and row.parameters < SMALL:
        return replace(row, bits=8, dim=1, reason=f"{entry.selector}, under {SMALL:,}{frozen}")
    return replace(row, bits=entry.bits, dim=entry.dim, reason=f"{entry.selector}{frozen}")


def _select(selector: str, rows: list[Row], text: str) -> list[int]:
    """The indices of the rows that a selector means; an error where it means none."""
    weights = [i for i, row in enumerate(rows) if row.kind in ("cv", "lin", "rnn", "emb")]
    if selector in WORDS:
        kinds = {"cv": ("cv",), "emb": ("emb",), "lin": ("lin", "rnn"), "xform": ("lin",), "fc": ("lin",)}
        found = [i for i in weights if rows[i].kind in kinds.get(selector, (rows[i].kind,))]
        found = {"fc": found[-1:], "last": found[-1:], "first": found[:1]}.get(selector, found)
        if not found:
            raise PlanError(f"'{selector}' in plan '{text}' selects {WORDS[selector]}, and this model has none")
        return found
    named = [i for i, row in enumerate(rows) if any(_matches(selector, name) for name in (row.name, *row.aliases))]
    found = [i for i in named if rows[i].kind]
    if named and not found:
        raise PlanError(f"'{selector}' in plan '{text}' matches only tensors that stay: {rows[named[0]].name} ...")
    if not found:
        names = [*WORDS, *(row.name for row in rows), *(row.name.rpartition(".")[0] for row in rows)]
        close = difflib.get_close_matches(selector, names, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise PlanError(
            f"unknown selector '{selector}' in plan '{text}': {hint}"
            f"selectors are {', '.join(WORDS)}, or a name or pattern such as 'layer4.*'"
        )
    return found


def _matches(pattern: str, name: str) -> bool:
    """A pattern means tensors (`conv1.weight`) or the modules that own them (`conv1`, `layer4.*`)."""
    owner = name.rpartition(".")[0]
    return pattern in (name, owner) or fnmatchcase(name, pattern) or fnmatchcase(owner, pattern)


@dataclass
class Owned:
    """A distinct parameter of a model: all its names, and the (module, attribute) pairs that hold it."""

    tensor: nn.Parameter
    names: list[str]
    owners: list[tuple[nn.Module, str]]

    @property
    def clustered(self) -> Clustered | None:
        """Our parametrization of it, where there is one."""
        chains = [m.parametrizations[a] if parametrize.is_parametrized(m, a) else None for m, a in self.owners]
        found = {chain[0] if chain is not None and _is_ours(chain) else None for chain in chains}
        if len(found) > 1:
            raise ValueError(
                f"{' and '.join(self.names)} are one tensor, clustered in one place only: "
                "cluster it with dkm.compress_, which keeps ties"
            )
        return found.pop()


def parameters(model: nn.Module) -> list[Owned]:
    """Every distinct parameter, tied ones once.  Names are those of the plain model, compressed or not."""
    found: dict[int, Owned] = {}
    for prefix, module in unwrapped(model).named_modules(remove_duplicate=False):
        if _is_ours(module):
            continue
        own = [(attribute, tensor) for attribute, tensor in module._parameters.items() if tensor is not None]
        if parametrize.is_parametrized(module):
            own += [(name, chain.original) for name, chain in module.parametrizations.items() if _is_ours(chain)]
        for attribute, tensor in own:
            entry = found.setdefault(id(tensor), Owned(tensor, [], []))
            entry.names.append(f"{prefix}.{attribute}" if prefix else attribute)
            if not any(owner is module and held == attribute for owner, held in entry.owners):
                entry.owners.append((module, attribute))
    return list(found.values())


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what torch.compile, DistributedDataParallel or AveragedModel made of it."""
    while True:
        if "_orig_mod" in model._modules:  # torch.compile's
            model = model._modules["_orig_mod"]
        elif isinstance(model, (nn.parallel.DistributedDataParallel, AveragedModel)):
            model = model.module
        else:
            return model


def _is_ours(module: nn.Module) -> bool:
    """Clustered, or the list of parametrizations it is in."""
    if isinstance(module, parametrize.ParametrizationList):
        return isinstance(module[0], Clustered)
    return isinstance(module, Clustered)


def _survey(model: nn.Module) -> list[Row]:
    """A row a distinct parameter, all of them kept."""
    rows = []
    for owned in parameters(model):
        name, *aliases = owned.names
        tensor = owned.tensor
        if isinstance(tensor, nn.parameter.UninitializedParameter):
            raise PlanError(f"{name} has no shape yet: run one batch through the model first")
        if owned.clustered is not None:
            raise PlanError(f"{name} is clustered already: snap_ the model before planning again")
        kind, reason = _kind(tensor, *owned.owners[0])
        if not tensor.requires_grad and kind:
            reason += ", frozen"
        width = 16 if tensor.is_floating_point() else 8 * tensor.element_size()
        rows.append(Row(name, tuple(tensor.shape), kind, None, 1, reason, tuple(aliases), width))
    return rows


def _kind(tensor: torch.Tensor, module: nn.Module, attribute: str) -> tuple[str, str]:
    """The kind of a parameter and why it is kept unless a plan says otherwise."""
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        return "", f"{tensor.dtype}".removeprefix("torch.")
    if tensor.numel() == 0:
        return "", "empty"
    if isinstance(module, parametrize.ParametrizationList):
        return "", f"parametrized by {type(module[0]).__name__}"
    if tensor.ndim < 2:
        return "", "bias or norm"
    if isinstance(module, nn.modules.conv._ConvNd) and attribute == "weight":
        return "cv", "not selected"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and attribute == "weight":
        return "emb", "not selected"
    if isinstance(module, nn.RNNBase):
        return "rnn", "not selected"
    if isinstance(module, nn.MultiheadAttention) and attribute.endswith("proj_weight"):
        return "lin", "not selected"
    # Linear, transformers' Conv1D and whatever else calls its one matrix "weight"
    if isinstance(module, nn.Linear | nn.Bilinear) and attribute == "weight":
        return "lin", "not selected"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) or "Norm" in type(module).__name__:
        return "", "bias or norm"
    if attribute == "weight" and tensor.ndim == 2:
        return "lin", "not selected"
    return "bare", "bare parameter: name it to cluster it"
