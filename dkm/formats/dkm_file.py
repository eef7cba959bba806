"""The .dkm file: a safetensors container, and nothing that has to be executed to be read.

    codes/NAME       uint8 (bytes,)          a clustered tensor's indices, packed (see codec.py) or entropy-coded
    centroids/NAME   (k, dim)                its centroids, 16 or 8 bit; (groups, k, dim) where there are groups
    scales/NAME      16 bit (shape[0],)      the scales of its rows, where it has any
    positions/NAME   (m,), outliers/NAME (m,)  weights with values of their own, where it has any
    dense/NAME       any                     a parameter or buffer that is not clustered

`container.py` says what else the container holds, and `rules.py` what every reader refuses.  `clustering/decode.py`
makes a clustered tensor's values of these.  NAMEs are the keys of the plain model's state_dict; every one of them is
either in the container's `tensors` or in its `ties`.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..clustering.decode import Outliers
from ..foundation.atomic import write_atomically
from ..foundation.errors import FileError
from ..foundation.text import shown
from ..modelling.dtensors import on_first, reshard
from ..modelling.packed_tensor import packed_tensors
from ..modelling.parameters import Owned, clusterings, parameters, unwrapped
from ..plans.rows import Column, Plan, Row
from ..plans.selection import kept_width
from . import entropy
from .container import from_bytes, stored_arrays, to_bytes
from .describe import describe
from .described import Codes, Described
from .entropy import CodeBytes, code_bytes, totals
from .parts import entry_of
from .rules import Contents, read
from .usage import usage


def save(
    model: nn.Module, path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float16, coding: str = "packed"
) -> int:
    """Write a compressed model; returns the number of bytes written.

    Centroids take 16 bit, or 8 where the plan says so.  Parameters that are not clustered take `dtype`; buffers keep
    theirs.  With `coding="entropy"`, codes take about as many bits as their entropy, where that is less; this needs
    constriction, and so does reading the file.  The file appears whole or not at all.

    For a model that `fully_shard` has split, all ranks call this, and the first one writes.  One tensor at a time
    is gathered.
    """
    target = _as_path(path, "dkm.save(model, path)")
    if not target.name:
        raise FileError(f"cannot write {target}: it names a folder; add a file name")
    entropy.check_coding(coding)
    for clustered in clusterings(model):
        clustered.check_given()
    mesh = reshard(model)
    data = encode(model, dtype, coding)
    return on_first(mesh, lambda: [_write(target, data)], 1)[0]


def load(path: str | os.PathLike[str], into: nn.Module | None = None) -> nn.Module | dict[str, Tensor]:
    """Read a .dkm file: the dense state dict or, with `into`, that model with the weights in it.

    The model must have exactly the file's tensors, in its shapes, and no dkm on it; it stays untouched otherwise.
    Nothing is decoded before that is known.  FileError says what is wrong with a file or does not fit.
    """
    if into is None:
        source = _as_path(path, "dkm.load(path, model)")
        return _state(read(read_bytes(source), str(source)), str(source))
    contents, model = read_for(path, into), unwrapped(into)
    own = model.state_dict()
    # in the model's dtype, so that a file cannot ask for more memory than the model has; on meta, the file decides
    dtypes = {} if _is_on_meta(own) else {name: tensor.dtype for name, tensor in own.items()}
    state, walk = _state(contents, contents.file, dtypes), parameters(model)
    _check_ties(state, walk, contents.file)
    fill(model, state, walk)
    return into


def read_for(path: str | os.PathLike[str], model: nn.Module) -> Contents:
    """What a file holds, of which nothing is decoded yet; FileError unless it fits this model."""
    source = _as_path(path, "dkm.load(path, model)")
    contents = read(read_bytes(source), str(source))
    _check_fits(contents, unwrapped(model))
    _check_buffers(contents, unwrapped(model))
    return contents


def fill(model: nn.Module, state: dict[str, Tensor], walk: list[Owned]) -> None:
    """Put checked values into the model, whose parameters `walk` lists; what has no value here is left alone."""
    on_meta = _is_on_meta(model.state_dict())
    model.load_state_dict(state, strict=not packed_tensors(model), assign=on_meta)
    for owned in walk if on_meta else ():  # assign makes a parameter for every name
        (module, attribute), *others = owned.owners
        for other, alias in others if owned.name in state else ():
            setattr(other, alias, getattr(module, attribute))


def _is_on_meta(state: Mapping[str, Tensor]) -> bool:
    return any(tensor.is_meta for tensor in state.values())


@dataclass(frozen=True)
class Size(Plan):
    """A compressed model's size: the plan's rows and figures, the file's own bytes, and what its codes take."""

    file_bytes: int = 0
    codes: Mapping[str, CodeBytes] = field(
        default_factory=dict, hash=False
    )  # of each clustered tensor, by its name in `rows`

    def summary(self) -> str:
        """The size in four lines."""
        paper, file = super().summary().rsplit("\n", 1)
        return f"{paper}\ncodes: {totals(self.codes.values())}\n{file}"

    @property
    def columns(self) -> tuple[Column, ...]:
        """Those of a plan and, before the reason, what the codes take."""
        *others, why = super().columns

        def column(title: str) -> Column:
            def cell(row: Row) -> str:
                return f"{getattr(self.codes[row.name], title):,}" if row.name in self.codes else ""

            return Column(title, ">", cell, spare=title != "coded")

        return (*others, *map(column, CodeBytes._fields), why)


