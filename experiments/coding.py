"""What entropy coding saves on trained networks.

    python -m experiments.coding --file run/model.dkm
    python -m experiments.coding --model resnet50 --weights resnet50.safetensors --plan "cv:6/6, fc:6/4" --out run.dkm

The weights are those of a .dkm file, or are clustered by k-means and not trained any further.  The table has the bytes
of the codes, packed and entropy-coded, and of the two files.  "entropy + tables" is the sum of what every tensor's
codes take at their entropy and of the table of counts that says so, also where the codes are packed because that is
less.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

import dkm
from benchmarks.table import table as as_text
from dkm.app.models import build
from dkm.formats.container import from_bytes, stored_arrays
from dkm.formats.describe import describe
from dkm.formats.described import Codes, Described
from dkm.formats.dkm_file import decode, encode_all, read_tensors
from dkm.formats.entropy import code_bytes, table
from dkm.formats.usage import usage

HEADER = ["plan or file", "packed", "coded", "entropy + tables", "coded / that", "coded tensors"]
HEADER += ["file, packed", "file, coded"]


def measure(tensors: Sequence[Described], out: Path | None = None) -> dict[str, int]:
    """Figures in bytes.  The two files must hold the same weights."""
    clustered = [each for each in tensors if isinstance(each.content, Codes)]
    counted = {each.name: usage(each) for each in clustered}
    files = {coding: encode_all(tensors, coding) for coding in ("packed", "entropy")}
    first, second = (decode(data) for data in files.values())
    assert all(torch.equal(first[name], second[name]) for name in first)
    if out is not None:
        out.write_bytes(files["entropy"])
    arrays = stored_arrays(from_bytes(files["entropy"], "the file"))
    coded = {name: len(arrays[f"codes/{name}"].data) for name in counted}
    taken = {each.name: code_bytes(each, counted[each.name]) for each in clustered}
    return dict(
        packed=sum(each.packed for each in taken.values()),
        coded=sum(coded.values()),
        entropy=sum(each.bound for each in taken.values()),
        tables=sum(len(table(own.by_count.tolist())) for own in counted.values()),
        tensors=len(taken),
        smaller=sum(coded[name] < each.packed for name, each in taken.items()),
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
    parser.add_argument("--file", type=Path, help="a .dkm file, in either coding, instead of a model")
    parser.add_argument("--model", help="as for dkm compress: a name, or a folder of transformers")
    parser.add_argument("--weights", help="a file, as for dkm compress; none for random ones")
    parser.add_argument("--plan")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the entropy-coded file here")
    given = parser.parse_args(arguments)
    if (given.file is None) == (given.model is None) or (given.model is None) != (given.plan is None):
        parser.error("give either --file, or --model with --plan")
    if given.file is not None:
        print(text(given.file.name, measure(list(read_tensors(given.file)), given.out)))
        return
    model = build(given.model, given.weights, None).model
    dkm.compress_(model, given.plan, tau=1.0)
    print(text(f"`{given.plan}`", measure(list(describe(model)), given.out)))


if __name__ == "__main__":
    main()
