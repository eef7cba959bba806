"""The error of float32: W_tilde and dW against the reference implementation in float64."""

import statistics

from .contenders import Result, ours, unrolled
from .measure import Layer, relative
from .speed import CONFIGURATIONS, QUICK_CONFIGURATIONS
from .table import note, table

ITERATIONS = 5
SIZE, QUICK_SIZE = dict(cpu=192 * 192, cuda=768 * 768), 96 * 96  # the attention in float64 must fit the memory
DRAWS = 3  # of weights, centroids and gradients: with few vectors per centroid, one draw says little


def run(device: str, quick: bool) -> list[dict]:
    rows = []
    for bits, dim in QUICK_CONFIGURATIONS if quick else CONFIGURATIONS:
        note(f"accuracy {bits}/{dim}")
        size = QUICK_SIZE if quick else SIZE[device]
        errors = dict(ours=[], unrolled=[])
        for seed in range(1 if quick else DRAWS):
            layer = Layer.make(size, bits, dim, device, seed)
            truth = ours(layer.double(), ITERATIONS, impl="reference")()
            errors["ours"].append(_errors(ours(layer, ITERATIONS)(), truth))
            errors["unrolled"].append(_errors(unrolled(layer, ITERATIONS)(), truth))
        medians = {name: _medians(several) for name, several in errors.items()}
        rows.append(dict(bits=bits, dim=dim, size=size, iterations=ITERATIONS, draws=errors, **medians))
    return rows


def _errors(result: Result, truth: Result) -> dict[str, float]:
    return dict(W_tilde=relative(result.W_tilde, truth.W_tilde), dW=relative(result.dW, truth.dW))


def _medians(errors: list[dict[str, float]]) -> dict[str, float]:
    return {part: statistics.median(error[part] for error in errors) for part in errors[0]}


def text(rows: list[dict]) -> str:
    header = ["b/d", "W~ ours", "W~ unrolled", "dW ours", "dW unrolled"]
    cells = [
        [f"{row['bits']}/{row['dim']}"]
        + [f"{row[name][part]:.1e}" for part in ("W_tilde", "dW") for name in ("ours", "unrolled")]
        for row in rows
    ]
    return "\n".join(
        [
            f"### Accuracy: {rows[0]['size']:,} float32 weights, {ITERATIONS} iterations, "
            f"{len(rows[0]['draws']['ours'])} draws",
            "",
            table(header, cells),
            "",
            "Relative error (of norms) against the same inputs computed in float64: the median.",
        ]
    )
