"""From a model's parameters and the entries of a plan to a row for every tensor.  Reads a model, never touches it."""

import difflib
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..clustering.spec import Spec
from ..foundation.errors import PlanError
from ..modelling.parameters import Owned
from .language import Entry, parse
from .rows import Row

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
# These words mean a kind of layer, and leave its small tensors at 8/1.  "first", "last" and names mean one tensor.
WORDS_FOR_A_KIND = ("cv", "fc", "lin", "xform", "emb", "all")
# The kinds of tensors that words select; a bare parameter must be named.
KINDS = ("cv", "lin", "rnn", "emb")
KINDS_OF_WORD = {"cv": ("cv",), "emb": ("emb",), "lin": ("lin", "rnn"), "xform": ("lin",), "fc": ("lin",)}


def apply(walk: list[Owned], text: str | None) -> tuple[list[Row], set[int]]:
    """A row for every tensor after the entries of the text, and the indices of those that an entry selects."""
    entries = parse(text)
    rows, selected = survey(walk), set[int]()
    for entry in entries:
        found = _select(entry.selector, rows, str(text))
        selected.update(found)
        for i in found:
            rows[i] = _decide(rows[i], entry)
    return rows, selected


def _decide(row: Row, entry: Entry) -> Row:
    if entry.spec is None:
        return replace(row, spec=None, reason=f"{entry.selector}:keep")
    if entry.selector in WORDS_FOR_A_KIND and row.parameters < SMALL:
        return replace(row, spec=Spec(8), reason=f"{entry.selector}, under {SMALL:,}")
    found = replace(row, spec=entry.spec, reason=entry.selector)
    if entry.spec.is_absurd(row.shape):
        advice = "a smaller dim" if entry.spec.group is None else "larger groups, fewer bits or a smaller dim"
        raise PlanError(
            f"'{entry.selector}:{entry.spec.label}' selects {row.name}, which has only {row.parameters:,} weights for "
            f"{found.centroids} centroids of {entry.spec.dim:,} values: choose {advice}"
        )
    return found


def _select(selector: str, rows: list[Row], text: str) -> list[int]:
    """The indices of the rows that a selector means; an error where it means none."""
    weights = [i for i, row in enumerate(rows) if row.kind in KINDS]
    if selector in WORDS:
        found = [i for i in weights if rows[i].kind in KINDS_OF_WORD.get(selector, KINDS)]
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


def survey(walk: list[Owned]) -> list[Row]:
    """A row for every distinct parameter, all of them kept."""
    rows = []
    for owned in walk:
        name, tensor = owned.name, owned.tensor
        if isinstance(tensor, nn.parameter.UninitializedParameter):
            raise PlanError(f"{name} has no shape yet: run one batch through the model first")
        if owned.clustered is not None:
            raise PlanError(f"{name} is clustered already: snap_ the model before planning again")
        kind, reason = _kind(tensor, *owned.owners[0])
        frozen = bool(kind) and not tensor.requires_grad
        rows.append(
            Row(
                name=name,
                shape=tuple(tensor.shape),
                kind=kind,
                spec=None,
                reason=reason,
                aliases=owned.aliases,
                width=kept_width(tensor),
                frozen=frozen,
            )
        )
    return rows


def kept_width(tensor: torch.Tensor) -> int:
    """The bits per value that the paper counts for a tensor that is not clustered."""
    return 16 if tensor.is_floating_point() else 8 * tensor.element_size()


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
