"""The application that all commands belong to, and their flags."""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from ... import __version__
from .. import settings
from ..meanings import MEANINGS
from ..processes import rank
from .help import LONGEST_WORD, Command, Commands

EXAMPLES = (
    "dkm demo",
    "dkm plan resnet18 'cv:4/4, fc:8/4'",
    "dkm compress --help",
)
app = typer.Typer(
    cls=Commands,
    epilog="\n".join(EXAMPLES),
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def command(name: str, *examples: str) -> Callable[[Callable], Callable]:
    """A decorator that makes a function a command.  Its help shows the docstring, the flags and these examples."""
    return app.command(name, cls=Command, epilog="\n".join(examples))


AsJSON = Annotated[
    bool, typer.Option("--json", help="print JSON, for other programs; docs/command-line.md explains the keys")
]


def print_json(found: Mapping[str, Any]) -> None:
    """Print what `--json` asks for, once where there are several processes.  Nothing else goes to standard output."""
    if not rank():
        print(json.dumps(found, indent=1, allow_nan=False))


def with_settings(*names: str) -> Callable[[Callable], Callable]:
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
    word = rules["word"] or "|".join(rules["choices"]) or {str: "NAME", int: "N", float: "X"}.get(kind)
    if word and name in MEANINGS and len(word) > LONGEST_WORD:
        word = "WORD"  # the words are listed below it
    option = typer.Option(
        settings.flag(name),
        help=rules["help"]
        + (f" [default: {_as_typed(default)}]" if default is not False and default not in (None, ()) else ""),
        rich_help_panel=rules["panel"],
        metavar=word,
        show_default=False,
    )
    hint: Any = list[str] if kind is tuple else kind
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[hint | None, option]
    )


def _as_typed(default: Any) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)


def _version(asked: bool) -> None:
    if asked:
        print(f"dkm {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _dkm(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Make a trained network 10 to 60 times smaller by clustering its weights while it trains.

    dkm COMMAND --help explains a command and all its flags.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
