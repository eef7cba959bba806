"""From the arguments of the command line to tables; see the docstring of the package."""

import argparse
import json
from pathlib import Path

import torch

import benchmarks

from . import accuracy, coding, cuda, groups, init, memory, network, packed, speed
from .measure import DEVICES, environment

SECTIONS = dict(
    speed=speed,
    init=init,
    memory=memory,
    accuracy=accuracy,
    groups=groups,
    coding=coding,
    network=network,
    packed=packed,
    gpu=cuda,
)
OF_DEVICE = dict(
    cpu=["speed", "network", "packed", "groups", "coding", "init", "memory", "accuracy"],
    cuda=["accuracy", "network", "groups", "gpu"],
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=benchmarks.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small layers, few repeats: a smoke test")
    parser.add_argument("--only", choices=OF_DEVICE["cpu"], action="append", help="this section (may be repeated)")
    parser.add_argument("--device", choices=list(DEVICES), default="cpu")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for an initialisation (%(default)s)")
    parser.add_argument(
        "--file", type=Path, action="append", default=[], metavar="FILE.dkm", help="for coding (may be repeated)"
    )
    parser.add_argument(
        "--language-model", type=Path, metavar="FOLDER", help="for packed: a language model of transformers"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice; 1 with --quick)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers (seconds, bytes) here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads or (1 if arguments.quick else torch.get_num_threads()))

    machine = environment(arguments.device)
    print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, load {machine['load']}",
        f"dkm {machine['dkm']}, torch {machine['torch']}, numpy {machine['numpy']}, "
        f"coremltools {machine['coremltools']}, Python {machine['python']}, {machine['date']}",
        sep="\n",
        flush=True,
    )
    numbers: dict[str, object] = dict(environment=machine, quick=arguments.quick)
    for name in arguments.only or OF_DEVICE[arguments.device]:
        options = dict(
            init=dict(limit=arguments.patience),
            coding=dict(files=arguments.file),
            packed=dict(language_model=arguments.language_model),
        ).get(name, {})
        numbers[name] = rows = SECTIONS[name].run(arguments.device, arguments.quick, **options)
        print(f"\n{SECTIONS[name].text(rows)}", flush=True)
        if arguments.json:  # after every section, so that an interrupted run keeps its results
            arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
