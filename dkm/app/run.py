"""A whole run: a trained model, data and settings -> a folder with the compressed file and how it came about.

    config.toml     the settings, all of them
    plan.json       what becomes of each tensor
    log.jsonl       steps, evaluations, layers, histograms: a line each
    checkpoints/    last.pt, to resume from
    model.dkm       the result
    result.json     its figures
    report.html

Everything random is drawn from a seed that is a function of the settings' seed and the step: a checkpoint needs no
random state, and a run that was killed and resumed ends in the same bytes.
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from .. import __version__
from ..clustering import temperature
from ..clustering.vectors import to_vectors
from ..compress import compress_
from ..formats.dkm_file import load, save
from ..foundation import jsonl
from ..modelling.parameters import parameters
from ..plans.language import parse_size
from ..plans.plan import plan as make_plan
from ..plans.rows import Plan
from ..training.batchnorm import recalibrate_
from ..training.capture import capture
from ..training.distill import distill, divergence, teacher
from ..training.monitor import monitor
from . import models, report
from .data import Data, batches, open_data
from .settings import FIELDS, FREE, Problem, Settings, as_command, as_toml, flag, make, read

Tell = Callable[[str, dict[str, Any]], None]  # what happens, for whoever shows it: ("step", {"loss": 0.1, ...})
Batch = Any
MEASURED = 256  # examples that a plan of some size is measured on
ASK_EVERY = 2  # seconds; several processes ask one another whether to stop, and a launcher kills after 30


class Stopped(Exception):
    """Ctrl-C: the run is in its folder, to be resumed."""


def silent(kind: str, numbers: dict[str, Any]) -> None:
    pass


def draw(*numbers: int | str) -> int:
    """A seed from numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# --- the folder ----------------------------------------------------------------------------------


def write(path: Path, data: str | bytes) -> None:
    """The file appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise Problem(f"cannot write {path}: {error.strerror or error}") from None


def make_folder(run: Path, files: dict[str, str]) -> None:
    """A new run folder, with its first files or not at all."""
    partial = run.with_name(f".{run.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed just here
    try:
        (partial / "checkpoints").mkdir(parents=True)
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
        os.rename(partial, run)  # an empty folder may be there
    except OSError as error:
        raise Problem(f"cannot make the folder {run}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file()


def stored(run: Path) -> Settings:
    """The settings of a run folder."""
    if not is_run(run):
        raise Problem(f"{run} is not the folder of a run: it has no config.toml")
    return make(read(run / "config.toml"))


def result_of(run: Path) -> dict[str, Any] | None:
    """Its figures, if it is finished."""
    path = run / "result.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def prepare(given: dict[str, Any], config: dict[str, Any], resume: bool) -> tuple[Settings, bool]:
    """Settings from flags and a config file, and whether there is a run to go on with."""
    settings = make(config, given)
    if settings.out is None:
        raise Problem("where to? give --out FOLDER")
    run = Path(settings.out)
    if not run.exists() or (run.is_dir() and not any(run.iterdir())):
        return settings, False
    if not is_run(run):
        raise Problem(f"{run} exists and is not a run of dkm: choose another --out")
    if not resume:
        raise Problem(f"{run} exists: go on with it by --resume, or choose another --out")
    before = stored(run)
    said = {key.replace("-", "_") for key in (*config, *given)}
    for name in FIELDS:
        if name in said and name not in FREE and name != "out" and getattr(settings, name) != getattr(before, name):
            raise Problem(
                f"{run} was started with {flag(name)} {_shown(getattr(before, name))} and not "
                f"{_shown(getattr(settings, name))}: leave it out to go on, or choose another --out"
            )
    free = {name: getattr(settings, name) for name in FREE if name in said}
    return replace(before, out=settings.out, **free), True


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


# --- what a model and a batch are ----------------------------------------------------------------


def split(batch: Batch) -> tuple[tuple, dict, Tensor]:
    """A batch -> what the model takes, by position and by name, and the labels."""
    if isinstance(batch, dict):
        if "labels" not in batch:
            raise Problem(f"an example that is a dict must have 'labels', and this has {', '.join(batch)}")
        return (), {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return (batch[0],), {}, batch[1]
    raise Problem(f"an example must be (input, label) or a dict with 'labels', and is a {type(batch).__name__}")


def logits_of(output: Any) -> Tensor:
    return getattr(output, "logits", output)


@contextlib.contextmanager
def problems() -> Iterator[None]:
    """What the library finds wrong with its arguments, the user can put right."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise Problem(" ".join(str(error).split())) from error


