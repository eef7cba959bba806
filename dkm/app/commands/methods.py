"""dkm methods: the ways to cluster a weight while it trains."""

import difflib
import inspect
import shutil
from dataclasses import fields
from typing import Annotated

import torch
import typer

from ...clustering.precision import MAX_BITS
from ...foundation.text import table
from ...modelling.clustered import Clustered
from ...modelling.methods import METHODS, option_names
from .. import method_costs
from ..errors import Problem
from .application import command


@command("methods", "dkm methods", "dkm methods quant_noise")
def methods_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="a method, for its description and options")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="also measure a training step with each, which takes some seconds")
    ] = False,
) -> None:
    """List what --method takes: the papers, for how many bits, what they need; or describe one."""
    width = shutil.get_terminal_size((100, 24)).columns
    if name is not None:
        if measure:
            raise Problem("--measure compares all methods: leave out NAME, or --measure")
        print(_described(name, width))
        return
    titles = ("method", "paper", "bits", "dim", "needs", "what a weight becomes")
    lines = [titles, *(_line(each, kind) for each, kind in METHODS.items())]
    align, note = "<<<<<<", ""
    if measure:
        times = method_costs.measure_steps(METHODS)
        column = ("ms a step", *(f"{times[each]:.1f}" for each in METHODS))
        lines = [(*line[:-1], cell, line[-1]) for line, cell in zip(lines, column, strict=True)]
        align, note = "<<<<<><", f"\n{_measured(times[''])}"
    print(table(lines, align, columns=width, shrink_last=True, spare=["paper"]))
    print(f"{note}\ndkm methods NAME describes one; docs/methods.md compares them.")


def _measured(plain: float) -> str:
    """What was measured."""
    width, threads = method_costs.WIDTH, torch.get_num_threads()
    return (
        f"ms a step: forward, backward and SGD of a linear layer of {width} x {width} weights,\n"
        f"with {method_costs.EXAMPLES} examples and {method_costs.BITS} bits (1 where that is the most), on "
        f"{threads} thread{'s' * (threads > 1)}\nof this machine's CPU; {plain:.1f} without clustering."
    )


def _line(name: str, kind: type[Clustered]) -> tuple[str, ...]:
    bits = f"1-{kind.most_bits}" if kind.most_bits > 1 else "1"
    what = (inspect.getdoc(kind) or "").partition("\n")[0]
    return name, kind.paper, bits, "1" if kind.only_scalars else "any", ", ".join(kind.needs) or "-", what


def _described(name: str, width: int) -> str:
    """The docstring of a method, and a table of its options; Problem where there is no such method."""
    if name not in METHODS:
        close = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.4)
        raise Problem(f"there is no method '{name}': {f'did you mean {close[0]}?' if close else 'see dkm methods'}")
    kind = METHODS[name]
    declared = {field.name: field for field in fields(kind.Options)}
    options = [
        (each, str(declared[each].default), "; ".join(filter(None, [help, ", ".join(choices)])))
        for each in option_names(kind)
        for help, choices in [(declared[each].metadata["help"], declared[each].metadata["choices"])]
    ]
    limits = [] if kind.most_bits == MAX_BITS else [f"at most {kind.most_bits} bits"]
    limits += ["dim 1 only"] if kind.only_scalars else []
    limits += [f"in {', '.join(layer.__name__ for layer in kind.layers)} only"] if kind.layers else []
    head = ", ".join(filter(None, [name, kind.paper, *limits]))
    rows = table([("option", "default", ""), *options], "<<<", columns=width, shrink_last=True)
    return f"{head}\n\n{inspect.getdoc(kind)}\n\n{rows}"
