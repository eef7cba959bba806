"""The command: arguments -> calls.  What goes wrong and can be put right is one sentence, and exit code 2."""

import inspect
import itertools
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

try:
    import rich.console
    import rich.progress
    import typer
except ImportError:
    sys.exit('dkm: the command needs more than the library: pip install "torch-dkm[cli]"')

import torch

from .. import __version__
from ..foundation.errors import DKMError
from ..foundation.text import clock_text, size_text
from ..plans.plan import plan as make_plan
from . import models, run, settings
from .settings import Problem

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
RANK = int(os.environ.get("RANK", "0")) if run.several() else 0  # of several processes the first one, 0, talks
HEAD_START = 5.0  # seconds, see _problem


def main(arguments: list[str] | None = None) -> None:
    """The entry point: `app`, and its errors in a sentence."""
    code = 0
    try:
        code = app(arguments, prog_name="dkm", standalone_mode=False) or 0
    except run.Stopped:
        code = 130
    except KeyboardInterrupt:
        code = 130
        if RANK == 0:
            _say("stopped")
    except typer.Exit as end:
        code = end.exit_code
    except DKMError as error:
        code = _problem(str(error))
    except torch.OutOfMemoryError:
        code = _problem("the GPU has too little memory: give a smaller --batch-size, or --autocast bf16")
    except OSError as error:
        code = _problem(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    except Exception as error:
        if run.lost(error):
            sentence = f"another process has ended; --resume goes on from the last checkpoint: {error}"
            code = _problem(sentence, head_start=HEAD_START)
        elif hasattr(error, "format_message"):
            message = error.format_message()
            code = _problem(message) if message else 2  # none: the help was asked for by giving nothing
        else:  # not the command line's: a fault of ours, to be seen whole
            raise
    if code == 0 and run.several() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(code)


def _say(sentence: str) -> None:
    print(f"dkm: {' '.join(sentence.split())}", file=sys.stderr, flush=True)


def _problem(sentence: str, *, head_start: float = HEAD_START if RANK else 0.0) -> int:
    """One sentence, of several processes too.

    Mostly all have the same problem: the first one says it and ends, and a launcher then ends the others, which wait.
    Who is still here after that has a problem of its own.
    """
    if head_start:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        time.sleep(head_start + RANK / 2)
    _say(sentence)
    return 2


def _with_settings(*names: str) -> Callable[[Callable], Callable]:
    """Give a command an option for each of these settings; it gets those that were given, as a dict `given`."""

    def options(command: Callable) -> Callable:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]

        def call(**values: Any) -> Any:
            given = {name: values.pop(name) for name in names}
            return command(**values, given={name: value for name, value in given.items() if value is not None})

        parameters = list(own)
        for name in names:
            rules, kind = settings.FIELDS[name].metadata, settings.kind(name)
            default = settings.FIELDS[name].default
            text = "; ".join(filter(None, [rules["help"], ", ".join(rules["choices"])]))
            text += f" [{default}]" if default not in (None, ()) else ""
            option = typer.Option(
                settings.flag(name),
                help=text.replace("[", r"\["),
                rich_help_panel=rules["panel"],
                metavar={str: "TEXT", int: "N", float: "X", tuple: "PATH"}[kind],
                show_default=False,
            )
            hint = list[str] if kind is tuple else kind
            parameters.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[hint | None, option]
                )
            )
        call.__signature__ = inspect.Signature(parameters)
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        call.__name__, call.__doc__ = command.__name__, command.__doc__
        return call

    return options


def _version(asked: bool) -> None:
    if asked:
        print(f"dkm {__version__}")
        raise typer.Exit


