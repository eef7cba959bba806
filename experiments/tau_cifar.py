"""Temperatures compared on CIFAR-10: ResNet-20 (91.73 % uncompressed), first and last layer kept.

    python -m experiments.tau_cifar --data cifar10 --weights resnet20.safetensors --out results.jsonl \\
        --run 2/1:auto:0 --run 2/1:1e-3:0 --run 4/4:learn:0 --run 1/1:geometric:3:0.05:1

A run is BITS/DIM:TAU:SEED.  TAU is auto, learn, a number (a fixed temperature), geometric:HOT:COLD, linear:HOT:COLD,
cosine:HOT:COLD or constant:MULTIPLE.  The accuracy is that of the snapped network.  `experiments.cifar` says what
--data, --weights and --out are.
"""

from dataclasses import dataclass

import torch

import dkm

from . import cifar


@dataclass(frozen=True, kw_only=True)
class Run(cifar.Run):
    tau: str

    @classmethod
    def parse(cls, text: str, **options) -> "Run":
        plan, _, rest = text.partition(":")
        tau, _, seed = rest.rpartition(":")
        if not plan or not tau or not seed.isdigit():
            raise ValueError(f"'{text}' is not a run, BITS/DIM:TAU:SEED, for example 4/4:auto:0")
        dkm.temperature.parse(tau)
        return cls(plan=plan, tau=tau, seed=int(seed), **options)


def main(arguments: list[str] | None = None) -> None:
    parser = cifar.arguments("tau_cifar", __doc__, "BITS/DIM:TAU:SEED")
    args = parser.parse_args(arguments)
    runs = cifar.runs(parser, args, Run.parse)
    torch.backends.cudnn.benchmark = True
    data = cifar.Cifar10.load(args.data, args.device)

    def work(run: Run) -> dict:
        model = cifar.load_model(args.weights, args.device)
        # a pattern, because `cv` would give the small layers 8 bits
        tau, steps = dkm.temperature.parse(run.tau), run.steps(data)
        dkm.compress_(
            model, f"layer*:{run.plan}", tau=tau, steps=steps, eps=run.eps, max_iter=run.max_iter, seed=run.seed
        )
        iterations = cifar.fit(model, data, run)
        return dict(accuracy=round(data.accuracy(model), 2), iterations=round(iterations, 2))

    cifar.carry_out(runs, args.out, work)


if __name__ == "__main__":
    main()
