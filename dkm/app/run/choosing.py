"""A plan for a size: what is measured for it, on which examples, and where that is kept."""

import hashlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import __version__
from ...foundation import jsonl
from ...planning import plan as make_plan
from ...plans.bench import Progress
from ...plans.rows import Plan
from ...training.distill import divergence
from ..errors import Problem, as_problems, reason_of
from ..run_folder import RunFolder
from ..tasks import LanguageTask
from .listener import Listener
from .sampling import write_texts
from .stage import Stage
from .stopping import Stopped


def choose_plan(stage: Stage, model: nn.Module, listener: Listener, folder: RunFolder | None = None) -> Plan:
    """The plan of the wanted size that costs least, measured on a few batches.

    What is measured is kept in the `folder`, if there is one, and what is in it is not measured again.  A stop request
    ends it at once.
    """
    from accelerate.utils import broadcast_object_list

    settings, task = stage.settings, stage.task
    assert settings.target_size is not None
    listener.choosing_begins(settings.target_size, settings.allocator)

    def forward(model: nn.Module, batch: Any) -> Tensor:
        args, kwargs, labels = task.split(batch)
        with stage.accelerator.autocast():
            return task.compared(model(*args, **kwargs), labels).logits.float()

    def tell(progress: Progress) -> None:
        listener.choosing(progress)
        if stage.stop_requested():  # a library may have caught what stops it at once
            raise Stopped

    with as_problems(), stage.stop_requested.at_once():
        batches = list(stage.sample(task.measured_count))
        measured: dict[str, list[float]] = {}
        if folder is not None:
            inputs = {"state": model.state_dict(), "batches": batches, "autocast": settings.autocast}
            key = _checksum({**inputs, "seed": settings.seed, "device": str(stage.accelerator.device.type)})
            measured = Measurements(folder, key, writes=stage.accelerator.is_main_process)
        plan = make_plan(
            model,
            settings.plan,
            size=settings.target_size,
            loss=divergence(model, batches, forward=forward),
            allocator=settings.allocator,
            episodes=settings.episodes,
            seed=settings.seed,
            progress=tell,
            measured=measured,
        )
    listener.chosen()
    if stage.accelerator.num_processes > 1:  # devices round differently, and all processes need the same plan
        text, size = broadcast_object_list([plan.text, plan.file_bytes])
        plan = Plan(make_plan(model, text).rows, size)
    return plan


def own_texts(stage: Stage, model: nn.Module, count: int, listener: Listener) -> Tensor | None:
    """Let the uncompressed language model write so many texts to learn from, where it is to learn from its own."""
    task = stage.task
    if not isinstance(task, LanguageTask) or task.own is None:
        return None
    return write_texts(stage, model, task.own, count, listener)


class Measurements(dict[str, list[float]]):
    """What was measured, of a model and data whose checksum is `key`: read from the file of a run, and added to it."""

    def __init__(self, folder: RunFolder, key: str, *, writes: bool):
        self.folder, self.key, self.writes = folder, key, writes
        super().__init__(_read(folder.measurements, key))

    def __setitem__(self, what: str, values: list[float]) -> None:
        super().__setitem__(what, values)
        if not self.writes or not all(map(math.isfinite, values)):  # JSON has no infinite numbers
            return
        try:
            jsonl.append(self.folder.measurements, {"of": self.key, "what": what, "values": values})
        except OSError as error:
            raise self.folder.cannot_write(self.folder.measurements, reason_of(error)) from None


def _read(path: Path, key: str) -> Iterator[tuple[str, list[float]]]:
    try:
        records = jsonl.read(path)
    except (OSError, ValueError) as error:
        raise Problem(f"cannot read the measurements in {path}: {reason_of(error)}; take the file away") from None
    for record in records:
        what, values = record.get("what"), record.get("values")
        if record.get("of") != key or not isinstance(what, str) or not isinstance(values, list):
            continue
        if all(isinstance(value, float | int) for value in values):
            yield what, values


def _checksum(content: Any) -> str:
    """A checksum of tensors, numbers and texts, in dicts and lists, and of the versions that compute with them."""
    digest = hashlib.sha256(f"{__version__} {torch.__version__}".encode())
    for part in _parts(content):
        digest.update(part)
    return digest.hexdigest()[:32]


def _parts(content: Any) -> Iterable[bytes]:
    if isinstance(content, Tensor):
        yield repr((content.dtype, tuple(content.shape))).encode()
        yield content.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif hasattr(content, "items"):
        for name, each in content.items():
            yield repr(name).encode()
            yield from _parts(each)
    elif isinstance(content, list | tuple):
        yield repr(len(content)).encode()
        for each in content:
            yield from _parts(each)
    else:
        yield repr(content).encode()