@app.callback()
def _dkm(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Make a trained network 10 to 60 times smaller by clustering its weights while it trains."""


@app.command("compress")
@_with_settings(*settings.FIELDS)
def compress_command(
    given: dict,
    config: Annotated[Path | None, typer.Option(help="a .toml or .yaml file with any of the settings below")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --out, if there is one")] = False,
) -> None:
    """Train a model with clustered weights; write the small file and a report."""
    given = {name: list(value) if isinstance(value, (list, tuple)) else value for name, value in given.items()}
    given = {name: value for name, value in given.items() if value != []}
    _compress(given, settings.read(config) if config else {}, resume)


def _compress(given: dict, config: dict, resume: bool = False) -> dict:
    chosen, continues = run.prepare(given, config, resume)
    folder = Path(chosen.out)
    finished = run.result_of(folder) if continues else None
    with Screen() as screen:
        if finished is not None:
            screen.line(f"{folder} is finished:")
            screen.folder = folder
            screen("result", finished)
            return finished
        screen.settings(chosen)
        screen.folder = folder
        try:
            return run.compress(chosen, screen, resume=continues)
        except run.Stopped:
            screen.stop()
            if RANK == 0 and run.is_run(folder):
                program = " the launcher and: -m dkm" if run.several() else ": dkm"
                _say(f"stopped; go on with{program} compress --resume --out {folder}")
            elif RANK == 0:
                _say("stopped before the training began; nothing was written")
            raise


@app.command("eval")
@_with_settings(
    *("model", "weights", "data", "eval_data", "classes", "image_size", "resize", "text_columns", "label_column"),
    *("max_length", "batch_size", "workers", "autocast", "device"),
)
def eval_command(
    given: dict,
    folder: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="a run: its file, model and data")] = None,
) -> None:
    """The accuracy of a run's file, or of any weights: --model NAME --weights FILE --data FOLDER."""
    given = {name: value for name, value in given.items() if value != []}
    base: dict = {}
    if folder is not None:
        stored = run.stored(folder)
        if not (folder / "model.dkm").is_file():
            raise Problem(f"{folder} has no model.dkm yet: finish it with dkm compress --resume --out {folder}")
        base = {name: getattr(stored, name) for name in settings.FIELDS} | {"weights": str(folder / "model.dkm")}
    chosen = settings.make(base, given)
    with Screen() as screen:
        stage, model = run.open_stage(chosen, screen)
        screen.line(f"{len(stage.data.eval):,} {stage.data.unit}")
        accuracy, loss = stage.accuracy(model.eval())
        screen.line(f"{accuracy:.2f} % right, loss {loss:.4f}")


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Argument(help="as for compress --model; its weights are not needed")],
    plan: Annotated[str, typer.Argument(help="'cv:4/4, fc:8/4'")],
    classes: Annotated[int | None, typer.Option(min=1, help="outputs of the model; without: its own")] = None,
) -> None:
    """What a plan would do: a row for each tensor, with its bits and bytes."""
    print(make_plan(models.outline(model, classes), plan))


@app.command("inspect")
def inspect_command(file: Annotated[Path, typer.Argument(help="a .dkm file")]) -> None:
    """What a file holds: a row for each tensor, how evenly its codes are used, and their entropy."""
    from ..formats.contents import describe

    print(describe(file, shutil.get_terminal_size((100, 24)).columns))


