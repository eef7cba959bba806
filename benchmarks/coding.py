"""Entropy coding: what the codes of normally distributed weights take, of given files, and how fast they are coded.

Speed is in seconds of the processor, which a busy machine changes less than those of the clock.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import dkm
from dkm.formats.describe import describe
from dkm.formats.described import Codes, Described
from dkm.formats.dkm_file import read_tensors
from dkm.formats.entropy import code_bytes, decode, encode
from dkm.formats.usage import usage

from .measure import weights
from .table import digits, note, table

PLANS = ["2", "3", "4", "6", "8", "4/4", "8/8", "3 per 8x64"]
SHAPE, QUICK_SHAPE = (2048, 2048), (64, 256)


def run(device: str, quick: bool, files: Iterable[Path] = ()) -> list[dict]:
    rows = []
    for plan in PLANS:
        note(f"coding {plan}")
        rows.append(_measure(plan, _normal(plan, QUICK_SHAPE if quick else SHAPE)))
    for path in files:
        note(f"coding {path.name}")
        rows.append(_measure(path.stem, (each for each in read_tensors(path) if isinstance(each.content, Codes))))
    return rows


def _normal(plan: str, shape: tuple[int, int]) -> list[Described]:
    layer = nn.Linear(*reversed(shape), bias=False)
    with torch.no_grad():
        layer.weight.copy_(weights(layer.weight.numel()).view(shape))
    dkm.compress_(nn.Sequential(layer), f"0:{plan}", tau=1.0)
    return list(describe(layer))


def _measure(name: str, tensors: Iterable[Described]) -> dict:
    """Sums over the tensors; of those that stay packed, only the bytes are counted."""
    row = dict(name=name, codes=0, packed=0, coded=0, bound=0, timed=0, encode=0.0, decode=0.0)
    for each in tensors:
        n, taken = each.grouping.codes, code_bytes(each, usage(each))
        start = time.process_time()
        found = encode(each)
        row["encode"] += time.process_time() - start if found is not None else 0.0
        row["codes"] += n
        row["packed"] += taken.packed
        row["coded"] += taken.packed if found is None else len(found.data)
        row["bound"] += taken.bound
        if found is not None:
            start = time.process_time()
            packed = decode(found.data.numpy(), each.content.bits, n)
            row["decode"] += time.process_time() - start
            row["timed"] += taken.packed
            again = replace(each, content=replace(each.content, packed=packed, centroids=found.centroids))
            assert torch.equal(again.values(), each.values()), f"{name}: {each.name} differs"
    return row


def text(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        speeds = [f"{digits(row['timed'] / row[way] / 1e6)}" if row["timed"] else "" for way in ("encode", "decode")]
        sizes = [f"{row[key]:,}" for key in ("packed", "coded", "bound")]
        cells.append(
            [row["name"], f"{row['codes'] / 1e6:.2f} M", *sizes, f"{row['coded'] / row['bound']:.4f}", *speeds]
        )
    header = ["plan or file", "codes", "packed", "coded", "entropy", "coded / entropy", "encode MB/s", "decode MB/s"]
    return "### Entropy coding: bytes of codes, and MB of packed codes per second of the processor\n\n" + table(
        header, cells
    )
