"""The application that all commands belong to, and their flags."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ... import __version__
from .. import settings

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


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
