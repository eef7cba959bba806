"""What a run looks like in a terminal, or in the file that the output goes to."""

import textwrap
import time
from types import TracebackType
from typing import Self

import rich.console
import rich.progress

from ..foundation.text import clock_text, size_text
from ..plans.bench import GRADIENT, KMEANS, LOSS, Progress
from ..plans.rows import Plan
from .meanings import MEANINGS
from .measures import ACCURACY, MEASURES, Measure, Score, named_measure
from .pace import Pace, WorkPace, speed_text
from .processes import rank
from .run import Listener
from .run_folder import BlockRecord, Blocks, EvalRecord, Result, RunFolder, StepRecord, figures
from .run_time import run_time_sentence
from .settings import Settings, as_toml
from .tasks import Task

LINES = 20  # of steps, over the whole training, where the output is not a terminal
PATIENCE = 10.0  # seconds without a line, before one says how far an evaluation is


class Screen(Listener):
    """Shows a run: progress as a bar in a terminal, elsewhere as lines.  Of several processes only the first one
    prints."""

    def __init__(self, folder: RunFolder | None = None, *, to_stderr: bool = False) -> None:
        self.console = rich.console.Console(highlight=False, soft_wrap=True, quiet=rank() > 0, stderr=to_stderr)
        self.folder = folder
        self.bar: rich.progress.Progress | None = None
        self.counting: rich.progress.Progress | None = None  # what is written, or measured
        self.last_line = time.monotonic()
        self.choice: rich.progress.Progress | None = None
        self.task = rich.progress.TaskID(0)
        self.snapped = ""  # the latest evaluation, for the bar
        self.steps = 0
        self.eval_every = 1  # epochs
        self.pace = Pace(0, 0, 1)
        self.work_pace = WorkPace({})
        self.shown_share = 0.0  # of the choosing, in the last line
        self.shown_step = 0  # in the last line; before the training, of the texts that a language model writes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bars away."""
        for bar in (self.bar, self.counting, self.choice):
            if bar is not None:
                bar.stop()
        self.bar = self.counting = self.choice = None

    def note(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False)

    def settings(self, chosen: Settings) -> None:
        """Print all settings, as a paragraph."""
        self.eval_every = chosen.eval_every
        lines = [line.replace(" = ", "=", 1) for line in as_toml(chosen).splitlines()]
        self.note(textwrap.fill(" ".join(lines), self.console.width, subsequent_indent="  ", break_on_hyphens=False))
        self.note("")

    def measured_before(self, score: Score, task: Task) -> None:
        self.note(f"{task.train_count:,} {task.unit} to train on, {task.eval_count:,} to measure with")
        self.note(f"before: {in_words(score, task)}")

    def sampled(self, done: int, count: int) -> None:
        if self._counts("the model writes", done, count):
            return
        if not done or done == count or done - self.shown_step >= count / LINES:
            self.shown_step = done
            self.note(f"the model has written {done:,} of {count:,} texts to train on")

    def measured(self, done: int, count: int) -> None:
        """So many of the examples are evaluated: a bar, or a line now and then where that takes long."""
        if not self._counts("measuring", done, count) and time.monotonic() - self.last_line > PATIENCE:
            self.last_line = time.monotonic()
            self.note(f"{done:,} of {count:,} examples measured")

    def _counts(self, what: str, done: int, count: int) -> bool:
        """Show it as a bar, which disappears at the end; False where there is no terminal for one."""
        if not self.console.is_terminal:
            return False
        if self.counting is None:
            self.counting = rich.progress.Progress(console=self.console, expand=True, transient=True)
            self.counting.start()
            self.task = self.counting.add_task(what, total=count)
        self.counting.update(self.task, completed=done)
        if done == count:
            self.stop()
        return True

    def choosing_begins(self, size: str, allocator: str) -> None:
        self.note(f"choosing bits and dim for {size} {MEANINGS['allocator'][allocator].partition(';')[0]} ...")
        self.work_pace, self.shown_share = WorkPace({GRADIENT: (LOSS, 3.0), KMEANS: (LOSS, 1.0)}), 0.0
        if self.console.is_terminal:
            columns = rich.progress
            text = columns.TextColumn("{task.percentage:>3.0f} %  {task.fields[left]}")
            self.choice = columns.Progress(
                columns.TextColumn("choosing"), columns.BarColumn(None), text, console=self.console, expand=True
            )
            self.choice.start()
            self.task = self.choice.add_task("", total=1.0, left="")

    def choosing(self, progress: Progress) -> None:
        self.work_pace.worked(progress.last)
        left = self.work_pace.left(progress.done, progress.total)
        share, text = self.work_pace.share(left), f"{clock_text(left)} left"
        if self.choice is not None:
            self.choice.update(self.task, completed=share, left=text)
        elif share >= self.shown_share + 0.1:
            self.shown_share = share
            self.note(f"choosing: {100 * share:.0f} % done, {text}")

    def chosen(self) -> None:
        if self.choice is not None:
            self.stop()

    def planned(self, plan: Plan, file_bytes: int) -> None:
        kept = [row for row in plan.rows if row.bits is None]
        self.note(f"\n{plan.table(self.console.width, plan.clustered)}")
        if kept:
            self.note(f"... and {len(kept)} kept in 16 bit, {sum(row.stored_bytes for row in kept):,} bytes")
        ratio = 4 * plan.parameters / max(file_bytes, 1)
        self.note(f"{plan.summary()}\nthe file will take {size_text(file_bytes)}, {ratio:.1f}x smaller than float32\n")

    def reconstruction_begins(self, done: int, blocks: Blocks) -> None:
        text = f"{blocks['count']} blocks to train one by one, {blocks['steps']:,} steps each"
        self.note(f"{text} on {blocks['examples']:,} examples{f'; {done} are trained' if done else ''}")
        if blocks["left"]:
            self.note(f"in no block, and only trained with the whole model: {', '.join(blocks['left'])}")
        self.work_pace = WorkPace({})

    def reconstructed(self, record: BlockRecord, done: int, count: int) -> None:
        self.work_pace.worked("block")
        left = clock_text(self.work_pace.left({"block": done}, {"block": count}))
        change = f"error {record['before']:.3g} -> {record['after']:.3g}"
        self.note(f"block {done} of {count}, {record['name']}: {change}, {left} left")

    def training_begins(self, done: int, steps: int, steps_per_epoch: int, lr: float) -> None:
        self.steps = steps
        self.shown_step = done
        self.pace = Pace(done, steps, steps_per_epoch * self.eval_every)
        if not steps:
            return  # --no-training
        beginning = f"from step {done:,} of " if done else ""
        self.note(f"{beginning}{steps:,} steps, learning rate {lr:g}")
        if self.console.is_terminal:
            self.bar = self._new_bar()
            self.bar.start()
            epoch = f"{done / max(1, steps_per_epoch):.1f}"
            self.task = self.bar.add_task("", total=steps, completed=done, epoch=epoch, loss="-", snapped="", left="")

    def _new_bar(self) -> rich.progress.Progress:
        columns = rich.progress
        return columns.Progress(
            columns.TextColumn("epoch {task.fields[epoch]}"),
            columns.BarColumn(None),
            columns.TextColumn("{task.percentage:>3.0f} %"),
            columns.TextColumn("loss {task.fields[loss]}  {task.fields[snapped]}  {task.fields[left]}"),
            console=self.console,
            expand=True,
        )

    def stepped(self, record: StepRecord) -> None:
        step, loss = record["step"], record["loss"]
        self.pace.stepped(step)
        progress = f"{speed_text(record['per_second'])}/s, {clock_text(self.pace.left(step))} left"
        if self.bar is not None:
            epoch = f"{record['epoch']:.1f}"
            self.bar.update(
                self.task, completed=step, epoch=epoch, loss=f"{loss:.3g}", left=progress, snapped=self.snapped
            )
        elif step - self.shown_step >= self.steps / LINES or step == self.steps:
            self.shown_step = step
            self.note(f"step {step:,} of {self.steps:,}, loss {loss:.4g}, {progress}")

    def evaluation_begins(self) -> None:
        self.pace.evaluation_begins()
        if self.bar is not None:
            self.bar.update(self.task, snapped="evaluating")

    def evaluated(self, record: EvalRecord) -> None:
        measure, soft, snapped = named_measure(record.get("metric")), record["soft"], record["snapped"]
        assert snapped is not None  # an evaluation that is not finite is not logged
        self.pace.evaluated(soft is not None)
        self.snapped = f"snapped {measure.text(snapped)}"
        if self.bar is not None:
            self.bar.update(self.task, snapped=self.snapped)
        epoch = f"epoch {record['epoch']:.4g}"
        trained = "k-means, not trained" if soft is None else f"{epoch}: train-time weights {measure.text(soft)}"
        what = "" if measure.unit else f" ({measure.title})"
        self.note(f"{trained}, snapped {measure.text(snapped)}{what}")

    def finished(self, result: Result) -> None:
        self.stop()
        self.note("")
        found = figures(result)
        sizes = f"{size_text(result['bytes_dense'])} before, {size_text(result['bytes_file'])} after"
        lines = {found.measure.title: _before_and_after(found.measure, found.before, found.after)}
        for measure, before, after in found.others:
            lines[measure.title] = _before_and_after(measure, before, after)
        if found.examples is not None:
            error = "" if found.error_after is None else f", standard error {found.measure.text(found.error_after)}"
            lines["measured"] = f"on {found.examples:,} {found.unit}{error}"
        lines["size"] = f"{sizes}, {result['ratio']:.1f} times smaller"
        lines["memory"] = run_time_sentence(result["bytes_dense"])
        lines["time"] = clock_text(result["seconds"])
        for label, file in (("file", self.folder.model), ("report", self.folder.report)) if self.folder else ():
            if file.exists():
                lines[label] = str(file)
        margin = max(map(len, lines)) + 2
        for label, text in lines.items():
            broken = textwrap.wrap(text, self.console.width - margin) if label == "memory" else [text]
            self.note(f"{label:<{margin}}" + f"\n{'':<{margin}}".join(broken))


def in_words(score: Score, task: Task) -> str:
    """88.25 % right (± 1.86, 300 images), or: perplexity 5.45 (± 0.03, 60 texts); and what else was measured."""
    measure, value = task.measure, score.value
    main = f"{measure.text(value)} right" if measure is ACCURACY else f"{measure.title} {measure.text(value)}"
    others = "".join(f", {MEASURES[name].title} {MEASURES[name].text(value)}" for name, value in score.more.items())
    return f"{main} ({score.reliability(task.unit)}){others}"


def _before_and_after(measure: Measure, before: float | None, after: float) -> str:
    """92.50 % before, 88.25 % after."""
    return f"{'' if before is None else measure.text(before) + ' before, '}{measure.text(after)} after"
