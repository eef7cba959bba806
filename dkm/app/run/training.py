"""The training loop, with its log and its checkpoints."""

import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...training.monitor import monitor
from ..errors import Problem
from ..measures import Score
from ..run_folder import Checkpoint, EvalRecord, LayersRecord, Record, RunFolder, StepRecord
from ..tasks.batches import batches
from .evaluation import evaluate_clustered, histograms, read_train_time_weights, recalibrate
from .listener import Listener
from .order import Order
from .reconstruction import Reconstruction
from .stage import Stage
from .stopping import Stopped, StopVote
from .tracking import tracked
from .training_step import TrainingStep


class Training:
    """The loop and its state: the clustered model, the optimizer, how many steps are done.

    Args:
        stage: where to compute and on what.
        model: clustered already.
        teacher: the model as it was, to learn from; or None.
        steps: of the optimizer, in the whole run.
        before: the score of the uncompressed model, which checkpoints carry along.
        started: the value of `time.perf_counter()` when the run began.
    """

    def __init__(
        self,
        stage: Stage,
        model: nn.Module,
        teacher: nn.Module | None,
        *,
        folder: RunFolder,
        order: Order,
        steps: int,
        before: Score,
        started: float,
        listener: Listener,
    ):
        self.stage, self.settings, self.accelerator = stage, stage.settings, stage.accelerator
        self.model, self.folder, self.order, self.steps = model, folder, order, steps
        self.before, self.started, self.listener = before, started, listener
        self.step = TrainingStep(stage, model, teacher, listener)
        self.monitor = monitor(model, every=1)
        self.vote = StopVote(stage.accelerator, stage.stop_requested)
        self.log_every = max(1, min(50, steps // 200))
        self.watch_every = max(1, steps // 50)
        wanted = teacher is not None and self.settings.reconstruct > 0
        self.blocks = Reconstruction(stage, model, teacher, order) if wanted else None
        self.blocks_done = 0
        self.done = 0
        self.evaluated_step = -1  # of the last evaluation
        self.lines = 0  # of the log
        self.seconds_before = 0.0  # of work, before the run was resumed
        self.saved_at = time.perf_counter()
        self.saved_step: int | None = None  # of the last checkpoint
        self.logged_step, self.logged_at = 0, self.saved_at  # where the measurement of the speed begins

    # --- the loop

    def run(self) -> None:
        """Train to the end.  The batch norms then have the statistics of the snapped network."""
        per_epoch = self.order.steps_per_epoch
        if self.accelerator.is_main_process:
            self.folder.keep_log_lines(self.lines)  # the others belong to steps that are done again
        if self.blocks is not None:
            self._reconstruct(self.blocks)
        self.listener.training_begins(self.done, self.steps, per_epoch, self.step.highest_lr)
        task = self.stage.task
        stream = batches(task, task.train, self.order.keys(self.done, self.steps), self.settings)
        self.logged_step, self.logged_at = self.done, time.perf_counter()
        while True:
            if self.done % (per_epoch * self.settings.eval_every) == 0 or self.done == self.steps:
                self._evaluate()
            if self.done == self.steps:
                return
            if not self.done and self.settings.batch_norm == "frozen" and self.settings.recalibrate:
                with parametrize.cached():
                    read_train_time_weights(self.model.eval())
                    recalibrate(self.stage, self.model)
            self._step(next(stream))
            stop = self.vote.should_stop(self.done)
            if stop or time.perf_counter() - self.saved_at >= self.settings.checkpoint_every:
                self.save()
            if stop:
                # The first process writes the checkpoint, and a launcher ends all processes as soon as one has ended.
                self.accelerator.wait_for_everyone()
                raise Stopped

    def _reconstruct(self, blocks: Reconstruction) -> None:
        """Train the blocks that are not trained yet; a checkpoint follows each."""
        self.listener.reconstruction_begins(self.blocks_done, blocks.summary)
        if not self.blocks_done and not self.done:
            self.save()  # to go on from, whenever the run is stopped
        while self.blocks_done < blocks.summary["count"]:
            record = blocks.train(self.blocks_done)
            self.blocks_done += 1
            self._log(record)
            self.save()
            self.listener.reconstructed(record, self.blocks_done, blocks.summary["count"])
        blocks.free()

    def elapsed(self) -> float:
        """Seconds of work, those before the run was resumed included."""
        return self.seconds_before + time.perf_counter() - self.started

    def _step(self, batch: Any) -> None:
        loss, lr = self.step.take(batch, self.done, self.steps)
        self.done += 1
        if self.done % self.log_every == 0 or self.done in (1, self.steps):
            self._log_step(loss, lr)
        if self.done % self.watch_every == 0 and self.done % self.order.steps_per_epoch:
            self._check_weights()
            self._log_layers()

    def _evaluate(self) -> None:
        """Log an evaluation, unless the run was resumed right after it.  Changes nothing but at the end."""
        if self.evaluated_step == self.done:
            return
        if self.done:
            self.save()  # an evaluation may take long
        began = time.perf_counter()
        self.listener.evaluation_begins()
        scores = evaluate_clustered(
            self.stage, self.model, trained=self.done + self.blocks_done > 0, keep_statistics=self.done == self.steps
        )
        self._log_layers()
        for record in histograms(self.model, self.done):
            self._log(record)
        snapped, soft = scores.snapped, scores.train_time
        evaluation = EvalRecord(
            kind="eval",
            metric=self.stage.task.measure.name,
            step=self.done,
            epoch=self._epoch(),
            soft=None if soft is None else soft.value,
            snapped=snapped.value,
            loss=snapped.loss if math.isfinite(snapped.loss) else None,
            standard_error=snapped.error,
            examples=snapped.examples,
            more=snapped.more,
        )
        self._log(evaluation)
        self.listener.evaluated(evaluation)
        self.evaluated_step = self.done
        self.logged_at += time.perf_counter() - began  # the speed is that of training alone

    # --- the log

    def _epoch(self) -> float:
        return round(self.done / self.order.steps_per_epoch, 6)

    def _log(self, record: Record) -> None:
        """Write a record to the log, and count it; in every process, so that all have the same state."""
        if self.accelerator.is_main_process:
            try:
                self.folder.append(record)
            except ValueError:  # JSON has no infinite numbers; weights near the end of their range give some
                raise self._divergence("some of its figures are not finite") from None
            self.accelerator.log(tracked(record), step=record["step"])
        self.lines += 1

    def _log_step(self, loss: Tensor, lr: float) -> None:
        mean = float(self.accelerator.reduce(loss.detach(), "mean"))
        now = time.perf_counter()
        examples = (self.done - self.logged_step) * self.stage.batch_size * self.accelerator.num_processes
        speed = examples / max(now - self.logged_at, 1e-9)
        self.logged_step, self.logged_at = self.done, now
        if not math.isfinite(mean):
            raise self._divergence(f"its loss is {mean}")
        record = StepRecord(
            kind="step", step=self.done, epoch=self._epoch(), loss=mean, lr=lr, per_second=round(speed, 2)
        )
        self._log(record)
        self.listener.stepped(record)

    def _log_layers(self) -> None:
        measured = self.monitor.record(self.done)
        assert measured is not None  # the monitor records every step that it is asked for
        self._log(LayersRecord(kind="layers", step=self.done, tensors=measured["tensors"], total=measured["total"]))

    # --- divergence

    def _check_weights(self) -> None:
        """Raise Problem where a parameter is not finite: nothing that such a model gives is worth keeping."""
        finite = [parameter.detach().isfinite().all() for parameter in self.model.parameters()]
        if not torch.stack(finite).all():  # the processor waits for the device once, not for each parameter
            raise self._divergence("some of its weights are not finite")

    def _divergence(self, sign: str) -> Problem:
        """The error for a training that has diverged; `sign` says how that shows."""
        kept = "there is no checkpoint yet"
        if self.saved_step is not None:
            kept = f"the last checkpoint is of step {self.saved_step}"
        return Problem(
            f"the training diverged, {sign} at step {self.done}, and {kept}: lower --lr and start anew in another "
            "--out, because --resume would repeat it"
        )

    # --- checkpoints

    def save(self) -> None:
        """Write a checkpoint, in the first process.

        Raises Problem where the training has diverged; the checkpoint before, whose weights are finite, stays.
        """
        self._check_weights()
        self.saved_at = time.perf_counter()
        if not self.accelerator.is_main_process:
            self.saved_step = self.done
            return
        scaler = self.accelerator.scaler
        state = Checkpoint(
            model=self.model.state_dict(),
            optimizer=self.step.optimizer.state_dict(),
            scaler=scaler.state_dict() if scaler is not None else None,
            codes=self.monitor.state_dict()["codes"],
            done=self.done,
            blocks_done=self.blocks_done,
            evaluated=self.evaluated_step,
            lines=self.lines,
            before=self.before.value,
            score_before=self.before._asdict(),
            seconds=self.elapsed(),
            steps=self.steps,
            world=self.accelerator.num_processes,
        )
        self.folder.write_checkpoint(state)
        self.saved_step = self.done

    def restore(self, state: Checkpoint) -> None:
        """Go on from a checkpoint of this run; Problem where it is one of another run, or has been changed."""
        try:
            self._restore(state)
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise Problem(
                f"{self.folder.checkpoint} is not a checkpoint of this run, or is damaged: start the run anew in "
                "another --out"
            ) from error

    def _restore(self, state: Checkpoint) -> None:
        self.model.load_state_dict(state["model"])
        self.step.restore_optimizer(state["optimizer"])
        if state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.monitor.load_state_dict({"codes": state["codes"]})
        self.done, self.evaluated_step = state["done"], state["evaluated"]
        self.blocks_done = state.get("blocks_done", 0)
        self.saved_step = self.done
        self.lines, self.seconds_before = state["lines"], state["seconds"]
