"""`compress`: a whole run, from its settings to its result."""

import contextlib
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ... import __version__
from ...compress import check_method, compress_
from ...formats.container import array_sizes
from ...formats.dkm_file import encode, load, save
from ...foundation.errors import FileError
from ...planning import plan as make_plan
from ...plans.language import parse_target
from ...plans.rows import Plan
from ...training.distill import teacher
from .. import report
from ..errors import Problem, WriteProblem, as_problems, reason_of
from ..measures import Score
from ..own_code import own_problems
from ..places import located
from ..processes import rank
from ..run_folder import Beginning, Checkpoint, PlanFile, Result, RunFolder, plan_file
from ..settings import FIELDS, Settings, as_command, clustering_options
from ..tasks import LanguageTask
from .choosing import choose_plan
from .evaluation import calibrate, evaluate
from .listener import Listener
from .reconstruction import Reconstruction
from .sampling import write_texts
from .stage import open_stage
from .stopping import stop_requests
from .tracking import check_tracker, start_tracker, stop_tracker, tracked_result
from .training import Training


def compress(settings: Settings, listener: Listener | None = None, *, resume: bool = False) -> Result:
    """Make the whole run and return what result.json holds.

    With `resume` the folder is there and the run goes on from its last checkpoint.  Raises Problem for what the user
    can put right, such as another process that runs in the same folder, and Stopped after SIGINT or SIGTERM, with a
    checkpoint written.
    """
    with contextlib.ExitStack() as stack:
        if resume and settings.out is not None and rank() == 0:  # one lock for all processes of a run
            stack.enter_context(RunFolder(Path(settings.out)).lock())
        run = _Run(settings, listener or Listener(), resume, stack)
        with stop_requests() as requested:
            run.stage.stop_requested = requested
            try:
                with own_problems(), _batch_norm_problems():
                    training = run.start()
                    start_tracker(run.stage, run.folder, training.done, run.before.value)
                    stack.callback(stop_tracker, run.stage)
                    training.run()
            except WriteProblem:  # there is room for nothing more, and the user wants to keep what there is
                raise
            except Problem:
                if run.has_made_folder and not run.folder.checkpoint.exists():
                    stop_tracker(run.stage)
                    run.folder.remove()  # there is nothing in it to go on with
                raise
        return run.finish(training)


def rehearse(settings: Settings, listener: Listener) -> None:
    """All of a run that comes before the training, with one batch of each kind: what is wrong raises Problem, and
    nothing is written."""
    run = _Run(settings, listener, resume=False, locks=contextlib.ExitStack())
    run.folder.check_place()
    with stop_requests() as requested:
        run.stage.stop_requested = requested
        run.rehearse()


