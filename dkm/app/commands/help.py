"""The help pages: plain text that fits the terminal, with examples at the end, the same with every version of typer."""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import typer.core

from ..meanings import MEANINGS

WIDEST = 100  # columns: longer lines are hard to read
COLUMN = 24  # where the texts begin, at most
LONGEST_WORD = 12  # for a value, where its meanings are listed below


class Command(typer.core.TyperCommand):
    """A command whose help is laid out here.  Its epilog holds examples, one in each line."""

    def get_help(self, ctx: Any) -> str:
        """The page."""
        params = self.get_params(ctx)
        arguments = [param for param in params if param.param_type_name == "argument"]
        usage = [ctx.command_path, *map(_usage_of, arguments), "[FLAGS]"]
        panels: dict[str, list[Any]] = {"Arguments": arguments}
        others = []
        for param in params:
            panel = getattr(param, "rich_help_panel", None)
            if panel is not None:
                panels.setdefault(panel, []).append(param)
            elif param not in arguments:
                others.append(param)
        panels["Other flags" if len(panels) > 1 else "Flags"] = others
        lines = [f"{_bold('Usage:')} {' '.join(usage)}", "", *_prose(self.help)]
        for title, entries in panels.items():
            if entries:
                lines += ["", _bold(f"{title}:"), *_list([(_name_of(each), _text_of(each)) for each in entries])]
        return "\n".join([*lines, *_examples(self.epilog)])


class Commands(typer.core.TyperGroup):
    """All commands together: a sentence for each."""

    def get_help(self, ctx: Any) -> str:
        """The page."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        sentences = [(name, (each.help or "").split("\n\n")[0]) for name, each in commands if each is not None]
        flags = [(_name_of(param), _text_of(param)) for param in self.get_params(ctx)]
        lines = [f"{_bold('Usage:')} {ctx.command_path} COMMAND ...", "", *_prose(self.help), ""]
        lines += [_bold("Commands:"), *_list(sentences), "", _bold("Flags:"), *_list(flags)]
        return "\n".join([*lines, *_examples(self.epilog)])


def _columns() -> int:
    return min(WIDEST, shutil.get_terminal_size((80, 24)).columns)


def _prose(text: str | None) -> Iterator[str]:
    """The paragraphs of a docstring, each filled anew; one whose lines are indented is a list, and stays as it is."""
    for i, paragraph in enumerate(textwrap.dedent(text or "").strip().split("\n\n")):
        if i:
            yield ""
        if paragraph.startswith(" "):
            yield from paragraph.splitlines()
        else:
            yield from _filled(" ".join(paragraph.split()), "", "")


def _list(entries: list[tuple[str, str]]) -> Iterator[str]:
    """Names, and their texts beside them; below, where a name is long.  What its values mean comes below a flag."""
    column = min(COLUMN, 4 + max(len(name) for name, _ in entries))
    indent = " " * column
    for name, text in entries:
        start = f"  {name}".ljust(column)
        if len(name) + 4 > column:
            yield start
            start = indent
        yield from _filled(" ".join(text.split()), start, indent) or [start.rstrip()]
        meanings = MEANINGS.get(name.split()[0].removeprefix("--").replace("-", "_"), {})
        width = max(map(len, meanings), default=0)
        for value, meaning in meanings.items():
            yield from _filled(meaning, f"{indent}  {value:<{width}}  ", indent + " " * (width + 4))


def _filled(text: str, first: str, indent: str) -> list[str]:
    whole = text.replace("[default: ", "[default:\N{NO-BREAK SPACE}")
    lines = textwrap.wrap(
        whole,
        _columns(),
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _examples(epilog: str | None) -> Iterator[str]:
    """Command lines that can be pasted: one that is too long goes on in the next line, between two flags."""
    yield from ("", _bold("Examples:"))
    for example in (epilog or "").splitlines():
        line = " "
        for part in re.findall(r"(?:[^\s']|'[^']*')+(?: +(?!--)(?:[^\s']|'[^']*')+)*", example):
            if len(f"{line} {part} \\") > _columns():
                yield f"{line} \\"
                line = "   "
            line += f" {part}"
        yield line


def _name_of(param: Any) -> str:
    """`--epochs N`, `--all`, or the word of an argument."""
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    flag = ", ".join(param.opts)
    return f"{flag} {param.metavar}" if param.metavar and not param.is_flag else flag


def _usage_of(argument: Any) -> str:
    word = _name_of(argument)
    return word if argument.required else f"[{word}]"


def _text_of(param: Any) -> str:
    required = param.required and param.param_type_name == "option"
    return f"{param.help or ''}{' (required)' if required else ''}"


def _bold(text: str) -> str:
    styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return f"\033[1m{text}\033[0m" if styled else text
