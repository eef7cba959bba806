"""Weights from files as other programs write them: nested, under prefixes, with averages beside them.  No file can make
this execute code."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..formats.dkm_file import load
from .errors import Problem

State = dict[str, Tensor]

USUAL = ("state_dict", "model_state_dict", "model")  # where a state dict mostly lies, the first of them that there is
HOLDER = "model."  # where a LightningModule mostly holds the model
SECOND_OUTPUTS = ("aux1.", "aux2.", "AuxLogits.")  # of googlenet and inception_v3, for training from random only
SHOWN = 3  # names in a message
MOST_GLOBALS = 2


class Weights(NamedTuple):
    """A state dict, and what the user should know about where it was."""

    state: State
    notes: list[str]


def load_weights(model: nn.Module, path: str, classes: int | None = None, key: str | None = None) -> list[str]:
    """Read a file of weights into a model.  Where they do not fit, the model stays as it was, and Problem is raised.

    Its message names `classes` where that number is what does not fit.  `key` says which of the file's state dicts to
    take, see `read_weights`.  Returns what the user should know.
    """
    found = read_weights(path, key)
    own = model.state_dict()
    state, notes = _without_wrappers(found, own, path)
    extra = [name for name in state if name not in own and not name.startswith(SECOND_OUTPUTS)]
    shapes = [
        f"{name} is {tuple(state[name].shape)} in the file and {tuple(tensor.shape)} in the model"
        + (f" of {classes} classes (--classes)" if tensor.ndim and len(tensor) == classes else "")
        for name, tensor in own.items()
        if name in state and state[name].shape != tensor.shape
    ]
    # num_batches_tracked is a counter that old files lack, and that nothing here needs.
    # A tied weight has several names, of which a file may have one.
    places = {own[name].data_ptr() for name in state if name in own}
    absent = [name for name in own if name not in state and own[name].data_ptr() not in places]
    absent = [name for name in absent if not name.endswith("num_batches_tracked")]
    problems = shapes[:1]
    if len(shapes) > 1:
        problems = [f"{shapes[0]}, and {len(shapes) - 1} more"]
    problems += [f"the file has no {_some(absent)}"] if absent else []
    problems += [f"the model has no {_some(extra)}, which the file has"] if extra else []
    if problems:
        raise Problem(f"the weights in {path} do not fit the model: {'; '.join(problems)}")
    model.load_state_dict({name: value for name, value in state.items() if name in own}, strict=False)
    return notes


def read_weights(path: str, key: str | None = None) -> Weights:
    """The state dict in a .safetensors file, a .dkm file, or one that torch.save wrote.

    A file of torch.save may hold the state dict among other things, at any depth.  `key` names it, as `state_dict_ema`
    or `ema.module`; or it is what the names of the wanted tensors begin with.  Without a key it is the one under a
    usual name, or the only one that is no average over the training.
    """
    stored = _stored(path)
    if key is not None:
        inner = _under(stored, key)
        if inner is None:
            raise Problem(f"{path} has no weights under '{key}': {_what_it_has(stored)}")
        return Weights(_chosen(inner, path, may_be_average=True)[1], [])
    at, state = _chosen(stored, path, may_be_average=False)
    averages = [place for place, _ in _state_dicts(stored) if place != at and _is_average(place)]
    averages += sorted({name.partition(".")[0] for name in state if _is_average(name.partition(".")[0])})
    note = f"{path} has averaged (EMA) weights too, which were not taken; to take them: --weights-key {{}}"
    return Weights(state, [note.format(averages[0])] if averages else [])


def _stored(path: str) -> Any:
    """What a file holds, whatever that is; Problem where it cannot be read without executing code."""
    file = Path(path)
    if not file.is_file():
        raise Problem(f"there is no weights file {path}")
    if file.suffix == ".dkm":
        return load(file)
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        with torch.serialization.safe_globals([argparse.Namespace]):  # plain data, which many scripts save beside
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except SafetensorError:
        raise Problem(f"{path} is not a safetensors file, or is cut off: get it anew") from None
    except Exception as error:  # torch.load raises many kinds: RuntimeError, EOFError, UnpicklingError, ...
        if "GLOBAL" in str(error):  # the file names something to call
            raise Problem(
                f"{path} holds more than tensors and cannot be read safely{_globals(file)}: save the state_dict alone, "
                "torch.save(model.state_dict(), FILE)"
            ) from None
        raise Problem(f"{path} is not a weights file that torch.save wrote, or is cut off") from None


def _globals(file: Path) -> str:
    """Which classes a file would have to be trusted with; they are read from it, and not imported."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # of files in torch's older format
        return ""
    shown = ", ".join(sorted(names)[:MOST_GLOBALS])
    return f" (it holds objects of {shown}{', ...' if len(names) > MOST_GLOBALS else ''})" if names else ""