@contextlib.contextmanager
def _batch_norm_problems() -> Iterator[None]:
    """Batch norm cannot learn from a single value of a channel: from one example that is one pixel large by then."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise Problem(
            f"the batches are too small for batch norm: give a larger --batch-size, or a larger --image-size ({error})"
        ) from error


class _Run:
    """The parts of a run that `compress` puts together; opening it checks everything that can be checked at once."""

    def __init__(self, settings: Settings, listener: Listener, resume: bool, locks: contextlib.ExitStack):
        self.started = time.perf_counter()
        self.locks, self.has_made_folder = locks, False
        self.settings, self.listener, self.resume = settings, listener, resume
        if settings.plan is None and settings.target_size is None:
            raise Problem("how small? give --plan 'cv:4/4, fc:8/4', or --target-size 1.0MB")
        if settings.target_size is None and settings.allocator != FIELDS["allocator"].default:
            raise Problem("--allocator is about a size: give --target-size, or leave it out")
        if settings.out is None:
            raise Problem("where to? give --out FOLDER")
        self.folder = RunFolder(Path(settings.out))
        check_tracker(settings)
        bad_images = self.folder.read_bad_images() if resume else None
        self.stage, self.model = open_stage(settings, listener, bad_images=bad_images)
        self.is_main_process = self.stage.accelerator.is_main_process
        self.order = self.stage.make_order()
        self.steps = settings.epochs * self.order.steps_per_epoch
        # a run that was stopped while its plan was chosen has none yet
        self.is_planned = settings.target_size is None or (resume and self.folder.plan.exists())
        self.text = self.folder.read_plan()["text"] if resume and self.is_planned else settings.plan
        self.plan = self._known_plan()
        self.checkpoint = self._read_checkpoint() if resume else None

    def _known_plan(self) -> Plan | None:
        """The plan, unless one has yet to be chosen for a size."""
        plan = None
        with as_problems():
            if self.settings.target_size is not None:
                parse_target(self.settings.target_size)
            if self.is_planned:
                plan = make_plan(self.model, self.text)
                check_method(self.model, plan, self.settings.method)
        if plan is not None and not plan.clustered:
            raise Problem(f"the plan '{self.text}' clusters nothing: give a layer bits, as in 'cv:4/4'")
        return plan

    def _read_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to go on from, if there is one; Problem where it is from another training."""
        if self.is_main_process:
            self.folder.remove_unfinished_files()
        state, processes = self.folder.read_checkpoint(), self.stage.accelerator.num_processes
        if state is not None and (state["steps"], state["world"]) != (self.steps, processes):
            raise Problem(
                f"{self.folder.checkpoint} is from a run of {state['steps']} steps on {state['world']} processes, and "
                f"this would be {self.steps} on {processes}: the data or the launcher have changed"
            )
        return state

    def start(self) -> Training:
        """Measure the uncompressed model, cluster it, make the folder; returns the training, ready to run."""
        settings, model, checkpoint = self.settings, self.model.eval(), self.checkpoint
        if checkpoint is None:
            self.before = evaluate(self.stage, model)
            if not math.isfinite(self.before.value):
                name = self.stage.task.measure.name
                raise Problem(f"the {name} of the uncompressed model is {self.before.value}: it is not a trained model")
            self.listener.measured_before(self.before, self.stage.task)
        else:
            self.before = _score_before(checkpoint, self.stage.task.eval_count)
        samples = self._own_texts()
        if self.plan is None:
            self._make_folder(None, samples)
            self.plan = choose_plan(self.stage, model, self.listener, self.folder)
            self.text = self.plan.text
        uncompressed = teacher(model) if settings.teacher == "self" else None
        with as_problems(), self.stage.stop_requested.at_once():
            compress_(model, self.plan, method=settings.method, **clustering_options(settings, self.steps))
        if checkpoint is None:
            calibrate(self.stage, model)
        sizes = self._sizes()
        self.listener.planned(self.plan, sum(sizes.values()))
        if self.is_main_process:
            plan = plan_file(self.plan, self.text or "", self._beginning(sizes))
            if self.is_planned:
                self._make_folder(plan, samples)
            else:
                self.folder.write_plan(plan)
        training = Training(
            self.stage,
            model,
            uncompressed,
            folder=self.folder,
            order=self.order,
            steps=self.steps,
            before=self.before,
            started=self.started,
            listener=self.listener,
        )
        if checkpoint is not None:
            training.restore(checkpoint)
        return training

    def _make_folder(self, plan: PlanFile | None, samples: Tensor | None) -> None:
        """Make the folder of a new run, in the first process, and lock it."""
        if not self.resume and self.is_main_process:
            self.folder.create(self.settings, plan, samples, self.stage.bad_images)
            self.has_made_folder = True
            self.locks.enter_context(self.folder.lock())

    def rehearse(self) -> None:
        """Read and compute what the training begins with, and say what it would be."""
        settings, stage, task = self.settings, self.stage, self.stage.task
        evaluate(stage, self.model.eval(), most=stage.batch_size)
        own = isinstance(task, LanguageTask) and task.own is not None
        if not own:
            next(stage.sample(stage.batch_size))
        if self.plan is not None:
            taught_by = teacher(self.model) if settings.reconstruct else None
            with as_problems():
                compress_(self.model, self.plan, method=settings.method, **clustering_options(settings, self.steps))
            if taught_by is not None and not own:
                blocks = Reconstruction(stage, self.model, taught_by, self.order, examples=stage.batch_size)
                self.listener.reconstruction_begins(0, blocks.summary)
            self.listener.planned(self.plan, sum(self._sizes().values()))
        else:
            self.listener.note(f"the run begins by choosing the plan for {settings.target_size}")
        texts = f"{self.order.examples:,} texts that the model writes" if own else f"{task.train_count:,} {task.unit}"
        self.listener.note(
            f"{self.steps:,} steps on {texts}, {stage.batch_size} in each; {task.eval_count:,} to measure with"
        )
        self.listener.note(f"all of this can be run; nothing was written to {settings.out}")

    def _sizes(self) -> dict[str, int]:
        """The bytes of each array of the file, and of its header, as it would be now; in the first process."""
        return array_sizes(encode(self.model, coding=self.settings.coding)) if self.is_main_process else {}

    def _beginning(self, sizes: dict[str, int]) -> Beginning:
        """What is known before the first step; `sizes` are those of what the file will hold."""
        task = self.stage.task
        return Beginning(
            model="" if type(self.model).__module__.startswith("torch.") else type(self.model).__name__,
            date=_now(),
            metric=task.measure.name,
            unit=task.unit,
            before=self.before.figures(task.measure),
            file=sizes,
        )

    def _own_texts(self) -> Tensor | None:
        """Let the uncompressed language model write the texts to train on, once: a resumed run reads them."""
        task = self.stage.task
        if not isinstance(task, LanguageTask) or task.own is None:
            return None
        if self.resume:
            samples = self.folder.read_samples()
        else:
            enough = task.measured_count if self.settings.target_size is not None else 0
            count = self.order.examples if self.steps else enough
            samples = write_texts(self.stage, self.model, task.own, count, self.listener)
        task.use_own_texts(samples)
        return samples

    def finish(self, training: Training) -> Result:
        """Write the file, measure it, and write the result and the report."""
        accelerator, file = self.stage.accelerator, self.folder.model
        if self.is_main_process:
            with as_problems():
                self._save(file)
        accelerator.wait_for_everyone()
        fresh = self.stage.build_model().model
        load(file, into=fresh)
        after = evaluate(self.stage, fresh.to(accelerator.device).eval())
        if self.is_main_process:
            result = self._result(after, training)
            self.folder.write_result(result)
            report.write(self.folder.path)
            accelerator.log(tracked_result(result), step=self.steps)
            self.listener.finished(result)
        accelerator.wait_for_everyone()
        written = self.folder.read_result()
        assert written is not None  # by the first process
        return written

    def _save(self, file: Path) -> None:
        """Write the compressed file; FileError where the training has diverged."""
        try:
            save(self.model, file, coding=self.settings.coding)
        except FileError as error:
            if isinstance(error.__cause__, OSError):
                raise self.folder.cannot_write(file, reason_of(error.__cause__)) from None
            raise

    def _result(self, after: Score, training: Training) -> Result:
        assert self.plan is not None  # since `start`
        sizes = array_sizes(self.folder.model.read_bytes())
        dense, file_bytes = 4 * self.plan.parameters, sum(sizes.values())
        outliers = sum(size for name, size in sizes.items() if name.startswith(("positions/", "outliers/")))
        task, before = self.stage.task, self.before
        name = task.measure.name
        result = Result(
            metric=name,
            unit=task.unit,
            before=before.figures(task.measure),
            after=after.figures(task.measure),
            bytes_dense=dense,
            bytes_paper=self.plan.bytes + outliers,  # of which the plan knows nothing
            bytes_file=file_bytes,
            file=sizes,
            ratio=dense / file_bytes,
            seconds=training.elapsed(),
            steps=self.steps,
            command=as_command(located(self.settings)),
            seed=self.settings.seed,
            date=_now(),
            finished=True,
            environment=_environment(self.stage.accelerator),
        )
        if training.blocks is not None:
            result["blocks"] = training.blocks.summary
        return cast(Result, {f"{name}_before": before.value, f"{name}_after": after.value, **result})


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _score_before(checkpoint: Checkpoint, examples: int) -> Score:
    """The score of the uncompressed model; checkpoints of dkm 0.1.0 had its value alone at first."""
    stored = checkpoint.get("score_before")
    return Score(**stored) if stored else Score(checkpoint["before"], math.nan, examples, None, {})


def _environment(accelerator: Any) -> dict[str, str]:
    """What the figures may depend on, and nothing that tells whose machine it was."""
    device, processes = accelerator.device, accelerator.num_processes
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "dkm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{processes} x {name}" if processes > 1 else name,
        "system": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
    }
