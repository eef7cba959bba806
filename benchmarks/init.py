"""Seconds until the first centroids are there, and how good they are."""

import statistics

import torch

import dkm
from dkm.modelling.clustered import squared_error

from .contenders import Unavailable, coremltools_init, has_coremltools
from .measure import OutOfMemory, OutOfPatience, available_memory, memory_limit, patience, seconds, weights
from .table import digits, note, ratio, table

# size, bits, dim, and coremltools' option kmeans_init
CASES = [
    (384 * 384, 4, 1, "auto"),
    (384 * 384, 4, 1, "opt1d"),
    (384 * 384, 8, 8, "auto"),
    (768 * 768, 8, 8, "auto"),
]
QUICK_CASES = [(64 * 64, 4, 1, "auto"), (64 * 64, 4, 1, "opt1d"), (64 * 64, 6, 8, "auto")]


def run(device: str, quick: bool, limit: float) -> list[dict]:
    """Measure every configuration; a contender is stopped after `limit` seconds."""
    rows = []
    for size, bits, dim, init in QUICK_CASES if quick else CASES:
        note(f"init {bits}/{dim}, {size:,} weights, coremltools's {init}")
        rows.append(_row(weights(size).to(device), bits, dim, init, device, limit))
    return rows


def _row(W: torch.Tensor, bits: int, dim: int, init: str, device: str, limit: float) -> dict:
    row = dict(size=W.numel(), bits=bits, dim=dim, init=init, patience=limit)
    V = W.view(-1, dim)
    C = dkm.init_centroids(V, 2**bits)
    row["ours"] = statistics.median(seconds(lambda: dkm.init_centroids(V, 2**bits), device) for _ in range(3))
    row["ours_error"] = float(squared_error(V, C))
    if not has_coremltools():
        return row
    available = available_memory() if device == "cpu" else None
    torch.manual_seed(0)
    try:
        start, found = coremltools_init(W, bits, dim, init), []
        with patience(limit), memory_limit(None if available is None else int(0.85 * available)):
            row["coremltools"] = seconds(lambda: found.append(start()), device)
        row["coremltools_error"] = float(squared_error(V, found[0]))
    except Unavailable as reason:
        row["coremltools"] = str(reason)
    except OutOfPatience:
        row["coremltools"] = f"> {digits(limit)}, stopped"
    except OutOfMemory:
        row["coremltools"] = "out of memory"
    return row


def text(rows: list[dict]) -> str:
    header = ["b/d", "weights", "ours, s", "error", "coremltools, s", "error", "coremltools/ours"]
    cells = []
    for row in rows:
        name = f"{row['bits']}/{row['dim']}" + (f" ({row['init']})" if row["init"] != "auto" else "")
        theirs = row.get("coremltools", "not installed")
        times = f"> {ratio(row['patience'], row['ours'])}" if "stopped" in str(theirs) else ratio(theirs, row["ours"])
        shown = digits(theirs) if isinstance(theirs, float) else theirs
        error = f"{row['coremltools_error']:.2e}" if "coremltools_error" in row else ""
        cells.append(
            [name, f"{row['size']:,}", digits(row["ours"]), f"{row['ours_error']:.2e}", shown, error, times],
        )
    return "\n".join(
        [
            "### Initialisation",
            "",
            table(header, cells),
            "",
            "Seconds.  error: mean squared distance to the nearest centroid, per weight.  coremltools: its",
            'default, kmeans_init="auto", is k-means++ (best of 10); "opt1d" is its exact method for d = 1.',
        ]
    )