def size(model: nn.Module, *, dtype: torch.dtype = torch.float16, coding: str = "packed") -> Size:
    """What a compressed model takes: `.bytes` as the paper counts, `.file_bytes` as `save` would write.

    `.codes[name]` says what the codes of a tensor take, in bytes: `packed`, entropy-`coded`, and `bound`, their
    entropy.  Without `coding="entropy"`, `coded` is computed from counts; it may be off by a few bytes.

    For a model that `fully_shard` has split, all ranks call this.
    """
    entropy.check_coding(coding)
    mesh = reshard(model)
    walk = parameters(model)
    rows = [
        Row(
            name=names[0],
            shape=tensor.shape,
            kind="",
            spec=tensor.content().spec,
            aliases=tuple(names[1:]),
            **_of_clustered(tensor.content().outliers, math.prod(tensor.shape)),
        )
        for names, tensor in packed_tensors(model)
    ]
    for owned in walk:
        tensor, clustered = owned.tensor, owned.clustered
        facts: dict[str, Any] = {"reason": "kept"}
        if clustered is not None:
            facts = _of_clustered(clustered.outliers(tensor), tensor.numel())
        rows.append(
            Row(
                name=owned.name,
                shape=tuple(tensor.shape),
                kind="",
                spec=None if clustered is None else clustered.spec,
                aliases=owned.aliases,
                width=kept_width(tensor),
                **facts,
            )
        )
    codes: dict[str, CodeBytes] = {}

    def counted(tensors: Iterable[Described]) -> Iterator[Described]:
        for each in tensors:
            if isinstance(each.content, Codes):
                codes[each.name] = code_bytes(each, usage(each))
            yield each

    data = encode_all(counted(describe(model, dtype, walk)), coding)
    if coding == "entropy" and data:
        arrays = stored_arrays(from_bytes(data, "the file"))
        codes = {name: own._replace(coded=len(arrays[f"codes/{name}"].data)) for name, own in codes.items()}
    names = [row.name for row in rows if row.spec is not None]
    numbers = on_first(
        mesh, lambda: [len(data), *(number for name in names for number in codes[name])], 1 + 3 * len(names)
    )
    own = {name: CodeBytes(*numbers[1 + 3 * i : 4 + 3 * i]) for i, name in enumerate(names)}
    return Size(tuple(rows), file_bytes=numbers[0], codes=own)


def _of_clustered(outliers: Outliers | None, numel: int) -> dict[str, Any]:
    """What the row of a clustered tensor says about its outliers."""
    if outliers is None:
        return {"reason": "clustered"}
    return {"reason": f"clustered, {outliers}", "beside": 8 * outliers.nbytes(numel)}


def encode(model: nn.Module, dtype: torch.dtype = torch.float16, coding: str = "packed") -> bytes:
    """The bytes of the file; see `describe`.  For a sharded model, all ranks call this and the first one gets them."""
    return encode_all(describe(model, dtype), coding)


def encode_all(tensors: Iterable[Described], coding: str = "packed") -> bytes:
    """The bytes of a file with these tensors; none where there are no tensors."""
    entries: dict[str, dict[str, Any]] = {}
    ties: dict[str, str] = {}
    arrays: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> None:
        # a copy of each: safetensors refuses tensors that share memory, and ours may be views
        arrays[name] = tensor.detach().cpu().contiguous().clone()

    for each in tensors:
        entry = entries[each.name] = entry_of(each)
        ties |= dict.fromkeys(each.aliases, each.name)
        if isinstance(each.content, Codes):
            own = each.content
            coded = entropy.encode(each) if coding == "entropy" else None
            entry |= {"coding": "ans"} if coded is not None else {}
            keep(f"codes/{each.name}", own.packed if coded is None else coded.data)
            keep(f"centroids/{each.name}", own.centroids if coded is None else coded.centroids)
            if own.scales is not None:
                keep(f"scales/{each.name}", own.scales)
            if own.outliers is not None:
                keep(f"positions/{each.name}", own.outliers.stored_positions(each.numel))
                keep(f"outliers/{each.name}", own.outliers.values)
        else:
            keep(f"dense/{each.name}", each.content)
    return to_bytes(entries, ties, arrays) if entries else b""


