"""The command: arguments -> calls.  What goes wrong and can be put right is one sentence, and exit code 2."""

import inspect
import itertools
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

try:
    import jinja2  # noqa: F401
    import rich  # noqa: F401
    import typer
except ImportError:
    sys.exit('dkm: the command needs more than the library: pip install "torch-dkm[cli]"')

import torch

from .. import __version__
from ..foundation.atomic import write_atomically
from ..foundation.errors import DKMError
from ..plans.plan import plan as make_plan
from . import models, run, settings
from .errors import Problem
from .processes import has_several_processes, is_from_a_lost_process, rank
from .run_folder import Result, RunFolder
from .screen import Screen, in_words

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
HEAD_START = 5.0  # seconds; see `_problem`


def main(arguments: list[str] | None = None) -> None:
    """The entry point: run a command line, say what is wrong in one sentence, and exit."""
    code = 0
    try:
        if any("\0" in argument for argument in arguments or ()):  # a program that calls this one can give it
            raise Problem("an argument holds the character NUL, which no name or path can have")
        code = app(arguments, prog_name="dkm", standalone_mode=False) or 0
    except run.Stopped:
        code = 130
    except KeyboardInterrupt:
        code = 130
        if rank() == 0:
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
        if is_from_a_lost_process(error):
            sentence = f"another process has ended; --resume goes on from the last checkpoint: {error}"
            code = _problem(sentence, let_others_speak=True)
        elif hasattr(error, "format_message"):
            message = error.format_message()
            code = _problem(message) if message else 2  # no message: the user gave nothing and gets the help
        else:  # not a mistake on the command line but a fault of dkm, whose traceback is needed
            raise
    if code == 0 and has_several_processes() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(code)


def _say(sentence: str) -> None:
    print(f"dkm: {' '.join(sentence.split())}", file=sys.stderr, flush=True)


def _problem(sentence: str, *, let_others_speak: bool = False) -> int:
    """Say what is wrong, and return the exit code.

    Where there are several processes, mostly all of them have the same problem.  The first one says it and ends, upon
    which a launcher ends the others; they wait for that.  A process that is still there after the wait has a problem of
    its own, and says it.
    """
    if rank() or let_others_speak:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        time.sleep(HEAD_START + rank() / 2)
    _say(sentence)
    return 2


def _with_settings(*names: str) -> Callable[[Callable], Callable]:
    """A decorator that gives a command a flag for each of these settings.

    The command gets the settings that the user gave as its argument `given`, a dict.
    """

    def decorate(command: Callable) -> Callable:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
        parameters = [*own, *map(_parameter, names)]

        def call(**values: Any) -> Any:
            given = {name: values.pop(name) for name in names}
            return command(**values, given={name: value for name, value in given.items() if value not in (None, [])})

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads these
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        call.__name__, call.__doc__ = command.__name__, command.__doc__
        return call

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    """The flag of a setting, as a parameter of a function that typer makes a command of."""
    declared, kind = settings.FIELDS[name], settings.kind(name)
    rules, default = declared.metadata, declared.default
    text = "; ".join(filter(None, [rules["help"], ", ".join(rules["choices"])]))
    text += f" [{default}]" if default not in (None, ()) else ""
    option = typer.Option(
        settings.flag(name),
        help=text.replace("[", r"\["),
        rich_help_panel=rules["panel"],
        metavar={str: "TEXT", int: "N", float: "X", tuple: "PATH"}[kind],
        show_default=False,
    )
    hint: Any = list[str] if kind is tuple else kind
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[hint | None, option]
    )


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
    given: dict[str, Any],
    config: Annotated[Path | None, typer.Option(help="a .toml or .yaml file with any of the settings below")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --out, if there is one")] = False,
) -> None:
    """Train a model with clustered weights; write the small file and a report."""
    _compress(given, settings.read(config) if config else {}, resume)


def _compress(given: dict[str, Any], config: dict[str, Any], resume: bool = False) -> Result:
    chosen, continues = run.prepare(given, config, resume)
    folder = RunFolder(Path(str(chosen.out)))
    finished = folder.read_result() if continues else None
    with Screen(folder) as screen:
        if finished is not None:
            screen.note(f"{folder.path} is finished:")
            screen.finished(finished)
            return finished
        screen.settings(chosen)
        try:
            return run.compress(chosen, screen, resume=continues)
        except run.Stopped:
            screen.stop()
            if rank() == 0 and folder.is_run():
                program = " the launcher and: -m dkm" if has_several_processes() else ": dkm"
                _say(f"stopped; go on with{program} compress --resume --out {folder.path}")
            elif rank() == 0:
                _say("stopped before the training began; nothing was written")
            raise


@app.command("eval")
@_with_settings(
    *("model", "weights", "data", "eval_data", "classes", "image_size", "resize", "text_columns", "label_column"),
    *("max_length", "batch_size", "workers", "autocast", "device"),
)
def eval_command(
    given: dict[str, Any],
    folder: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="a run: its file, model and data")] = None,
) -> None:
    """The accuracy or perplexity of a run's file, or of any weights: --model NAME --weights FILE --data FOLDER."""
    base: dict[str, Any] = {}
    if folder is not None:
        files = RunFolder(folder)
        stored = files.read_settings()
        if not files.model.is_file():
            raise Problem(f"{folder} has no model.dkm yet: finish it with dkm compress --resume --out {folder}")
        base = {name: getattr(stored, name) for name in settings.FIELDS} | {"weights": str(files.model)}
    chosen = settings.make(base, given)
    with Screen() as screen:
        stage, model = run.open_stage(chosen, screen)
        screen.note(f"{stage.task.eval_count:,} {stage.task.unit}")
        value, loss = run.evaluate(stage, model.eval())
        screen.note(f"{in_words(stage.task.measure, value)}, loss {loss:.4f}")


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Argument(help="as for compress --model; its weights are not needed")],
    plan: Annotated[str, typer.Argument(help="'cv:4/4, fc:8/4'")],
    classes: Annotated[int | None, typer.Option(min=1, help="outputs of the model; without: its own")] = None,
) -> None:
    """What a plan would do: a row for each tensor, with its bits and bytes."""
    print(make_plan(models.model_without_values(model, classes), plan))


@app.command("inspect")
def inspect_command(file: Annotated[Path, typer.Argument(help="a .dkm file")]) -> None:
    """What a file holds: a row for each tensor, how evenly its codes are used, and their entropy."""
    from ..formats.contents import describe

    print(describe(file, shutil.get_terminal_size((100, 24)).columns))


@app.command("report")
def report_command(folder: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run")]) -> None:
    """Write the report of a run again, of an unfinished one too."""
    from . import report

    RunFolder(folder).read_settings()  # Problem where the folder is not that of a run
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
    torch.set_num_threads(1)  # the network is small: threads would only wait for one another
    network, weights = f"{out / 'network.py'}:network", out / "dense.safetensors"
    with Screen() as screen:
        screen.note(f"drawing 300 pictures into {out / 'images'}")
        make_images(out / "images", 300)
        write_atomically(out / "network.py", NETWORK)
        screen.note("training a small network on them, to have something to compress\n")
        train(network, out / "images", weights)
        given: dict[str, Any] = dict(
            model=network, weights=str(weights), data=[str(out / "images")], plan="cv:2/8, fc:8"
        )
        given |= dict(epochs=5, batch_size=32, lr=2e-3, image_size=SIZE, out=str(out / "run"))
        screen.note(settings.as_command(settings.make(given)) + "\n")
    _compress(given, {})