# --- which of the state dicts --------------------------------------------------------------------


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items())
    )


def _state_dicts(stored: Any, place: str = "") -> Iterator[tuple[str, State]]:
    """All state dicts in what a file holds, with the keys that lead to each."""
    if _is_state_dict(stored):
        yield place, stored
    elif isinstance(stored, dict):
        for name, value in stored.items():
            if isinstance(name, str) and not name.startswith("optimizer"):
                yield from _state_dicts(value, f"{place}.{name}" if place else name)


def _is_average(place: str) -> bool:
    return any(word in ("ema", "swa", "averaged", "shadow") for word in place.lower().replace(".", "_").split("_"))


def _chosen(stored: Any, path: str, *, may_be_average: bool) -> tuple[str, State]:
    """The state dict to take, and where it is."""
    place, inner = "", stored
    while not _is_state_dict(inner) and isinstance(inner, dict):
        name = next((name for name in USUAL if isinstance(inner.get(name), dict)), None)
        if name is None:
            break
        place, inner = f"{place}.{name}" if place else name, inner[name]
    found = [each for each in _state_dicts(inner, place) if may_be_average or not _is_average(each[0])]
    if len(found) == 1:
        return found[0]
    if not list(_state_dicts(stored)):
        raise Problem(f"{path} does not hold a state_dict, names and tensors: {_what_it_has(stored)}")
    raise Problem(f"which weights of {path}? {_what_it_has(stored)}: name one, --weights-key KEY")


def _under(stored: Any, key: str) -> Any:
    """What lies under a key, which may lead through several dicts; or the tensors whose names begin with it."""
    if not isinstance(stored, dict):
        return None
    if key in stored and isinstance(stored[key], dict):
        return stored[key]
    for name, value in stored.items():
        if isinstance(name, str) and isinstance(value, dict) and key.startswith(f"{name}."):
            return _under(value, key.removeprefix(f"{name}."))
    begin = f"{key}."
    state: Any
    for state in (stored, *(stored.get(name) for name in USUAL)):
        names = [name for name in state if name.startswith(begin)] if _is_state_dict(state) else []
        if names:
            return {name.removeprefix(begin): state[name] for name in names}
    return None


def _what_it_has(stored: Any) -> str:
    if not isinstance(stored, dict):
        return f"it holds a {type(stored).__name__}"
    found = [(place, state) for place, state in _state_dicts(stored) if place]
    if found:
        shown = ", ".join(f"{place} ({len(state):,} tensors)" for place, state in found[: 2 * SHOWN])
        return f"it has weights under {shown}{', ...' if len(found) > 2 * SHOWN else ''}"
    return f"it has {_some([str(name) for name in stored])}" if stored else "it is empty"


def _some(names: list[str]) -> str:
    shown, more = ", ".join(names[:SHOWN]), len(names) - SHOWN
    return f"{shown} and {more:,} more" if more > 0 else shown


# --- what the names begin with -------------------------------------------------------------------


def _without_wrappers(found: Weights, own: State, path: str) -> Weights:
    """The state dict with the names of the model itself: `module.conv.weight` is `conv.weight` of a model in DDP.

    Of the names as they are, and with ever more wrappers taken off, those are taken of which the model has most.
    Tensors that lie beside a wrapper are another module's, such as a loss's, and are left out.
    """
    candidates: list[tuple[State, list[str]]] = []
    for dropped in ((), ("_orig_mod",), ("_orig_mod", "module")):
        state = {_without_parts(name, dropped): value for name, value in found.state.items()}
        beside: list[str] = []
        candidates.append((state, beside))
        while any(name.startswith(HOLDER) for name in state):
            beside = beside + [name for name in state if not name.startswith(HOLDER)]
            state = {name.removeprefix(HOLDER): state[name] for name in state if name.startswith(HOLDER)}
            candidates.append((state, beside))
    state, beside = max(candidates, key=lambda each: len(own.keys() & each[0].keys()))  # of equal ones the first
    others = [name for name in beside if not _is_average(name.partition(".")[0])]
    left_out = f"{path} has tensors beside those of the model, which were left out: {_some(others)}"
    return Weights(state, found.notes + ([left_out] if others else []))


def _without_parts(name: str, dropped: tuple[str, ...]) -> str:
    """DDP and torch.compile put a word before the names of what they wrap, which may be a part of the model only."""
    return ".".join(part for part in name.split(".") if part not in dropped)
