"""The table, the picture and the page of digits.py."""

import base64
import html
import io
from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import nn

LAYER = "conv3"  # the one in the picture
LIGHT = {"fore": "#1d2733", "back": "#ffffff", "weights": "#8b9bb0", "centroids": "#c2410c"}
DARK = {"fore": "#d5dce6", "back": "#161b22", "weights": "#5f7189", "centroids": "#fb923c"}

Table = list[tuple[str, ...]]


def table(before: float, float_file: Path, results: list, images: int) -> Table:
    """Rows of cells; a row of one cell is a heading."""
    full, parameters = float_file.stat().st_size, results[0].size.parameters

    def row(name: str, first: str, of) -> tuple[str, ...]:
        return (name, first, *(of(result) for result in results))

    return [
        row("", "float32", lambda r: r.text),
        (f"accuracy on {images} test images, %",),
        row("not compressed", f"{before:.2f}", lambda r: ""),
        row("clustered, not trained (k-means)", "", lambda r: f"{r.untrained:.2f}"),
        row("trained, soft weights", "", lambda r: f"{r.soft:.2f}"),
        row("trained, snapped", "", lambda r: f"{r.snapped:.2f}"),
        row("the same, batch norm re-estimated", "", lambda r: f"{r.recalibrated:.2f}"),
        row("loaded from the file", "", lambda r: f"{r.loaded:.2f}"),
        ("size",),
        row("bits a clustered weight", "32", lambda r: f"{r.size.bits_per_weight:.2f}"),
        row("parameters, as the paper counts, bytes", f"{4 * parameters:,}", lambda r: f"{paper_bytes(r):,}"),
        row("times smaller", "", lambda r: f"{r.size.ratio:.1f}"),
        row("the file on disk, bytes", f"{full:,}", lambda r: f"{r.file.stat().st_size:,}"),
        row("times smaller", "", lambda r: f"{full / r.file.stat().st_size:.1f}"),
    ]


def paper_bytes(result) -> int:
    return round(result.size.megabytes * 2**20)


def as_text(cells: Table) -> str:
    """At most 80 columns."""
    lines = []
    for name, *values in cells:
        if not values:
            lines.append(name)
        else:
            lines.append(f"{'  ' if name else ''}{name}".ljust(42) + "".join(f"{value:>12}" for value in values))
    return "\n".join(line.rstrip() for line in lines)


# --- the picture ---------------------------------------------------------------------------------


def draw(model: nn.Module, results: list, path, colors: dict = LIGHT) -> None:
    """A row a plan: the layer's float32 weights on the left, its trained weights and centroids on the right."""
    fore, back = colors["fore"], colors["back"]
    style = {f"{part}.color": fore for part in ("text", "xtick", "ytick")}
    style |= {"axes.edgecolor": fore, "axes.labelcolor": fore, "axes.facecolor": back, "figure.facecolor": back}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "font.size": 12, "axes.titlesize": 12}
    with rc_context(style):
        figure = Figure(figsize=(7.2, 3.2 * len(results)), layout="constrained")
        axes = figure.subplots(len(results), 2, squeeze=False)
        for result, (left, right) in zip(results, axes, strict=True):
            show_layer(left, right, model, result, colors)
        figure.savefig(path, dpi=150, format="png")


