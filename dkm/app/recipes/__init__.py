"""The paper's configurations: a config file for each, whose first lines say what the paper reports."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import Problem
from ..settings import read as read_settings

_FOLDER = Path(__file__).parent
RECIPES = {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


@dataclass(frozen=True)
class Recipe:
    """A configuration, and what the paper reports of it."""

    name: str
    network: str  # with the data: ResNet-50 on ImageNet-1k
    plan: str
    accuracy: str  # 74.5 %
    size: str  # 3.32 MiB, or 32x smaller; empty where the paper gives none
    uncompressed: str  # the accuracy before
    where: str  # in the paper: Fig. 4; with a * where it is with fewer iterations


def path_of(name: str) -> Path:
    """The file of a recipe; Problem where there is none of this name."""
    if name in RECIPES:
        return RECIPES[name]
    close = difflib.get_close_matches(name, RECIPES, n=1)
    hint = f"did you mean {close[0]}?" if close else "dkm recipes lists them all"
    raise Problem(f"there is no recipe '{name}': {hint}")


def describe(name: str) -> Recipe:
    """What the first two lines of a recipe say."""
    path = path_of(name)
    title, figures = path.read_text(encoding="utf-8").splitlines()[:2]
    said, _, before = figures.partition("; uncompressed ")
    network, rest = title.removeprefix("# ").split(", ", 1)
    size = re.search(r"[\d.]+ MiB", said)
    ratio = re.search(r"compression ratio (\d+)", said)
    return Recipe(
        name,
        network,
        plan=read_settings(path)["plan"],
        accuracy=_first_percentage(said),
        size=size[0] if size else f"{ratio[1]}x smaller" if ratio else "",
        uncompressed=_first_percentage(before),
        where=rest[rest.rindex("(") + 1 : -1] + (" *" if "two iterations" in said else ""),
    )


def _first_percentage(text: str) -> str:
    found = re.search(r"[\d.]+ %", text)
    assert found is not None  # every recipe says both accuracies; a test reads them all
    return found[0]
