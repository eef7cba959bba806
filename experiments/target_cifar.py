"""Plans chosen for a size compared with uniform plans up to that size: CIFAR-10, ResNet-20 (91.73 % uncompressed).

    python -m experiments.target_cifar --data cifar10 --weights resnet20.safetensors --uniform 40KiB
    python -m experiments.target_cifar --data cifar10 --weights resnet20.safetensors --out results.jsonl \\
        --run size=40KiB:0 --run "layer*:4/4:0" --run "*:4/4:0" --run size=40KiB,rounds=0:0

The first command lists the uniform plans of at most 40 KiB, beginning with those that cost least before training, which
are the ones to train.  `*:b/d` clusters every weight, `layer*:b/d` keeps the first and the last layer in 16 bits, and
`all:b/d` follows the rule for small tensors (8/1 below 10,000 weights), which here makes 65 KiB of layers.

A run is PLAN:SEED.  PLAN is the text of a plan, or size=SIZE, as the paper counts, to choose one with 1,024 training
images without labels, by measuring each tensor; `,rounds=0` leaves out the step that measures the whole choice.
Several runs of one size choose the plan once.  The accuracies are those of the snapped network, as it is and with
re-estimated batch-norm statistics.  `experiments.cifar` says what --data, --weights and --out are.

The training is that of `experiments.tau_cifar`, with tau="auto".
"""

import json
import time
from dataclasses import dataclass
from functools import cache

import torch

import dkm
from dkm.plans.bench import Loss
from dkm.plans.candidates import CANDIDATES, as_spec
from dkm.plans.language import parse_size

from . import cifar

FORMS = ("*", "layer*", "all")


@dataclass(frozen=True, kw_only=True)
class Run(cifar.Run):
    @classmethod
    def parse(cls, text: str, **options) -> "Run":
        plan, _, seed = text.rpartition(":")
        if not plan or not seed.isdigit():
            raise ValueError(f"'{text}' is not a run, PLAN:SEED, for example size=40KiB:0 or *:4/4:0")
        run = cls(plan=plan, seed=int(seed), **options)
        parse_size(run.size[0]) if run.size else dkm.plan(cifar.ResNet(), plan)
        return run

    @property
    def size(self) -> tuple[str, int] | None:
        """The size to choose a plan for, and the number of rounds, if the run chooses its plan."""
        if not self.plan.startswith("size="):
            return None
        size, _, rounds = self.plan.removeprefix("size=").partition(",rounds=")
        return size, int(rounds or 2)


def main(arguments: list[str] | None = None) -> None:
    parser = cifar.arguments("target_cifar", __doc__, "PLAN:SEED")
    parser.add_argument("--uniform", metavar="SIZE", help="list the uniform plans of at most this size, and end")
    args = parser.parse_args(arguments)
    runs = cifar.runs(parser, args, Run.parse)
    try:
        largest = parse_size(args.uniform) if args.uniform else 0
    except ValueError as error:
        parser.error(str(error))
    torch.backends.cudnn.benchmark = True
    data = cifar.Cifar10.load(args.data, args.device)

    def make_model() -> torch.nn.Module:
        return cifar.load_model(args.weights, args.device)

    original = make_model()
    images = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))[:1024].to(args.device)
    batches = [data.normalize(data.x[part][:, 4:36, 4:36]) for part in images.split(256)]
    loss = dkm.divergence(original, batches)

    if args.uniform:
        for record in sorted(uniform(make_model, loss, largest), key=lambda record: record["divergence"]):
            print(json.dumps(record), flush=True)
        return

    @cache
    def choose(size: str, rounds: int) -> dkm.Plan:
        began = time.perf_counter()
        measured: Loss = lambda model: loss(model)  # noqa: E731  # without derivatives, as all figures were measured
        plan = dkm.plan(original, size=f"{size} paper", loss=measured, rounds=rounds, candidates=CANDIDATES)
        print(plan, f"chosen in {time.perf_counter() - began:.0f} s", sep="\n", flush=True)
        return plan

    def work(run: Run) -> dict:
        plan = choose(*run.size) if run.size else dkm.plan(original, run.plan)
        model = make_model()
        dkm.compress_(model, plan, steps=run.steps(data), eps=run.eps, max_iter=run.max_iter, seed=run.seed)
        divergence = round(float(loss(model)), 4)  # before training
        iterations = cifar.fit(model, data, run)
        accuracy = data.accuracy(model)
        dkm.recalibrate_(model, data.random_batches(20, 500, run.seed))
        return dict(
            bytes=plan.bytes,
            text=plan.text,
            divergence=divergence,
            accuracy=round(accuracy, 2),
            iterations=round(iterations, 2),
            recalibrated=round(data.accuracy(model), 2),
        )

    cifar.carry_out(runs, args.out, work)


def uniform(make_model, loss: Loss, largest: int):
    """Every uniform plan of at most `largest` bytes, with its size and its loss before training."""
    for form in FORMS:
        for candidate in CANDIDATES:
            text, model = f"{form}:{as_spec(candidate).label}", make_model()
            plan = dkm.plan(model, text)
            if plan.bytes <= largest:
                dkm.compress_(model, plan, tau=1.0)
                yield dict(plan=text, bytes=plan.bytes, divergence=round(float(loss(model)), 4))


if __name__ == "__main__":
    main()