def decode(data: bytes, name: str = "the data") -> dict[str, Tensor]:
    """The dense state dict in the bytes of a file; FileError for all bytes that are not a .dkm file."""
    return _state(read(data, name), name)


def read_tensors(path: str | os.PathLike[str]) -> Iterator[Described]:
    """The tensors of a .dkm file as `describe` gives those of a model.  The whole file is checked first."""
    source = _as_path(path, "read_tensors(path)")
    return read(read_bytes(source), str(source)).tensors()


def read_bytes(path: Path) -> bytes:
    """The bytes of a file; FileError where it cannot be read."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # a ValueError where no file can have this name
        raise FileError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except MemoryError:
        raise FileError(f"cannot read {path}: it does not fit into the memory") from None


def _state(contents: Contents, name: str, dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, Tensor]:
    """The values of all tensors, decoded one after another.  `dtypes` are those to cast to, where they differ."""
    dtypes, state = dtypes or {}, {}
    try:
        for each in contents.tensors():
            state[each.name] = each.values().to(dtypes.get(each.name, each.dtype))
    except (MemoryError, RuntimeError) as error:  # PyTorch raises a RuntimeError where memory runs out
        raise FileError(f"the tensors of {name} do not fit into the memory ({error})") from error
    return state | {alias: state[key] for alias, key in contents.ties.items()}


def _as_path(path: str | os.PathLike[str], call: str) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{call}: the path must be a string or a pathlib.Path, got {type(path).__name__}")
    try:
        if b"\0" in os.fsencode(path):
            raise FileError(f"{call}: {str(path)!r} has a NUL character in it, which no file's name can have")
    except UnicodeEncodeError as error:
        raise FileError(f"{call}: {str(path)!r} cannot be the name of a file: {error}") from None
    return Path(path)


def _write(path: Path, data: bytes) -> int:
    try:
        return write_atomically(path, data)
    except OSError as error:
        raise FileError(
            f"cannot write {path}: {error.strerror or error}; choose a file in a folder that exists and is writable"
        ) from error


def _check_fits(contents: Contents, model: nn.Module) -> None:
    """FileError unless the model has the file's tensors, in their shapes.  Needs no values."""
    if clusterings(model):
        raise FileError(f"{contents.file} holds dense weights and the model is compressed: load into a plain model")
    if packed_tensors(model):
        raise FileError(f"{contents.file} cannot replace the codes of a packed model: load into a plain model")
    own: dict[str, Any] = model.state_dict()
    entries = contents.entries | {alias: contents.entries[name] for alias, name in contents.ties.items()}
    problems = [f"the model has no {shown(name)}" for name in entries if name not in own]
    problems += [f"the file has no {name}" for name in own if name not in entries]
    for name, entry in entries.items():
        if name not in own:
            continue
        tensor = own[name]
        if not isinstance(tensor, Tensor) or is_lazy(tensor):
            problems.append(f"{name} of the model has no values yet, or is not a tensor")
        elif tensor.shape != entry.shape:
            problems.append(f"{name} is {entry.shape} in the file and {tuple(tensor.shape)} in the model")
        elif not torch.can_cast(entry.dtype, tensor.dtype):
            problems.append(f"{name} is {entry.dtype} in the file and {tensor.dtype} in the model")
    _raise_any(problems, contents.file)


def _check_buffers(contents: Contents, model: nn.Module) -> None:
    """FileError where the model would be left with buffers that have no values."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in contents.entries and name not in contents.ties:
            raise FileError(
                f"{name} is a buffer that no file holds (persistent=False), and it is on the meta device without "
                "values: give the model its buffers first, and leave only its parameters on meta"
            )


def _check_ties(state: Mapping[str, Tensor], walk: list[Owned], file: str) -> None:
    """FileError unless names that share a tensor in the model have equal values in the file."""
    problems = [
        f"the model ties {alias} to {owned.name} and the file has different values for them"
        for owned in walk
        for alias in owned.aliases
        if state[alias] is not state[owned.name] and not torch.equal(state[alias], state[owned.name])
    ]
    _raise_any(problems, file)


def _raise_any(problems: list[str], file: str) -> None:
    if problems:
        more = f", and {len(problems) - 3} more differences" if len(problems) > 3 else ""
        raise FileError(f"{file} does not fit this model: {'; '.join(problems[:3])}{more}")
