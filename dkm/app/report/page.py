"""The page, from the templates.  jinja2 escapes every text; only the SVG of the charts comes as markup."""

import os
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...foundation.atomic import write_atomically
from ..run_folder import RunFolder
from .curves import clustering_figures, training_figures
from .headline import sentences, state, tiles
from .plan_table import plan_table
from .reader import Run, read
from .ridges import weight_figures
from .sizes import sizes
from .words import duration_text

_templates = Environment(
    loader=PackageLoader(__package__ or "dkm.app.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def write(path: str | os.PathLike) -> Path:
    """Write report.html into a run folder, whole or not at all; returns its path."""
    run = read(path)
    target = RunFolder(run.path).report
    # Names from JSON may hold halves of surrogate pairs, which UTF-8 cannot express.
    write_atomically(target, page(run).encode("utf-8", "replace"))
    return target


def page(run: Run) -> str:
    """The whole page, as text."""
    return _templates.get_template("page.html").render(
        run=run,
        style=Markup(_read("style.css")),
        state=state(run),
        sentences=sentences(run),
        tiles=tiles(run),
        training=training_figures(run),
        sizes=sizes(run),
        weights=weight_figures(run),
        clustering=clustering_figures(run),
        plan=plan_table(run),
        facts=_facts(run),
    )


def breakable(name: str) -> Markup:
    """The name of a tensor, which may go on in the next line after each of its dots."""
    return Markup(".<wbr>").join(name.split("."))


_templates.filters["breakable"] = breakable


def _facts(run: Run) -> dict[str, str]:
    """What the figures may depend on."""
    facts = dict(run.environment)
    if run.seed is not None:
        facts["seed"] = run.seed
    if run.last_step is not None:
        facts["optimizer steps"] = f"{run.last_step:,}"
    if run.seconds is not None:
        facts["time"] = duration_text(run.seconds)
    return facts


def _read(name: str) -> str:
    """A file beside the templates, as it is."""
    assert _templates.loader is not None
    return _templates.loader.get_source(_templates, name)[0]
