"""Where to compute and on what: the data, the device and the processes of a run."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import models
from ..errors import Problem, as_problems
from ..processes import has_several_processes
from ..run_folder import LeftOut
from ..settings import Settings
from ..tasks import ImageTask, LanguageTask, Task, open_task
from ..tasks.batches import batches
from .bad_images import leave_out_bad_images
from .listener import Listener
from .order import Order, seed_from
from .stopping import Stopped, StopRequests


@dataclass
class Stage:
    """What every part of a run needs."""

    settings: Settings
    task: Task
    accelerator: Any  # of the library Accelerate: the device, and what the processes do together
    batch_size: int  # in each process
    listener: Listener
    bad_images: LeftOut | None = None  # those that are left out; None where all are read
    outputs_checked: bool = False
    stop_requested: StopRequests = field(default_factory=StopRequests)

    def build_model(self) -> models.Built:
        """A new copy of the model, with the weights that it had before it was compressed."""
        return _build_model(self.settings, self.task)

    def make_order(self) -> Order:
        """The order of the training examples.

        Makes the batches smaller where there are too few examples for a full one in every process; Problem where there
        is not even one example for each.
        """
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        count = self.task.train_count
        self.batch_size = min(self.batch_size, count // processes)
        if not self.batch_size:
            raise Problem(f"{count} {self.task.unit} are too few for {processes} processes")
        if isinstance(self.task, LanguageTask) and self.task.own is not None:
            count -= count % (self.batch_size * processes)  # the model need not write what no step sees
            self.task.own.count = count
        return Order(count, self.batch_size, processes, rank, self.settings.seed)

    def move(self, batch: Any) -> Any:
        """The batch, on the device."""
        from accelerate.utils import send_to_device

        return send_to_device(batch, self.accelerator.device, non_blocking=True)

    def sample(self, count: int) -> Iterator[Any]:
        """Full batches of about `count` training examples, augmented as in training: the same ones every time."""
        total, seed = self.task.train_count, self.settings.seed
        generator = torch.Generator().manual_seed(seed_from(seed, "sample"))
        chosen = torch.randperm(total, generator=generator)[:count].tolist()
        size = min(self.batch_size, total, count)
        examples = [(seed_from(seed, "sample", i), i) for i in chosen]
        keys = [examples[at : at + size] for at in range(0, len(examples) - size + 1, size)]
        for batch in batches(self.task, self.task.train, keys, self.settings):
            stop = self.check_for_stop()
            yield self.move(batch)
            if stop:
                return

    def check_for_stop(self) -> bool:
        """Whether a stop was requested.  A single process stops right here: this raises Stopped.  Several processes
        must first get to the place where they meet, so each of them only cuts short what it is doing."""
        requested = self.stop_requested()
        if requested and self.accelerator.num_processes == 1:
            raise Stopped
        return requested


def open_stage(
    settings: Settings, listener: Listener, *, trains: bool = True, bad_images: LeftOut | None = None
) -> tuple[Stage, nn.Module]:
    """Open the data, and the model with its weights, on the device.

    Without `trains`, the examples to train on are not read.  `bad_images` are those that a resumed run leaves out.
    """
    try:
        from accelerate import Accelerator
    except ImportError:
        raise Problem('the command needs accelerate: pip install "torch-dkm[cli]"') from None
    if settings.model is None:
        raise Problem("which model? give --model NAME, a transformers folder, or FILE.py:FUNCTION")
    cpu = runs_on_cpu(settings)
    task = open_task(settings)
    torch.manual_seed(seed_from(settings.seed, "model"))  # for weights that start from random
    model, notes = _build_model(settings, task)
    task.suit(model)
    for note in (*notes, *task.notes):
        listener.note(note)
    if ":" in settings.device:
        torch.cuda.set_device(settings.device)  # which Accelerate then takes
    with as_problems():
        accelerator = Accelerator(cpu=cpu, mixed_precision=settings.autocast)
    if str(accelerator.distributed_type).rpartition(".")[2] not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise Problem("dkm compress runs on one process or with DDP: take FSDP, DeepSpeed, ... out of the launcher")
    stage = Stage(settings, task, accelerator, settings.batch_size or task.default_batch_size, listener)
    if settings.skip_bad_images and isinstance(task, ImageTask):
        stage.bad_images = leave_out_bad_images(task, accelerator, listener, bad_images, trains=trains)
    return stage, model.to(accelerator.device)


def _build_model(settings: Settings, task: Task) -> models.Built:
    assert settings.model is not None  # see `open_stage`
    return models.build(settings.model, settings.weights, settings.classes or task.classes, settings.weights_key)


def runs_on_cpu(settings: Settings) -> bool:
    """Whether to compute on the CPU; Problem where there is no such GPU, or where there are more processes than GPUs.

    Several processes without a GPU must tell Accelerate so: otherwise it would take each of them for a run of its own.
    """
    from accelerate.utils import parse_flag_from_env

    devices = torch.cuda.device_count()
    _check_gpu(settings.device, devices)
    asked_for = settings.device == "cpu" or parse_flag_from_env("ACCELERATE_USE_CPU")
    if asked_for or (has_several_processes() and not devices):
        return True
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["LOCAL_RANK"]) >= devices:
        raise Problem(
            f"{os.environ['LOCAL_WORLD_SIZE']} processes need as many GPUs, and there are {devices} here: launch "
            "fewer, or give --device cpu"
        )
    return False


def _check_gpu(name: str, devices: int) -> None:
    """Raise Problem where `name` is that of a GPU which is not there."""
    if not name.startswith("cuda"):
        return
    if not devices:
        built = "" if torch.version.cuda else ", which was built without CUDA,"
        raise Problem(f"--device {name}: PyTorch{built} finds no GPU here; give --device cpu, or leave it out")
    _, colon, index = name.partition(":")
    if colon and has_several_processes():
        raise Problem(f"--device {name}: each process takes a GPU of its own; give --device cuda, or leave it out")
    if colon and int(index) >= devices:
        there = "cuda:0 only" if devices == 1 else f"cuda:0 to cuda:{devices - 1}"
        raise Problem(f"--device {name}: there is no such GPU here, but {there}")
