"""The function `dkm.export`: what is the same for every target."""

import copy
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..compress import snap_
from ..formats.describe import describe
from ..formats.dkm_file import load, read_tensors
from ..foundation.errors import ExportError
from ..foundation.staging import bytes_of, staged
from ..modelling.dtensors import is_sharded
from ..modelling.parameters import clusterings, parameters, unwrapped
from .target import Job, Report, Row, Target, named

Example = Tensor | Iterable[Tensor] | Mapping[str, Tensor]


def export(
    source: nn.Module | str | os.PathLike[str],
    path: str | os.PathLike[str],
    to: str = "safetensors",
    *,
    model: nn.Module | None = None,
    example: Example | None = None,
    tolerance: float = 1e-4,
    **options: Any,
) -> Report:
    """Write a compressed model in another format, and check that it computes what the model computes.

    Args:
        source: A compressed model, or the path of a .dkm file.
        path: Where to write.  A file is replaced; a folder must not exist yet, or be empty.
        to: The target, by its name: the page on export lists them.
        model: The plain architecture, for a .dkm file.  It is copied and stays as it is.
        example: An input of the model: a tensor, a tuple of tensors by position, or a dict of tensors by name.
        tolerance: How far the largest output may be from the model's.  Beyond it, nothing is written.
        options: Those of the target; see the page on export.

    Returns a report: `.rows` say how each tensor was written, `.dense` which of the clustered ones could not be written
    as codes and why, `.checked` how far the result is from the model.  What is written has the values of the .dkm
    file, so parameters that are not clustered are rounded to 16 bits, as `dkm.save` rounds them.  ExportError where the
    result differs, or where the target cannot hold the model; then nothing is written.
    """
    target = named(to, options)
    place = _checked_place(path)
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool) or not tolerance >= 0:
        raise ValueError(f"tolerance must be a number of at least 0, got {tolerance!r}")
    job = _job(target, source, model, example)
    try:
        with staged(place) as draft:
            rows = target.write(job, draft)
            _check_that_all_are_named(job, rows)
            checked = target.check(job, draft)
            if not checked.difference <= tolerance:
                raise ExportError(
                    f"what was written for {place} differs from the model by up to {checked.difference:.3g} "
                    f"({checked.how}), and {tolerance:g} is allowed: nothing was written; a larger tolerance= allows it"
                )
            size = bytes_of(draft)
    except OSError as error:
        raise ExportError(
            f"cannot write {place}: {error.strerror or error}; choose a place in a folder that exists and is writable"
        ) from error
    return Report(place, to, size, tuple(rows), checked, tolerance)


def _checked_place(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"dkm.export(source, path): the path must be a string or a Path, got {type(path).__name__}")
    place = Path(path)
    if place.is_dir() and any(place.iterdir()):
        raise ExportError(f"{place} is a folder that is not empty: choose another path, or remove it first")
    return place


def _job(
    target: Target, source: nn.Module | str | os.PathLike[str], model: nn.Module | None, example: Example | None
) -> Job:
    args, kwargs = _inputs(target, example)
    if isinstance(source, nn.Module):
        if model is not None:
            raise TypeError("model= is the architecture for a .dkm file, and the source is a model: leave model= out")
        inner = unwrapped(source)
        if any(is_sharded(owned.tensor) for owned in parameters(inner)):
            raise ExportError("fully_shard has split this model: dkm.save it, and export the file")
        for clustered in clusterings(inner):
            clustered.check_given()
        tensors = tuple(describe(inner))
        plain = snap_(copy.deepcopy(inner)) if target.needs_model else None
    elif isinstance(source, str | os.PathLike):
        if model is None and target.needs_model:
            raise TypeError(f'to="{target.name}" needs the architecture: give model=, a plain model that fits {source}')
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model= must be a torch.nn.Module, got {type(model).__name__}")
        plain = None if model is None else _filled(source, model)
        tensors = tuple(read_tensors(source))
    else:
        raise TypeError(f"the source must be a model or the path of a .dkm file, got {type(source).__name__}")
    return Job(tensors, None if plain is None else _ready(plain), args, kwargs)


def _filled(source: str | os.PathLike[str], model: nn.Module) -> nn.Module:
    plain = load(source, into=copy.deepcopy(unwrapped(model)))
    assert isinstance(plain, nn.Module)
    return plain


def _ready(model: nn.Module) -> nn.Module:
    """As a job needs it.  Models of transformers would also return what they keep for the next token."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False
    return model.cpu().eval()


def _inputs(target: Target, example: Example | None) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The example by position and by name, on the CPU."""
    if example is None:
        if target.needs_example:
            raise TypeError(f'to="{target.name}" is checked on an example: give example=, an input of the model')
        return (), {}
    if not target.needs_example:
        raise TypeError(f'to="{target.name}" takes no example: its values are compared themselves; leave example= out')
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example, Tensor):
        args = (example,)
    elif isinstance(example, Mapping):
        kwargs = dict(example)
    elif isinstance(example, tuple | list):
        args = tuple(example)
    other = [each for each in (*args, *kwargs.values()) if not isinstance(each, Tensor)]
    if other or not (args or kwargs):
        raise TypeError(
            "example must be a tensor, a tuple of tensors, or a dict of tensors by name, "
            f"got {type(example).__name__}{f' with {type(other[0]).__name__}' if other else ''}"
        )
    with torch.no_grad():
        return tuple(each.detach().cpu() for each in args), {key: each.detach().cpu() for key, each in kwargs.items()}


def _check_that_all_are_named(job: Job, rows: list[Row]) -> None:
    """Against a target that loses a tensor: nothing is written or left out without a row that says so."""
    given, found = sorted(each.name for each in job.tensors), sorted(row.name for row in rows)
    if given != found:
        lost = sorted(set(given) ^ set(found)) or found
        raise AssertionError(f"the exporter does not account for {', '.join(lost[:3])}: this is a fault of dkm")
    clustered = {each.name for each in job.tensors if not isinstance(each.content, Tensor)}
    silent = [row.name for row in rows if row.name in clustered and "codes" not in row.written and not row.why]
    if silent:
        raise AssertionError(f"the exporter does not say why {silent[0]} is dense: this is a fault of dkm")