@dataclass
class Stage:
    """What everything below needs: where to compute, and on what."""

    settings: Settings
    data: Data
    accelerator: Any
    batch_size: int
    stop: Callable[[], bool] = lambda: False

    def move(self, batch: Batch) -> Batch:
        from accelerate.utils import send_to_device

        return send_to_device(batch, self.accelerator.device, non_blocking=True)

    def sample(self, count: int) -> Iterator[Batch]:
        """Full batches of training examples, augmented as in training: the same ones every time."""
        total, seed = len(self.data.train), self.settings.seed
        order = torch.randperm(total, generator=torch.Generator().manual_seed(draw(seed, "sample")))
        order, size = order[:count].tolist(), min(self.batch_size, total, count)
        examples = [(draw(seed, "sample", i), i) for i in order]
        keys = [examples[at : at + size] for at in range(0, len(examples) - size + 1, size)]
        for batch in batches(self.data.train, keys, self.data, self.settings):
            stop = self.check()
            yield self.move(batch)
            if stop:
                return

    def check(self) -> bool:
        """Whether to stop.  One process stops here; of several each cuts short what it does, up to where they meet."""
        if self.stop() and self.accelerator.num_processes == 1:
            raise Stopped
        return self.stop()

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> tuple[float, float]:
        """In percent, and the mean cross-entropy; in the modes that the model is in, over all processes."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        mine = range(rank, len(self.data.eval), world)
        keys = [[(0, i) for i in mine[at : at + self.batch_size]] for at in range(0, len(mine), self.batch_size)]
        sums = torch.zeros(4, dtype=torch.float64, device=self.accelerator.device)
        with parametrize.cached(), self.accelerator.autocast():  # the weights do not change: cluster them once
            for number, batch in enumerate(batches(self.data.eval, keys, self.data, self.settings)):
                if self.check():
                    sums[3] = 1
                    break
                args, kwargs, y = split(self.move(batch))
                logits = logits_of(model(*args, **kwargs)).float()
                if logits.ndim != 2 or y.ndim != 1:
                    raise Problem(
                        f"a classifier gives (batch, classes) for labels (batch,), and this gives "
                        f"{tuple(logits.shape)} for {tuple(y.shape)}"
                    )
                if not number and int(y.max()) >= logits.shape[1]:
                    raise Problem(f"the data have the label {int(y.max())} and the model has {logits.shape[1]} outputs")
                right = (logits.argmax(1) == y).sum()
                loss = F.cross_entropy(logits, y, reduction="sum")
                sums[:2] += torch.stack([right.double(), loss.double()])
                sums[2] += len(y)
        right, loss, count, asked = self.accelerator.reduce(sums).tolist()
        if asked:
            raise Stopped
        return 100 * right / count, loss / count


def open_stage(settings: Settings, tell: Tell) -> tuple[Stage, nn.Module]:
    """The data, the model with its weights, and the device they are on."""
    try:
        from accelerate import Accelerator
    except ImportError:
        raise Problem('the command needs accelerate: pip install "torch-dkm[cli]"') from None
    if settings.model is None:
        raise Problem("which model? give --model NAME, a transformers folder, or FILE.py:FUNCTION")
    data = open_data(settings)
    torch.manual_seed(draw(settings.seed, "model"))  # for what starts from random
    model, notes = models.build(settings.model, settings.weights, settings.classes or data.classes)
    for note in notes:
        tell("line", {"text": note})
    with problems():
        accelerator = Accelerator(cpu=_on_cpu(settings), mixed_precision=settings.autocast)
    if str(accelerator.distributed_type).rpartition(".")[2] not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise Problem("dkm compress runs on one process or with DDP: take FSDP, DeepSpeed, ... out of the launcher")
    size = settings.batch_size or (32 if data.unit == "texts" else 64)
    return Stage(settings, data, accelerator, size), model.to(accelerator.device)


def several() -> bool:
    """Whether a launcher has started more processes than this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def lost(error: Exception) -> bool:
    """Whether this is what a process gets to see when another one has ended."""
    if not several() or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)  # gloo's is a plain RuntimeError


