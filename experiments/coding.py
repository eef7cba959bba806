"""What entropy coding saves on trained networks.

    python -m experiments.coding --model resnet50 --weights resnet50.safetensors --plan "cv:6/6, fc:6/4" --out run.dkm

The weights are clustered by k-means and not trained any further.  The table has the bytes of the codes, packed and
entropy-coded, and of the two files.  "entropy + tables" is the sum of what every tensor's codes take at their entropy
and of the table of counts that says so, also where the codes are packed because that is less.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import dkm
from benchmarks.table import table as as_text
from dkm.app.models import build
from dkm.formats.describe import describe
from dkm.formats.described import Codes
from dkm.formats.dkm_file import decode, encode
from dkm.formats.entropy import table
from dkm.formats.usage import usage

HEADER = ["plan", "packed", "coded", "entropy + tables", "coded / that", "coded tensors", "file, packed", "file, coded"]


def measure(model: nn.Module, plan: str, out: Path | None = None) -> dict[str, int]:
    """Compress the model in place; figures in bytes.  The two files must hold the same weights."""
    dkm.compress_(model, plan, tau=1.0)
    tables = sum(
        len(table(usage(each).by_count.tolist())) for each in describe(model) if isinstance(each.content, Codes)
    )
    size, files = (
        dkm.size(model, coding="entropy"),
        {coding: encode(model, coding=coding) for coding in ("packed", "entropy")},
    )
    first, second = (decode(data) for data in files.values())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert size.file_bytes == len(files["entropy"])
    if out is not None:
        out.write_bytes(files["entropy"])
    codes = size.codes.values()
    return dict(
        packed=sum(each.packed for each in codes),
        coded=sum(each.coded for each in codes),
        entropy=sum(each.bound for each in codes),
        tables=tables,
        tensors=len(codes),
        smaller=sum(each.coded < each.packed for each in codes),
        file_packed=len(files["packed"]),
        file_coded=len(files["entropy"]),
    )


def text(plan: str, row: dict[str, int]) -> str:
    """The figures as a table of one line."""
    least = row["entropy"] + row["tables"]
    cells = [
        plan,
        *(f"{row[key]:,}" for key in ("packed", "coded")),
        f"{row['entropy']:,} + {row['tables']:,}",
        f"{row['coded'] / least:.4f}",
        f"{row['smaller']} of {row['tensors']}",
        *(f"{row[key]:,}" for key in ("file_packed", "file_coded")),
    ]
    return as_text(HEADER, [cells])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.coding", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="as for dkm compress: a name, or a folder of transformers")
    parser.add_argument("--weights", help="a file, as for dkm compress; none for random ones")
    parser.add_argument("--plan", required=True)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the entropy-coded file here")
    given = parser.parse_args(arguments)
    model = build(given.model, given.weights, None).model
    print(text(f"`{given.plan}`", measure(model, given.plan, given.out)))


if __name__ == "__main__":
    main()
