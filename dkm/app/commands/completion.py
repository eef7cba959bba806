"""dkm completion: what a shell needs to complete the command's words.

The script holds all words and starts no Python: importing torch takes seconds, which is too long for a press of Tab.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from ... import __version__
from ...exporters import TARGETS
from ...modelling.methods import METHODS
from .. import models, recipes, settings
from ..errors import Problem
from .application import command

SHELLS = ("bash", "zsh")
BASHS_WAY = """autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""
# In COMP_WORDS, `--flag=value` is three words.  Where no word fits, `-o default` completes the names of files.
SCRIPT = """# Completion of dkm {version}, written by: dkm completion {shell}
_dkm() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words=
    if [[ $word == "=" ]]; then
        word=
    elif [[ $before == "=" ]]; then
        before=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    if [[ $COMP_CWORD -eq 1 ]]; then
        words="{commands}"
    elif [[ $word == -* ]]; then
        case $command in
{flags}
        esac
    else
        case "$command $before" in
{values}
        esac
    fi
    COMPREPLY=( $(compgen -W "$words" -- "$word") )
}}
complete -o default -F _dkm dkm
"""


@command(
    "completion",
    "dkm completion bash > ~/.local/share/bash-completion/completions/dkm",
    "dkm completion zsh > ~/.dkm-completion.zsh",
)
def completion_command(
    context: typer.Context,
    shell: Annotated[str, typer.Argument(metavar="|".join(SHELLS), help="the shell that the script is for")],
) -> None:
    """Print a script with which a shell completes commands, flags, and the names of models, recipes and methods.

    bash reads it by itself from the place in the example, if bash-completion is installed; otherwise, source the file
    in ~/.bashrc. For zsh, source it in ~/.zshrc. Write it again after an update of dkm.
    """
    if shell not in SHELLS:
        raise Problem(f"there is completion for {' and '.join(SHELLS)}, and not for '{shell}'")
    assert context.parent is not None
    everything: Any = context.parent.command
    commands = {name: everything.get_command(context, name) for name in everything.list_commands(context)}
    flags = (f"            {name}) words='{' '.join(_flags(each))}' ;;" for name, each in commands.items())
    values = (f"            {case}) words='{words}' ;;" for case, words in _values(commands))
    script = SCRIPT.format(
        version=__version__,
        shell=shell,
        commands=" ".join([*commands, "--help", "--version"]),
        flags="\n".join(flags),
        values="\n".join(values),
    )
    print((BASHS_WAY if shell == "zsh" else "") + script, end="")


def _flags(each: Any) -> list[str]:
    return [flag for param in each.params if param.param_type_name == "option" for flag in param.opts] + ["--help"]


def _values(commands: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Patterns of a command and the word before, and the words that may follow.  Flags come first: what follows any
    other word is the command's argument."""
    known = {
        "method": list(METHODS),
        "recipe": list(recipes.RECIPES),
        "model": models.known_names(),
        "to": list(TARGETS),
        "shell": list(SHELLS),
    }
    known |= {
        name: list(field.metadata["choices"]) for name, field in settings.FIELDS.items() if field.metadata["choices"]
    }
    where: dict[str, list[str]] = {}
    for name, each in commands.items():
        for param in each.params:
            if param.name in known and param.param_type_name == "option":
                where.setdefault(param.name, []).append(f'"{name} {param.opts[0]}"')
    for param_name, cases in where.items():
        yield "|".join(cases), " ".join(known[param_name])
    for name, each in commands.items():
        first = next((param for param in each.params if param.param_type_name == "argument"), None)
        words = known["recipe"] if name == "recipes" else known.get(first.name, []) if first is not None else []
        if words:
            yield f'"{name} {name}"', " ".join(words)
        elif first is None:
            yield f'"{name} {name}"', " ".join(_flags(each))
