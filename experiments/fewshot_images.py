"""Few images without labels: ways to compress an ImageNet network with the command, side by side.

    python -m experiments.fewshot_images --model mobilenet_v2 --weights mobilenet_v2.safetensors --data train_a.tar \\
        --data train_b.tar --eval-data val.tar --plan all:3/1 --plan all:2/1 --out runs
    python -m experiments.fewshot_images --model resnet50 ... --plan "cv:6/6, fc:6/4" --out runs -- --autocast bf16

Makes a run of `dkm compress` for each plan and each way, in a folder of --out, and prints a line for each; runs that
are finished stay, and one that was stopped goes on.  A way is

    kmeans   k-means with re-estimated batch-norm statistics, no training
    distil   --teacher self: --images images in all, one after the other
    blocks   --reconstruct --passes times on as many images as make --images in all
    both     blocks, and then distil for a tenth as long, with a tenth of the learning rate

What follows `--` goes to the command, for all runs.  Whole epochs are at least one: give `distil` a multiple of the
number of training images.
"""

import argparse
import json
import sys
from pathlib import Path

from dkm.app import cli
from dkm.app.run_folder import RunFolder

WAYS = ("kmeans", "distil", "blocks", "both")


def flags(way: str, args: argparse.Namespace) -> list[str]:
    """The flags of the command that make the way."""
    epochs = max(1, args.images // args.count)
    distil = ["--epochs", str(epochs), "--lr", str(args.lr)]
    blocks = ["--reconstruct", str(args.passes), "--reconstruct-examples", str(args.images // args.passes)]
    return {
        "kmeans": ["--no-training"],
        "distil": ["--teacher", "self", *distil],
        "blocks": ["--teacher", "self", "--epochs", "0", *blocks],
        "both": ["--teacher", "self", *blocks, "--epochs", str(max(1, epochs // 10)), "--lr", str(args.lr / 10)],
    }[way]


def main(arguments: list[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    own, more = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(
        prog="python -m experiments.fewshot_images",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("model", "weights", "eval-data", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--data", action="append", required=True)
    parser.add_argument("--plan", action="append", required=True, dest="plans")
    parser.add_argument("--way", action="append", choices=WAYS, dest="ways")
    parser.add_argument("--count", type=int, default=3000, help="how many training images there are")
    parser.add_argument("--images", type=int, default=30_000, help="how many each way trains on, repetitions included")
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-4, help="of distil")
    args = parser.parse_args(own)
    common = ["--model", args.model, "--weights", args.weights, "--eval-data", args.eval_data]
    common += [word for path in args.data for word in ("--data", path)]
    for plan in args.plans:
        for way in args.ways or WAYS:
            folder = Path(args.out) / f"{way} {plan}".replace("/", "-")
            line = ["compress", *common, "--plan", plan, *flags(way, args), *more, "--out", str(folder), "--resume"]
            try:
                cli.main(line)
            except SystemExit as end:
                if end.code:
                    raise
            print(json.dumps(dict(way=way, plan=plan) | figures(folder)), flush=True)


def figures(folder: Path) -> dict[str, object]:
    result = RunFolder(folder).read_result()
    assert result is not None  # the command has ended well
    return {name: result.get(name) for name in ("accuracy_before", "accuracy_after", "bytes_file", "seconds", "blocks")}


if __name__ == "__main__":
    main()