@app.command("report")
def report_command(folder: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run")]) -> None:
    """Write the report of a run again, of an unfinished one too."""
    run.stored(folder)  # a clear word where it is none
    from . import report

    print(report.write(folder))


@app.command("demo")
def demo_command(
    out: Annotated[
        Path | None, typer.Option(help="the folder for all of it, a new one; without: dkm-demo-output")
    ] = None,
) -> None:
    """Draw 300 pictures, train a network on them, compress it.  Under a minute; needs no data."""
    from .demo import NETWORK, SIZE, make_images, train

    if out is None:
        names = itertools.chain(["dkm-demo-output"], (f"dkm-demo-{number}-output" for number in itertools.count(2)))
        out = next(path for path in map(Path, names) if not path.exists())
    if out.exists():
        raise Problem(f"{out} exists: choose another folder, --out FOLDER")
    torch.set_num_threads(1)  # the network is small: threads would wait for one another
    network, weights = f"{out / 'network.py'}:network", out / "dense.safetensors"
    with Screen() as screen:
        screen.line(f"drawing 300 pictures into {out / 'images'}")
        make_images(out / "images", 300)
        (out / "network.py").write_text(NETWORK, encoding="utf-8")
        screen.line("training a small network on them, to have something to compress\n")
        train(network, out / "images", weights)
        given = dict(model=network, weights=str(weights), data=[str(out / "images")], plan="cv:2/8, fc:8")
        given |= dict(epochs=5, batch_size=32, lr=2e-3, image_size=SIZE, out=str(out / "run"))
        screen.line(settings.as_command(settings.make(given)) + "\n")
    _compress(given, {})


# --- what it looks like --------------------------------------------------------------------------


class Screen:
    """Bars in a terminal; elsewhere lines, at most one for each twentieth of the way."""

    def __init__(self) -> None:
        self.console = rich.console.Console(highlight=False, soft_wrap=True, quiet=RANK > 0)
        self.bar: rich.progress.Progress | None = None
        self.snapped, self.folder = "", Path()

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def line(self, text: str) -> None:
        self.console.print(text, markup=False)

    def settings(self, chosen: settings.Settings) -> None:
        lines = [line.replace(" = ", "=", 1) for line in settings.as_toml(chosen).splitlines()]
        self.line(textwrap.fill(" ".join(lines), self.console.width, subsequent_indent="  ", break_on_hyphens=False))
        self.line("")

    def __call__(self, kind: str, numbers: dict[str, Any]) -> None:
        show = getattr(self, f"_{kind}", None)
        if show is not None:
            show(**numbers)

    def _line(self, text: str, **_: Any) -> None:
        self.line(text)

    def _before(self, accuracy: float, unit: str, train: int, eval: int, **_: Any) -> None:
        self.unit = unit
        self.line(f"{train:,} {unit} to train on, {eval:,} to measure with")
        self.line(f"before: {accuracy:.2f} % right")

    def _plan(self, plan: Any, **_: Any) -> None:
        clustered, kept = ([row for row in plan.rows if (row.bits is None) is keep] for keep in (False, True))
        self.line(f"\n{plan.table(self.console.width, clustered)}")
        if kept:
            self.line(f"... and {len(kept)} kept in 16 bit, {sum(row.stored_bytes for row in kept):,} bytes")
        self.line(f"{plan.summary()}\n")

    def _training(self, done: int, steps: int, per_epoch: int, lr: float, **_: Any) -> None:
        self.done, self.steps, self.per_epoch = done, steps, per_epoch
        self.began, self.at, self.shown = time.perf_counter(), done, done
        self.line(
            f"{'from step ' + format(done, ',') + ' of' if done else ''} {steps:,} steps, learning rate {lr:g}".strip()
        )
        if self.console.is_terminal:
            columns = rich.progress
            self.bar = columns.Progress(
                columns.TextColumn("epoch {task.fields[epoch]}"),
                columns.BarColumn(None),
                columns.TextColumn("{task.percentage:>3.0f} %"),
                columns.TextColumn("{task.fields[speed]:.0f}/s  loss {task.fields[loss]}  {task.fields[snapped]}"),
                columns.TimeRemainingColumn(),
                console=self.console,
                expand=True,
            )
            self.bar.start()
            self.task = self.bar.add_task(
                "", total=steps, completed=done, epoch=f"{done / max(1, per_epoch):.1f}", speed=0, loss="-", snapped=""
            )

    def _step(self, step: int, epoch: float, loss: float, per_second: float, **_: Any) -> None:
        if self.bar is not None:
            fields = dict(epoch=f"{epoch:.1f}", loss=f"{loss:.3g}", speed=per_second, snapped=self.snapped)
            self.bar.update(self.task, completed=step, **fields)
        elif step - self.shown >= self.steps / 20 or step == self.steps:
            self.shown = step
            left = (time.perf_counter() - self.began) / max(1, step - self.at) * (self.steps - step)
            self.line(f"step {step:,} of {self.steps:,}, loss {loss:.4g}, {per_second:.0f}/s, {clock_text(left)} left")

    def _evaluating(self) -> None:
        if self.bar is not None:
            self.bar.update(self.task, snapped="evaluating")

    def _eval(self, epoch: float, soft: float | None, snapped: float, **_: Any) -> None:
        self.snapped = f"snapped {snapped:.1f} %"
        if self.bar is not None:
            self.bar.update(self.task, snapped=self.snapped)
        trained = "k-means, not trained" if soft is None else f"epoch {epoch:.4g}: train-time weights {soft:.2f} %"
        self.line(f"{trained}, snapped {snapped:.2f} %")

    def _result(self, **numbers: Any) -> None:
        self.stop()
        folder = self.folder
        before, after = numbers["accuracy_before"], numbers["accuracy_after"]
        self.line("")
        self.line(f"accuracy  {before:.2f} % before, {after:.2f} % after")
        self.line(
            f"size      {size_text(numbers['bytes_dense'])} before, {size_text(numbers['bytes_file'])} after, "
            f"{numbers['ratio']:.1f} times smaller"
        )
        self.line(f"time      {clock_text(numbers['seconds'])}")
        for name in ("model.dkm", "report.html"):
            if (folder / name).exists():
                self.line(f"{'file' if name == 'model.dkm' else 'report':<10}{folder / name}")
