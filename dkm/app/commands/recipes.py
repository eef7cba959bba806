"""dkm recipes: the paper's configurations, which the package carries."""

import itertools
from typing import Annotated

import typer

from ...foundation.text import table
from .. import recipes
from .application import command

WIDEST = 1000  # columns: a name is not shortened, because it is to be typed


@command("recipes", "dkm recipes resnet", "dkm recipes resnet18-6-8")
def recipes_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="a recipe, to print its file; or a part of several names")
    ] = None,
) -> None:
    """List the paper's configurations and what each gave in the paper, or print the file of one."""
    if name in recipes.RECIPES:
        print(recipes.path_of(name).read_text(encoding="utf-8"), end="")
        return
    found = [each for each in recipes.RECIPES if name is None or name.lower() in each]
    if not found:
        recipes.path_of(name or "")  # says that there is none
    described = [recipes.describe(each) for each in found]
    columns = ("recipe", "plan", "accuracy", "size", "in the paper")
    lines = [(each.name, each.plan, each.accuracy, each.size, each.where) for each in described]
    titles, *rows = table([columns, *lines], "<<>><", columns=WIDEST).splitlines()
    print(f"{titles}\n")
    for (network, before), group in itertools.groupby(
        zip(described, rows, strict=True), key=lambda pair: (pair[0].network, pair[0].uncompressed)
    ):
        print(f"{network}, {before} uncompressed")
        print("\n".join(row for _, row in group) + "\n")
    if any("*" in each.where for each in described):
        print("* with at most 2 iterations, because the paper's memory did not hold more")
    print("dkm recipes NAME prints the file of one; dkm compress --recipe NAME --data ... runs it.")
    print("The figures are the paper's: nobody has run all of them to the end with this library.")
