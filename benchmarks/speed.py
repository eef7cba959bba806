"""Milliseconds of the forward and backward pass of one layer."""

from collections.abc import Callable

from .contenders import Result, Step, Unavailable, coremltools, has_coremltools, ours, tuned, unrolled
from .measure import MIB, Layer, OutOfMemory, alternate, available_memory, memory_limit, relative
from .table import digits, note, ratio, table

CONFIGURATIONS = [(2, 1), (3, 1), (4, 1), (8, 1), (4, 4), (5, 8), (8, 8), (8, 16)]
ITERATIONS = 5
QUICK_CONFIGURATIONS = [(4, 1), (8, 1), (5, 8)]
SIZE, QUICK_SIZE = 768 * 768, 64 * 64
ROUNDS, SLOW = 9, 3.0  # what takes more than SLOW seconds runs only twice


def run(device: str, quick: bool) -> list[dict]:
    contenders: dict[str, Callable[[Layer, int], Step]] = dict(ours=ours, unrolled=unrolled, tuned=tuned)
    if has_coremltools():
        contenders["coremltools"] = coremltools
    size = QUICK_SIZE if quick else SIZE
    rows = []
    for bits, dim in QUICK_CONFIGURATIONS if quick else CONFIGURATIONS:
        note(f"speed {bits}/{dim}")
        rows.append(_row(Layer.make(size, bits, dim, device), contenders, device, 3 if quick else ROUNDS))
    return rows


def _row(layer: Layer, contenders: dict[str, Callable], device: str, rounds: int) -> dict:
    """The seconds of each contender, or the reason why it has none; and how far the results are apart."""
    row = dict(bits=layer.bits, dim=layer.dim, size=layer.W.numel(), iterations=ITERATIONS, tau=layer.tau)
    available = available_memory() if device == "cpu" else None
    limit = None if available is None else int(0.85 * available)
    steps: dict[str, Step] = {}
    results: dict[str, Result] = {}
    for name, contender in contenders.items():
        try:
            with memory_limit(limit):
                step = contender(layer, ITERATIONS)
                results[name] = step()  # the warm-up
            steps[name] = step
        except Unavailable as reason:
            row[name] = str(reason)
        except OutOfMemory:
            row[name] = f"over {limit // MIB:,} MiB"
    _check_same(layer)
    for part in ("W_tilde", "dW"):
        row[f"{part}_difference"] = _difference(layer, results, part)
    if "coremltools" in results:
        # coremltools defines W_tilde differently; its centroids are the same except for its clamp
        row["centroid_difference"] = relative(results["coremltools"].C, results["ours"].C)
        assert row["centroid_difference"] < 0.05, f"{layer.name}: coremltools clustered something else"
    del results
    with memory_limit(limit):
        row |= alternate(steps, device, rounds, SLOW)
    return row


def _check_same(layer: Layer) -> None:
    """Check that dkm and autograd agree in float64, so that every difference in float32 is rounding."""
    small = Layer.make(min(layer.W.numel(), 192 * 192), layer.bits, layer.dim, str(layer.W.device)).double()
    truth = ours(small, ITERATIONS)()
    for contender in (unrolled, tuned):
        differences = [relative(*pair) for pair in zip(contender(small, ITERATIONS)(), truth, strict=True)]
        assert max(differences) < 1e-8, f"{layer.name}: {contender.__name__} is something else, {differences}"


def _difference(layer: Layer, results: dict[str, Result], part: str) -> float | None:
    """The larger of the two relative differences in float32 between dkm and autograd."""
    others = [results[name] for name in ("unrolled", "tuned") if name in results]
    if not others:
        return None
    largest = max(relative(getattr(other, part), getattr(results["ours"], part)) for other in others)
    # More than 1e-7, because logits of 1e4 and more leave few digits to the attention, and A^T W sums over all weights.
    assert largest < (2e-3 if part == "W_tilde" else 2e-2), f"{layer.name}: {part} differs by {largest:.1e}"
    return largest


def text(rows: list[dict]) -> str:
    others = ["unrolled", "tuned"] + ["coremltools"] * any("coremltools" in row for row in rows)
    header = ["b/d", "ours"] + [column for name in others for column in (name, "x ours")] + ["W~ diff", "dW diff"]
    cells = []
    for row in rows:
        line = [f"{row['bits']}/{row['dim']}", digits(1000 * row["ours"])]
        for name in others:
            time = row[name]
            line += [digits(1000 * time) if isinstance(time, float) else time, ratio(time, row["ours"])]
        differences = [row["W_tilde_difference"], row["dW_difference"]]
        cells.append(line + ["" if value is None else f"{value:.0e}" for value in differences])
    lines = [
        f"### Speed: forward + backward of {rows[0]['size']:,} float32 weights, {ITERATIONS} iterations",
        "",
        table(header, cells),
        "",
        "Milliseconds, medians of alternating repeats.  unrolled: plain autograd, distances by a matrix",
        "product; tuned: the same, as fast as we could write it in autograd.  diff: relative difference",
        "between ours and those two, the larger one: rounding (a small layer in float64 agrees to 1e-8).",
    ]
    if "coremltools" in others:
        apart = max(row.get("centroid_difference", 0.0) for row in rows)
        lines += [
            "coremltools: its FakePalettize module alone, with the same vectors, centroids, tau and number of",
            f"iterations; its centroids after those differ from ours by {apart:.0e} at most (it clamps attention).",
        ]
    else:
        lines.append("coremltools is not installed, so its column is missing (pip install coremltools).")
    return "\n".join(lines)
