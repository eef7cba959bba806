"""The error of float32: W_tilde and dW against the reference implementation in float64."""

from .contenders import Result, ours, unrolled
from .measure import Layer, relative
from .speed import CONFIGURATIONS, QUICK_CONFIGURATIONS
from .table import note, table

ITERATIONS = 5
SIZE, QUICK_SIZE = 192 * 192, 96 * 96


def run(device: str, quick: bool) -> list[dict]:
    rows = []
    for bits, dim in QUICK_CONFIGURATIONS if quick else CONFIGURATIONS:
        note(f"accuracy {bits}/{dim}")
        layer = Layer.make(QUICK_SIZE if quick else SIZE, bits, dim, device)
        truth = ours(layer.double(), ITERATIONS, impl="reference")()
        row = dict(bits=bits, dim=dim, size=layer.W.numel(), iterations=ITERATIONS, tau=layer.tau)
        row["ours"] = _errors(ours(layer, ITERATIONS)(), truth)
        row["unrolled"] = _errors(unrolled(layer, ITERATIONS)(), truth)
        rows.append(row)
    return rows


def _errors(result: Result, truth: Result) -> dict[str, float]:
    return dict(W_tilde=relative(result.W_tilde, truth.W_tilde), dW=relative(result.dW, truth.dW))


def text(rows: list[dict]) -> str:
    header = ["b/d", "W~ ours", "W~ unrolled", "dW ours", "dW unrolled"]
    cells = [
        [f"{row['bits']}/{row['dim']}"]
        + [f"{row[name][part]:.1e}" for part in ("W_tilde", "dW") for name in ("ours", "unrolled")]
        for row in rows
    ]
    return "\n".join(
        [
            f"### Accuracy: {rows[0]['size']:,} float32 weights, {ITERATIONS} iterations",
            "",
            table(header, cells),
            "",
            "Relative error (of norms) against the same inputs computed in float64.",
        ]
    )