@torch.no_grad()
def show_layer(left, right, model: nn.Module, result, colors: dict) -> None:
    # What compress_ put on the layer: the weight that the optimizer trains, and the clustering of it.
    parametrization = getattr(result.model, LAYER).parametrizations.weight
    trained, clustered = parametrization.original, parametrization[0]
    C, codes = clustered.codes(trained)
    before = getattr(model, LAYER).weight.flatten()
    left.set_title(f"{LAYER}, float32 weights")
    right.set_title(f"{result.text} trained: {len(C)} centroids")
    limit = 1.05 * float(max(before.abs().max(), trained.abs().max()))
    if clustered.dim == 1:
        for axis, values in ((left, before), (right, trained.flatten())):
            axis.hist(values.numpy(), bins=100, range=(-limit, limit), color=colors["weights"], histtype="stepfilled")
            axis.set(xlabel="weight", ylabel="how many", xlim=(-limit, limit))
            axis.margins(y=0.12)
        for c, count in zip(C.flatten().tolist(), codes.bincount(minlength=len(C)), strict=True):
            right.axvline(c, color=colors["centroids"], linewidth=1.3, linestyle=(0, (4, 3)))
            right.annotate(
                f"{100 * count / len(codes):.0f} %", (c, 1), (2, -8), xycoords=("data", "axes fraction"),
                textcoords="offset points", color=colors["centroids"], fontsize=8,
            )  # fmt: skip
    else:
        for axis, values in ((left, before), (right, trained.flatten())):
            x, y = values[: values.numel() // clustered.dim * clustered.dim].view(-1, clustered.dim)[:, :2].T.numpy()
            axis.scatter(x, y, s=3, alpha=0.5, color=colors["weights"], linewidths=0)
            axis.set(xlabel=f"first of {clustered.dim} weights", ylabel="second", aspect="equal")
            axis.set(xlim=(-limit, limit), ylim=(-limit, limit))
        x, y = C[:, :2].T.float().numpy()
        right.scatter(x, y, s=46, marker="x", color=colors["centroids"])
    for axis in (left, right):
        axis.locator_params("x", nbins=4)
        axis.locator_params("y", nbins=5)


# --- the page ------------------------------------------------------------------------------------

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>dkm on the digits</title>
<style>
:root {{ --fore: #1d2733; --soft: #5b6878; --back: #f6f7f9; --card: #ffffff; --line: #dde2e8; --mark: #c2410c; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --fore: #d5dce6; --soft: #93a1b3; --back: #0d1117; --card: #161b22; --line: #2b3440; --mark: #fb923c; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; padding: 1.5rem 1rem 3rem; background: var(--back); color: var(--fore);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }}
main {{ max-width: 52rem; margin: 0 auto; }}
h1 {{ font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 .6rem; }}
p {{ margin: .5rem 0; }}
small, .soft {{ color: var(--soft); }}
.card {{ background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .5rem .9rem;
  overflow-x: auto; }}
table {{ width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .95rem; }}
th, td {{ padding: .35rem .4rem; text-align: right; border-bottom: 1px solid var(--line); }}
th:first-child, td:first-child {{ text-align: left; }}
tr:last-child > * {{ border-bottom: 0; }}
tr.part th {{ padding-top: .9rem; color: var(--mark); font-weight: 600; }}
td.name, code {{ font-family: ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; font-size: .88em; }}
pre {{ margin: .4rem 0; font-size: .85rem; overflow-x: auto; }}
td.why, th.why {{ text-align: left; padding-left: 1rem; }}
img {{ display: block; width: 100%; height: auto; }}
@media (max-width: 34rem) {{ table {{ font-size: .82rem; }} th, td {{ padding: .3rem .25rem; }}
  .wide {{ display: none; }} .card {{ padding: .4rem .5rem; }} }}
</style>
</head>
<body>
<main>
<h1>Digits at {bits} a weight</h1>
<p>{introduction}</p>
<div class="card"><table>{table}</table></div>
<p><small>One test image is {one:.2f} %: differences of that size mean nothing. The files hold everything needed to
rebuild the weights, running statistics included.</small></p>
<h2>One layer, before and after</h2>
<div class="card"><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">
<img src="{light}" alt="The weights of {layer} before compression and after, with the centroids"></picture></div>
<p><small>Right: the weights that the optimizer trains. They gather around the centroids; the file holds, for each,
only which centroid is nearest. The percentages say how many have which. With <code>4/4</code> a centroid stands for
four neighbouring weights; the picture shows two of the four.</small></p>
{plans}
<h2>Again</h2>
<div class="card"><pre>python examples/digits.py --epochs {epochs} --seed {seed}</pre></div>
<p><small>torch {torch}, CPU.</small></p>
</main>
</body>
</html>
"""


def write_html(cells: Table, model: nn.Module, results: list, path: Path, epochs: int, seed: int) -> None:
    """One file that needs nothing else: the picture is inside, for light and for dark."""
    dark = io.BytesIO()
    draw(model, results, dark, DARK)
    images = int(next(row[0] for row in cells if len(row) == 1).split()[2])
    introduction = (
        f"Trained on scikit-learn's digits in float32, then compressed with dkm for {epochs} epochs: once to "
        "4 values a layer, once to 16 vectors of 4 weights a layer. Layers under 10,000 weights take 8 bits."
    )
    path.write_text(
        PAGE.format(
            bits=" and ".join(f"{result.size.bits_per_weight:.0f}" for result in results) + " bits",
            introduction=html.escape(introduction),
            table=_html_table(cells),
            one=100 / images,
            light=_embedded(path.with_name("weights.png").read_bytes()),
            dark=_embedded(dark.getvalue()),
            layer=LAYER,
            plans="\n".join(map(_html_plan, results)),
            epochs=epochs,
            seed=seed,
            torch=torch.__version__,
        ),
        encoding="utf-8",
    )


def _embedded(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _html_table(cells: Table) -> str:
    head, *rows = cells
    width = len(head)
    lines = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"]
    for row in rows:
        if len(row) == 1:
            lines.append(f'<tr class="part"><th colspan="{width}">{html.escape(row[0])}</th></tr>')
        else:
            lines.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>")
    return "\n".join(lines)


def _html_plan(result) -> str:
    lines = [
        '<tr><th>tensor</th><th class="wide">shape</th><th>weights</th><th>bits/dim</th><th>bytes</th>'
        '<th class="why">why</th></tr>'
    ]
    for row in result.plan.rows:
        shape = "×".join(map(str, row.shape))
        fine = "keep" if row.bits is None else f"{row.bits}/{row.dim}"
        lines.append(
            f'<tr><td class="name">{html.escape(row.name)}</td><td class="wide">{shape}</td>'
            f"<td>{row.parameters:,}</td><td>{fine}</td><td>{-(-row.stored_bits // 8):,}</td>"
            f'<td class="why">{html.escape(row.reason)}</td></tr>'
        )
    return (
        f"<h2>The plan <code>{html.escape(result.text)}</code></h2>\n"
        f'<div class="card"><table>{"".join(lines)}</table></div>'
    )
