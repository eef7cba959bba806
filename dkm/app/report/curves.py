"""Which curves the page has: of the training, and of the clustering (the paper's figures 8 and 9).

Histograms of the weights are in `ridges.py`, and bars of the sizes in `sizes.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .charts import Figure, Line, Points, chart
from .reader import Layers, Measured, Number, Run, number

LOOKS = ("b thin", "c thin", "d thin", "e thin")  # of the tensors that have a curve of their own


def training_figures(run: Run) -> list[Figure]:
    """Accuracy or perplexity, and loss."""
    measure = run.measure
    snapped = _points(run, [(r.step, r.snapped) for r in run.evaluations])
    soft = _points(run, [(r.step, r.soft) for r in run.evaluations])
    measured = [
        Line("train-time weights", "b", soft, measure.amount(soft[-1][1]) if soft else "", marks=True),
        Line("snapped, as in the file", "a", snapped, measure.amount(snapped[-1][1]) if snapped else "", marks=True),
    ]
    if run.before is not None and snapped:
        level = [(0.0, run.before), (run.time(run.last_step or 0), run.before)]
        measured.append(Line("before", "plain dashed", level, measure.amount(run.before)))
    note = "Train-time weights are averages of centroids; snapped ones are each weight’s nearest centroid."
    title = f"{measure.title.capitalize()}, {measure.axis}"
    charts = [
        chart(title, measured, run.unit, note, log=measure.lower_is_better and _is_wide(measured, times=3)),
        *_loss_charts(run),
    ]
    return [figure for figure in charts if figure is not None]


def _loss_charts(run: Run) -> list[Figure | None]:
    """The losses: those of a distillation are different quantities, and have an axis each."""
    trained = _points(run, [(r.step, r.loss) for r in run.steps])
    held = _points(run, [(r.step, r.loss) for r in run.evaluations])
    lines = [
        Line("training", "b", trained, _last(trained, ".3g")),
        Line("evaluation", "a", held, _last(held, ".3g"), marks=True),
    ]
    if not run.is_taught:
        return [chart("Loss", lines, run.unit, log=_is_wide(lines))]
    labels = ", and from the labels" if number(run.config.get("label-share")) else ""
    notes = (
        f"How far the answers are from those of the uncompressed network{labels}.",
        "The mean negative log likelihood of the labels, with snapped weights.",
    )
    return [
        chart(f"{line.label.capitalize()} loss", [line], run.unit, note, log=_is_wide([line]))
        for line, note in zip(lines, notes, strict=True)
    ]


def _is_wide(lines: list[Line], times: float = 30) -> bool:
    """Whether the values lie so far apart that a linear axis would hide the smaller ones."""
    values = [y for line in lines for _, y in line.points]
    return bool(values) and min(values) > 0 and max(values) > times * min(values)


@dataclass(frozen=True)
class _Quantity:
    """A number that is measured for every clustered tensor."""

    of: Callable[[Measured], Number]
    whole: Callable[[Layers], Number]  # of the whole network
    label: str  # of the whole network
    form: str  # of the values in the legend
    factor: float = 1  # 100 for percent


def clustering_figures(run: Run) -> list[Figure]:
    """How the clustering goes, for some tensors and for the whole network."""
    records = [record for record in run.layers if record.tensors]
    if len(records) < 2:
        return []
    names = list(records[-1].tensors)
    is_one = len(names) == 1
    together, average = (names[0], names[0]) if is_one else ("all layers together", "mean of all layers")
    band = "" if is_one else " Shaded: from the lowest layer to the highest."

    def iterations(measured: Measured) -> Number:
        return measured.iterations or None  # 0 is that nothing was clustered yet, at the start of a training

    def tau(measured: Measured) -> Number:
        return measured.tau

    gap = _Quantity(lambda m: m.gap, lambda r: r.gap, together, ".2g", 100)
    changed = _Quantity(lambda m: m.changed, lambda r: r.changed, together, ".2g", 100)
    charts = [
        chart(
            "Snap gap, %", _lines(run, records, names, gap), run.unit,
            "By how much snapping changes the weights: |train-time − snapped| / |train-time|." + band, log=True,
        ),
        chart(
            "Iterations", _lines(run, records, names, _mean_of(iterations, average, ".3g")), run.unit,
            "How many rounds of clustering a training step took before the centroids stood still." + band,
            from_zero=True,
        ),
        chart(
            "Codes that changed, %", _lines(run, records, names, changed), run.unit,
            "Vectors whose nearest centroid is another one than at the record before." + band, from_zero=True,
        ),
        chart(
            "Temperature", _lines(run, records, names, _mean_of(tau, average, ".2g")), run.unit,
            "tau: how softly weights are shared between centroids." + band, log=True,
        ),
    ]  # fmt: skip
    return [figure for figure in charts if figure is not None]


def _mean_of(of: Callable[[Measured], Number], label: str, form: str) -> _Quantity:
    """A quantity whose value for the whole network is the mean over its tensors."""

    def mean(record: Layers) -> Number:
        values = _values(record, of)
        return sum(values) / len(values) if values else None

    return _Quantity(of, mean, label, form)


def _lines(run: Run, records: list[Layers], names: list[str], quantity: _Quantity) -> list[Line]:
    """Up to four tensors, spread over the network, and over them the whole network with its range."""
    factor, drawn = quantity.factor, []
    chosen = [names[round(i * (len(names) - 1) / 3)] for i in range(4)] if len(names) > 4 else names
    for name, look in zip(chosen, LOOKS, strict=False) if len(names) > 1 else ():
        own = [(r.step, quantity.of(r.tensors[name]) if name in r.tensors else None) for r in records]
        points = _points(run, own, factor)
        drawn.append(Line(name, look, points, _last(points, quantity.form)))
    whole = _points(run, [(r.step, quantity.whole(r)) for r in records], factor)
    band: tuple[Points, Points] = ([], [])
    if len(names) > 1:
        spread = [(run.time(r.step), values) for r in records if (values := _values(r, quantity.of))]
        band = (
            [(x, min(values) * factor) for x, values in spread],
            [(x, max(values) * factor) for x, values in spread],
        )
    return [*drawn, Line(quantity.label, "a", whole, _last(whole, quantity.form), band=band)]


def _values(record: Layers, of: Callable[[Measured], Number]) -> list[float]:
    return [value for value in map(of, record.tensors.values()) if value is not None]


def _points(run: Run, values: list[tuple[int, Number]], factor: float = 1) -> Points:
    """(step, value) pairs -> points of a curve; without those that have no value."""
    return [(run.time(step), value * factor) for step, value in values if value is not None]


def _last(points: Points, form: str) -> str:
    return format(points[-1][1], form) if points else ""