def _on_cpu(settings: Settings) -> bool:
    """Without a GPU, too: Accelerate, not told, would take several processes for so many runs."""
    from accelerate.utils import parse_flag_from_env

    devices = torch.cuda.device_count()
    if settings.device == "cpu" or parse_flag_from_env("ACCELERATE_USE_CPU") or (several() and not devices):
        return True
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["LOCAL_RANK"]) >= devices:
        raise Problem(
            f"{os.environ['LOCAL_WORLD_SIZE']} processes need as many GPUs, and there are {devices} here: launch "
            "fewer, or give --device cpu"
        )
    return False


# --- training ------------------------------------------------------------------------------------


class Order:
    """The batches of steps `first` to `steps` for one process: lists of (seed, index) pairs."""

    def __init__(self, total: int, size: int, world: int, rank: int, seed: int, first: int, steps: int):
        self.total, self.size, self.world, self.rank, self.seed = total, size, world, rank, seed
        self.first, self.steps = first, steps

    @property
    def per_epoch(self) -> int:
        """Full batches only; what is left over has its turn in another epoch's order."""
        return self.total // (self.size * self.world)

    def __len__(self) -> int:
        return self.steps - self.first

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = -1
        for step in range(self.first, self.steps):
            if step // self.per_epoch != epoch:
                epoch = step // self.per_epoch
                generator = torch.Generator().manual_seed(draw(self.seed, "order", epoch))
                order = torch.randperm(self.total, generator=generator).tolist()
            at = (step % self.per_epoch * self.world + self.rank) * self.size
            yield [(draw(self.seed, "example", epoch, i), i) for i in order[at : at + self.size]]


def learning_rate(settings: Settings, highest: float, step: int, steps: int) -> float:
    warmup = settings.warmup * steps
    if step < warmup:
        return highest * (step + 1) / (warmup + 1)
    left = 1 - (step - warmup) / max(1.0, steps - warmup)
    return highest * {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}[settings.schedule]


def make_optimizer(settings: Settings, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.optimizer == "sgd":
        fused = all(parameter.is_cuda for parameter in trained) or None  # what a CUDA graph needs
        return torch.optim.SGD(trained, lr, momentum=settings.momentum, weight_decay=settings.weight_decay, fused=fused)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.optimizer]
    return kind(trained, lr, weight_decay=settings.weight_decay)


