"""Few images without labels: ways to compress ResNet-20 on CIFAR-10 (91.73 % uncompressed), first and last layer kept.

    python -m experiments.fewshot_cifar --data cifar10 --weights resnet20.safetensors --out results.jsonl \\
        --run kmeans:4/4:0 --run distil:4/4:0 --run blocks:4/4:0 --run both:4/4:0

A run is WAY:BITS/DIM:SEED.  All ways see --images training images, augmented, and pass over them --epochs times:

    kmeans   not at all
    distil   the whole network learns the answers of the uncompressed one (`dkm.distill`), with --lr
    blocks   block by block (`dkm.reconstruct_`), with three times --lr
    both     block by block, and then the whole network at the cold end of the schedule, for a fifth of the epochs, with
             a tenth of --lr

In the end all of them have batch-norm statistics re-estimated on three versions of the images.  The accuracy is that of
the snapped network on the test images or, with --held-out, on 2,000 other training images, to choose settings with
(the network was trained with these, so it is higher).  `experiments.cifar` says what --data, --weights and --out are.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import dkm

from . import cifar

WAYS = ("kmeans", "distil", "blocks", "both")
HELD_OUT = 2_000  # training images to choose settings with, which no run trains on


@dataclass(frozen=True, kw_only=True)
class Run(cifar.Run):
    way: str
    images: int = 1000
    held_out: bool = False

    @classmethod
    def parse(cls, text: str, **options) -> "Run":
        way, _, rest = text.partition(":")
        plan, _, seed = rest.rpartition(":")
        if way not in WAYS or not plan or not seed.isdigit():
            raise ValueError(
                f"'{text}' is not a run, WAY:BITS/DIM:SEED, for example blocks:4/4:0; WAY is one of {WAYS}"
            )
        return cls(way=way, plan=plan, seed=int(seed), **options)


def main(arguments: list[str] | None = None) -> None:
    parser = cifar.arguments("fewshot_cifar", __doc__, "WAY:BITS/DIM:SEED")
    parser.set_defaults(epochs=8, batch=50, optimizer="adam")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--held-out", action="store_true")
    args = parser.parse_args(arguments)
    more = dict(images=args.images, held_out=args.held_out)
    runs = [replace(run, **more) for run in cifar.runs(parser, args, Run.parse)]
    data = cifar.Cifar10.load(args.data, args.device)
    cifar.carry_out(runs, args.out, lambda run: dict(accuracy=round(compressed(run, args, data), 2)))


def compressed(run: Run, args, data: cifar.Cifar10) -> float:
    """The accuracy of the compressed network."""
    few = Few(run, data)
    model = cifar.load_model(args.weights, args.device)
    teacher = dkm.teacher(model)
    steps = max(1, round(run.epochs * len(few)))
    # a pattern, because `cv` would give the small layers 8 bits
    dkm.compress_(model, f"layer*:{run.plan}", steps=steps, eps=run.eps, max_iter=run.max_iter, seed=run.seed)
    if run.way in ("blocks", "both"):
        dkm.reconstruct_(model, teacher, few.batches(1), epochs=math.ceil(run.epochs), lr=3 * run.lr)
    if run.way == "distil":
        distil(model, teacher, few, run.lr, steps)
    if run.way == "both":
        distil(model, teacher, few, run.lr / 10, -(-steps // 5))
    dkm.recalibrate_(model, few.batches(3))
    return data.accuracy(model) if not run.held_out else few.held_out_accuracy(model)


class Few:
    """The few images of a run, the same ones for all ways."""

    def __init__(self, run: Run, data: cifar.Cifar10):
        self.data, self.size = data, run.batch
        device = data.x.device
        order = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(123)).to(device)
        self.held_out = order[-HELD_OUT:]
        chosen = torch.randperm(len(order) - len(self.held_out), generator=torch.Generator().manual_seed(run.seed))
        self.images = order[chosen[: run.images].to(device)]
        self.generator = torch.Generator(device).manual_seed(run.seed)

    def __len__(self) -> int:
        return len(self.images) // self.size

    def batches(self, versions: int) -> list[Tensor]:
        """All images so many times, each time augmented and in another order; full batches."""
        found = []
        for _ in range(versions):
            order = torch.randperm(len(self.images), generator=self.generator, device=self.images.device)
            parts = self.images[order][: len(self) * self.size].split(self.size)
            found += [self.data.batch(part, self.generator)[0] for part in parts]
        return found

    @torch.no_grad()
    def held_out_accuracy(self, model: nn.Module) -> float:
        model.eval()
        images = self.data.x[self.held_out][:, 4:36, 4:36]
        answers = torch.cat([model(self.data.normalize(part)).argmax(1) for part in images.split(500)])
        return 100 * float((answers == self.data.y[self.held_out]).float().mean())


def distil(model: nn.Module, teacher: nn.Module, few: Few, lr: float, steps: int) -> None:
    """Train the whole network to answer as the teacher does."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    model.train()
    done = 0
    while done < steps:
        for x in few.batches(1)[: steps - done]:
            with torch.no_grad():
                taught = teacher(x)
            optimizer.zero_grad()
            dkm.distill(model(x), taught).backward()
            optimizer.step()
            schedule.step()
            done += 1


if __name__ == "__main__":
    main()
