"""The page, from the templates.  jinja2 escapes every text; only the SVG of the charts comes as markup."""

import os
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...foundation.atomic import write_atomically
from ..errors import Problem, WriteProblem, reason_of
from ..run_folder import RunFolder
from ..run_time import run_time_sentence
from . import comparison as comparisons
from .comparison import Comparison
from .curves import clustering_figures, training_figures
from .headline import asked, kicker, sentences, size_bars, state, tiles, with_hard_spaces
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
    _write(target, page(run), f"dkm report {path}")
    return target


def page(run: Run) -> str:
    """The whole page, as text."""
    return _templates.get_template("page.html").render(
        run=run,
        style=Markup(_read("style.css")),
        kicker=kicker(run),
        asked=asked(run),
        state=state(run),
        sentences=sentences(run),
        tiles=tiles(run),
        size_bars=size_bars(run),
        memory=run_time_sentence(run.dense_size) if run.dense_size else "",
        training=training_figures(run),
        sizes=sizes(run),
        weights=weight_figures(run),
        weights_text=WEIGHTS if run.last_step else "A histogram of the weights. The lines are the centroids.",
        clustering=clustering_figures(run),
        plan=plan_table(run),
        facts=_facts(run),
    )


WEIGHTS = (
    "How the weights gather around their centroids while they train: a histogram of the weights at some moments, from "
    "the start, above, to the end. The lines are the centroids."
)
COMPARISON = "comparison.html"
_MARK = b'<meta name="generator" content="dkm compare">'


def write_comparison(comparison: Comparison, target: Path | None = None) -> Path:
    """Write the page of a comparison, whole or not at all; returns its path.

    Without `target` it goes into the folder that holds all runs, or where there is no such folder into the present one.
    An older comparison is replaced; Problem where something else is there.
    """
    if target is None:
        parents = {each.run.path.resolve().parent for each in comparison.runs}
        target = (comparison.first.path.parent if len(parents) == 1 else Path()) / COMPARISON
    if target.is_dir():
        target = target / COMPARISON
    if target.exists() and _MARK not in target.read_bytes()[:1000]:
        raise Problem(f"{target} exists and is not a comparison that dkm wrote: choose another --out")
    _write(target, comparison_page(comparison), "dkm compare")
    return target


def _write(target: Path, text: str, again: str) -> None:
    """Write a page; WriteProblem where that fails, with the command that writes it `again`."""
    try:
        # Names from JSON may hold halves of surrogate pairs, which UTF-8 cannot express.
        write_atomically(target, text.encode("utf-8", "replace"))
    except OSError as error:
        reason = reason_of(error)
        raise WriteProblem(f"cannot write {target}: {reason}; once that is put right, {again} writes it") from None


def comparison_page(comparison: Comparison) -> str:
    """The whole page of a comparison, as text."""
    count = len(comparison.runs)
    dates = sorted({each.run.date for each in comparison.runs if each.run.date})
    return _templates.get_template("compare.html").render(
        comparison=comparison,
        style=Markup(_read("style.css")),
        title=f"{comparison.model}, {count} runs" if comparison.model else f"{count} runs",
        date=" to ".join({dates[0]: 0, dates[-1]: 0}) if dates else "",
        sentences=with_hard_spaces(comparisons.sentences(comparison)),
        measure=comparison.first.measure,
        sizes=comparisons.size_figure(comparison),
        columns=comparisons.columns(comparison),
        rows=comparisons.rows(comparison),
        reading=comparisons.READING,
        curves=comparisons.curves(comparison),
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
    if run.blocks:
        facts["trained one by one before"] = f"{run.blocks:,} blocks"
    if run.seconds is not None:
        facts["time"] = duration_text(run.seconds)
    return facts


def _read(name: str) -> str:
    """A file beside the templates, as it is."""
    assert _templates.loader is not None
    return _templates.loader.get_source(_templates, name)[0]