def compress(settings: Settings, tell: Tell = silent, *, resume: bool = False) -> dict[str, Any]:
    """Run to the end, or go on to it; returns what result.json holds.

    `resume`: the folder is there, and says what was done already.  Raises Stopped after SIGINT or SIGTERM, with a
    checkpoint written; Problem for what the user can put right.
    """
    started = time.perf_counter()
    if settings.plan is None and settings.target_size is None:
        raise Problem("how small? give --plan 'cv:4/4, fc:8/4', or --target-size 1.0MB")
    with problems():
        tau = temperature.parse(settings.tau)
    run = Path(settings.out)
    stage, model = open_stage(settings, tell)
    accelerator, data = stage.accelerator, stage.data
    first_process = accelerator.is_main_process
    world = accelerator.num_processes
    stage.batch_size = min(stage.batch_size, len(data.train) // world)
    if not stage.batch_size:
        raise Problem(f"{len(data.train)} {data.unit} are too few for {world} processes")
    order = Order(len(data.train), stage.batch_size, world, accelerator.process_index, settings.seed, 0, 0)
    steps = settings.epochs * order.per_epoch

    text = json.loads((run / "plan.json").read_text(encoding="utf-8"))["text"] if resume else settings.plan
    with problems():
        plan = make_plan(model, text) if resume or settings.target_size is None else None
        if settings.target_size is not None:
            parse_size(settings.target_size)
    if plan is not None and not any(row.bits for row in plan.rows):
        raise Problem(f"the plan '{text}' clusters nothing: give a layer bits, as in 'cv:4/4'")
    checkpoint = _read_checkpoint(run / "checkpoints" / "last.pt", steps, world) if resume else None

    with _signals() as stop:
        stage.stop = stop
        model.eval()
        if checkpoint is None:
            before, _ = stage.accuracy(model)
            tell("before", {"accuracy": before, "unit": data.unit, "train": len(data.train), "eval": len(data.eval)})
        else:
            before = checkpoint["before"]
        if plan is None:
            tell("line", {"text": f"choosing bits and dim for {settings.target_size} by what each costs the loss ..."})
            plan = _allocated(stage, model)
            text = plan.text
        master = teacher(model) if settings.teacher == "self" else None
        with problems():
            compress_(
                model,
                plan,
                steps=max(1, steps),
                tau=tau,
                eps=settings.eps,
                max_iter=settings.max_iter,
                gradient=settings.gradient,
                seed=settings.seed,
                method=settings.method,
            )
        tell("plan", {"plan": plan})
        if not resume and first_process:
            make_folder(run, {"config.toml": as_toml(settings), "plan.json": _plan_json(plan, text)})
        try:
            training = Training(stage, model, master, order, steps, before, checkpoint, tell, started)
            training.run()
        except Problem:
            if not resume and first_process and not (run / "checkpoints" / "last.pt").exists():
                shutil.rmtree(run, ignore_errors=True)  # ours, new, and nothing in it to go on with
            raise

    result = None
    if first_process:
        with problems():  # FileError: the training diverged, or the disk is full
            file_bytes = save(model, run / "model.dkm")
    accelerator.wait_for_everyone()
    fresh = load(
        run / "model.dkm", into=models.build(settings.model, settings.weights, settings.classes or data.classes)[0]
    )
    after, _ = stage.accuracy(fresh.to(accelerator.device).eval())
    if first_process:
        dense = 4 * plan.parameters
        result = dict(
            accuracy_before=before,
            accuracy_after=after,
            bytes_dense=dense,
            bytes_paper=plan.bytes,
            bytes_file=file_bytes,
            ratio=dense / file_bytes,
            seconds=training.elapsed(),
            steps=steps,
            command=as_command(settings),
            seed=settings.seed,
            finished=True,
            environment=environment(accelerator),
        )
        write(run / "result.json", json.dumps(result, indent=2) + "\n")
        report.write(run)
        tell("result", result)
    accelerator.wait_for_everyone()
    return result or result_of(run)


def environment(accelerator: Any) -> dict[str, str]:
    """What the figures may depend on, and nothing that tells whose machine it was."""
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    processes = accelerator.num_processes
    return {
        "dkm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{processes} x {name}" if processes > 1 else name,
        "system": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
    }


class Training:
    """The loop and its state: the model, the optimizer, how many steps are done."""

    def __init__(
        self,
        stage: Stage,
        model: nn.Module,
        master: nn.Module | None,
        order: Order,
        steps: int,
        before: float,
        checkpoint: dict[str, Any] | None,
        tell: Tell,
        started: float,
    ):
        settings = stage.settings
        self.stage, self.settings, self.accelerator = stage, settings, stage.accelerator
        self.model, self.master, self.order, self.steps = model, master, order, steps
        self.before, self.tell = before, tell
        self.folder = Path(settings.out)
        default = 0.008 if settings.optimizer == "sgd" else 5e-5 if stage.data.unit == "texts" else 3e-4
        self.lr = default if settings.lr is None else settings.lr
        self.wrapped, self.optimizer = self.accelerator.prepare(model, make_optimizer(settings, model, self.lr))
        graph = (
            self.accelerator.device.type == "cuda"
            and self.accelerator.num_processes == 1
            and stage.data.unit == "images"  # all of one size
            and settings.autocast != "fp16"  # its scaler looks at the gradients
            and settings.method == "dkm"
        )
        self.work = capture(self._work, self.optimizer.optimizer) if graph else self._work
        self.watch = monitor(model, every=1)
        self.first_process = self.accelerator.is_main_process
        self.log_every = max(1, min(50, steps // 200))
        self.watch_every = max(1, steps // 50)
        self.done, self.evaluated, self.lines, self.seconds = 0, -1, 0, 0.0  # seconds: of earlier lives
        self.started = started
        self.saved_at = self.asked_at = time.perf_counter()
        self.ask_at, self.steps_asked = 0, 1  # the step to ask at, and how many since the last
        if checkpoint is not None:
            self._restore(checkpoint)
        if self.first_process and (self.folder / "log.jsonl").exists():
            jsonl.keep(self.folder / "log.jsonl", self.lines)  # the rest was abandoned with the steps after it

    def elapsed(self) -> float:
        """Seconds of work, of earlier lives too."""
        return self.seconds + time.perf_counter() - self.started

    def run(self) -> None:
        """To the end, which leaves the snapped network's statistics in the batch norms."""
        self.tell(
            "training", {"done": self.done, "steps": self.steps, "per_epoch": self.order.per_epoch, "lr": self.lr}
        )
        order = self.order
        order.first, order.steps = self.done, self.steps
        stream = batches(self.stage.data.train, order, self.stage.data, self.settings)
        self.since, self.at = self.done, time.perf_counter()
        while True:
            if self.done % (order.per_epoch * self.settings.eval_every) == 0 or self.done == self.steps:
                self._evaluate()
            if self.done == self.steps:
                return
            if not self.done and self.settings.batch_norm == "frozen" and self.settings.recalibrate:
                with parametrize.cached():
                    _read_soft(self.model.eval())
                    self._recalibrate()
            self._step(next(stream))
            stop = self._asked_to_stop()
            if stop or time.perf_counter() - self.saved_at >= self.settings.checkpoint_every:
                self._save()
            if stop:
                self.accelerator.wait_for_everyone()  # for the first one, which writes: a launcher ends who is left
                raise Stopped

    def _asked_to_stop(self) -> bool:
        """All processes at the same step: one that is a step ahead would wait for the others for ever."""
        world = self.accelerator.num_processes
        if world == 1:
            return self.stage.stop()
        if self.done < self.ask_at:
            return False
        now = time.perf_counter()
        mine = [int(self.stage.stop()), round(1e6 * (now - self.asked_at))]  # whole numbers: the same sum everywhere
        asked, elapsed = self.accelerator.reduce(torch.tensor(mine, device=self.accelerator.device)).tolist()
        self.asked_at = now
        wanted = self.steps_asked * ASK_EVERY * 1_000_000 * world // max(1, elapsed)
        self.steps_asked = min(max(1, wanted), 2 * self.steps_asked)  # a few fast steps do not mean many
        self.ask_at = self.done + self.steps_asked
        return bool(asked)

    def _step(self, batch: Batch) -> None:
        settings, accelerator = self.settings, self.accelerator
        torch.manual_seed(draw(settings.seed, "step", self.done, accelerator.process_index))  # dropout, mixup
        lr = learning_rate(settings, self.lr, self.done, self.steps)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self.wrapped.train()
        if settings.batch_norm == "frozen":
            for module in self.model.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        inputs = self._mixed(self.stage.move(batch))
        try:
            loss = self.work(*inputs)
        except RuntimeError:
            if not isinstance(self.work, capture) or not self.work.capturing:
                raise
            self.tell("line", {"text": "this model's steps cannot be a CUDA graph: they are launched one by one"})
            self.work = self._work
            self.optimizer.zero_grad()
            loss = self.work(*inputs)
        self.done += 1
        if self.done % self.log_every == 0 or self.done in (1, self.steps):
            self._log_step(loss, lr)
        if self.done % self.watch_every == 0 and self.done % self.order.per_epoch:
            self._watch()

    def _mixed(self, batch: Batch) -> tuple:
        """What `_work` takes: inputs and labels, and for mixup whom each is mixed with, and how much."""
        args, kwargs, y = split(batch)
        if not args:
            return kwargs, y
        if not self.settings.mixup:
            return *args, y
        share = torch.distributions.Beta(self.settings.mixup, self.settings.mixup).sample()
        return *args, y, torch.randperm(len(y)).to(y.device), share.to(y.device)

    def _work(self, x: Tensor | dict, y: Tensor, other: Tensor | None = None, share: Tensor | None = None) -> Tensor:
        """A step of the optimizer; returns the loss."""
        loss = self._loss(x, y, other, share)
        self.accelerator.backward(loss)
        if self.settings.clip is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _loss(self, x: Tensor | dict, y: Tensor, other: Tensor | None, share: Tensor | None) -> Tensor:
        settings = self.settings
        args, kwargs = ((), x) if isinstance(x, dict) else ((x,), {})
        pairs = [(y, 1.0)]
        if other is not None:
            args = (x * share + x[other] * (1 - share),)
            pairs = [(y, share), (y[other], 1 - share)]
        with self.accelerator.autocast():
            logits = logits_of(self.wrapped(*args, **kwargs)).float()
            loss, of_labels = 0.0, 1.0
            if self.master is not None:
                with torch.no_grad():
                    theirs = logits_of(self.master(*args, **kwargs))
                of_labels = settings.label_share
                loss = (1 - of_labels) * distill(logits, theirs, temperature=settings.temperature)
            for labels, share in pairs if of_labels else ():
                smoothing = settings.label_smoothing
                loss = loss + of_labels * share * F.cross_entropy(logits, labels, label_smoothing=smoothing)
        return loss

    def _log_step(self, loss: Tensor, lr: float) -> None:
        loss = float(self.accelerator.reduce(loss.detach(), "mean"))
        now = time.perf_counter()
        examples = (self.done - self.since) * self.stage.batch_size * self.accelerator.num_processes
        speed = examples / max(now - self.at, 1e-9)
        self.since, self.at = self.done, now
        if not math.isfinite(loss):
            raise Problem(f"the training diverged, its loss is {loss} at step {self.done}: lower --lr and start anew")
        self._log("step", loss=loss, lr=lr, per_second=round(speed, 2))

    def _log(self, kind: str, **numbers: Any) -> None:
        record = {"kind": kind, "step": self.done, "epoch": round(self.done / self.order.per_epoch, 6), **numbers}
        if kind in ("layers", "histogram"):
            del record["epoch"]
        if self.first_process:
            try:
                jsonl.append(self.folder / "log.jsonl", record)
            except OSError as error:
                raise Problem(f"cannot write {self.folder / 'log.jsonl'}: {error.strerror or error}") from None
        self.lines += 1
        self.tell(kind, record)

    def _watch(self) -> None:
        record = self.watch.record(self.done)
        self._log("layers", tensors=record["tensors"], total=record["total"])

    # --- evaluation

    def _evaluate(self) -> None:
        """Train-time weights, then snapped ones with statistics of their own.  Changes nothing, but at the end."""
        if self.evaluated == self.done:
            return
        if self.done:
            self._save()  # an evaluation may take long
        began = time.perf_counter()
        self.tell("evaluating", {})
        model, soft = self.model, None
        statistics = [(m, {k: v.clone() for k, v in m.named_buffers()}) for m in model.modules() if _is_norm(m)]
        model.eval()
        if self.done:  # first: it takes the centroids on to the present weights, and the rest is about those
            with parametrize.cached():
                _read_soft(model)
                soft, _ = self._accuracy(recalibrate=bool(statistics))
            _restore_statistics(statistics)
        snapped, loss = self._accuracy(recalibrate=bool(statistics))
        if self.done < self.steps:
            _restore_statistics(statistics)
        self._watch()
        self._histograms()
        self._log("eval", soft=soft, snapped=snapped, loss=loss if math.isfinite(loss) else None)
        self.evaluated = self.done
        self.at += time.perf_counter() - began  # the speed is that of training

    def _accuracy(self, *, recalibrate: bool) -> tuple[float, float]:
        if recalibrate and self.settings.recalibrate:
            self._recalibrate()
        return self.stage.accuracy(self.model)

    def _recalibrate(self) -> None:
        with parametrize.cached(), self.accelerator.autocast():
            # augmented: on the very pictures that it has learned by heart, the activations are not those on others
            recalibrate_(self.model, self.stage.sample(self.settings.recalibrate), forward=_forward)

    def _histograms(self) -> None:
        """Of the first, the largest and the last clustered tensor: a weight, or the first of each vector."""
        targets = [owned for owned in parameters(self.model) if owned.clustered is not None]
        largest = max(targets, key=lambda owned: owned.tensor.numel())
        for owned in {o.names[0]: o for o in (targets[0], largest, targets[-1])}.values():
            with torch.no_grad():
                values = to_vectors(owned.tensor.detach(), owned.clustered.dim)[:, 0].float().cpu()
                centroids = owned.clustered.C[:, 0].float().tolist()  # in their order: a line each, through time
            counts, edges = torch.histogram(values, 60)
            self._log(
                "histogram",
                name=owned.names[0],
                edges=edges.tolist(),
                counts=counts.int().tolist(),
                centroids=centroids,
            )

    # --- checkpoints

    def _save(self) -> None:
        self.saved_at = time.perf_counter()
        if not self.first_process:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None,
            "codes": self.watch._codes,  # what `changed` is counted against
            "done": self.done,
            "evaluated": self.evaluated,
            "lines": self.lines,
            "before": self.before,
            "seconds": self.elapsed(),
            "steps": self.steps,
            "world": self.accelerator.num_processes,
        }
        path = self.folder / "checkpoints" / "last.pt"
        partial = path.with_name(".last.pt.partial")
        try:
            with open(partial, "wb") as stream:
                torch.save(state, stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, path)
        except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            reason = getattr(error, "strerror", None) or "the disk may be full"
            raise Problem(f"cannot write {path}: {reason}; the checkpoint before it is whole, --resume") from None

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:  # `capture` has changed these, and may do so again
            group["lr"] = self.lr
            if "capturable" in group:
                group["capturable"] = False
        if state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.watch._codes = state["codes"]
        for name in ("done", "evaluated", "lines", "seconds"):
            setattr(self, name, state[name])


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.track_running_stats


@torch.no_grad()
def _read_soft(model: nn.Module) -> None:
    """Fill the cache with train-time weights.  Whatever mode the model is in, until the cache is closed it computes
    with these."""
    chains = [module for module in model.modules() if isinstance(module, parametrize.ParametrizationList)]
    for chain in chains:
        chain.train()
    for owned in parameters(model):
        for module, attribute in owned.owners if owned.clustered is not None else ():
            getattr(module, attribute)
    for chain in chains:
        chain.eval()


def _restore_statistics(statistics: list[tuple[nn.Module, dict[str, Tensor]]]) -> None:
    for module, buffers in statistics:
        for name, value in buffers.items():
            module.get_buffer(name).copy_(value)


def _forward(model: nn.Module, batch: Batch) -> None:
    args, kwargs, _ = split(batch)
    model(*args, **kwargs)


def _read_checkpoint(path: Path, steps: int, world: int) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises what comes to hand
        raise Problem(f"cannot read the checkpoint {path}: {str(error).splitlines()[0]}") from None
    if (state["steps"], state["world"]) != (steps, world):
        raise Problem(
            f"{path} is from a run of {state['steps']} steps on {state['world']} processes, and this would be "
            f"{steps} on {world}: the data or the launcher have changed"
        )
    return state


def _plan_json(plan: Plan, text: str) -> str:
    rows = [
        dict(
            name=row.name,
            shape=list(row.shape),
            bits=row.bits,
            dim=row.dim,
            reason=row.why,
            bytes=row.stored_bytes,
        )
        for row in plan.rows
    ]
    whole = dict(text=text, rows=rows, bytes=plan.bytes, dense_bytes=4 * plan.parameters)
    return json.dumps(whole, indent=1) + "\n"


def _allocated(stage: Stage, model: nn.Module) -> Plan:
    """The plan of the size wanted that costs least, measured on a few batches."""
    from accelerate.utils import broadcast_object_list

    settings = stage.settings

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        args, kwargs, _ = split(batch)
        with stage.accelerator.autocast():
            return logits_of(model(*args, **kwargs)).float()

    loss = divergence(model, stage.sample(MEASURED), forward=forward)
    with problems():
        plan = make_plan(model, settings.plan, size=settings.target_size, loss=loss, seed=settings.seed)
    if stage.accelerator.num_processes > 1:  # the same everywhere: devices round differently
        plan = make_plan(model, broadcast_object_list([plan.text])[0])
    return plan


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM ask for a stop, which comes with a checkpoint; the second one does not wait.

    Where a launcher has started several processes, it may send both, and kills them if they take too long; and without
    it nobody would end them.
    """
    asked, launcher = [], os.getppid()

    def ask(number: int, frame: Any) -> None:
        asked.append(number)
        for each in before if not several() else ():
            signal.signal(each, before[each])

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask)
    except ValueError:  # not the main thread: whoever has it, stops us
        before = {}
    try:
        yield lambda: bool(asked) or (several() and os.getppid() != launcher)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
