"""Something to compress for a user who has nothing at hand: pictures, and a network trained on them."""

from pathlib import Path

import safetensors.torch
import torch
from torch.nn import functional as F

from ..foundation.atomic import write_atomically
from . import models
from .settings import Settings
from .tasks import open_task
from .tasks.batches import batches

CLASSES = ("circle", "cross", "square")
SIZE = 32
# This is written beside the pictures, to show how a model of your own is given: `--model network.py:network`.
NETWORK = '''"""A small network: four convolutions, an average over the picture, a matrix."""

from torch import Tensor, nn


class ShapeNet(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.stem = block(3, 32)
        self.body = nn.Sequential(block(32, 64), block(64, 96), block(96, 128))
        self.head = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def block(before: int, after: int) -> nn.Module:
    convolution = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())


def network(classes: int = 3) -> nn.Module:
    return ShapeNet(classes)
'''
# Few enough centroids for the pictures of the report to show how the weights gather around them.
PLAN = "cv:2/1, first:3, last:3"


def make_images(folder: Path, count: int, seed: int = 0) -> None:
    """Draw circles, crosses and squares of random colours, places and sizes on noise: a folder for each class."""
    import numpy as np
    import PIL.Image
    import PIL.ImageDraw

    rng = np.random.default_rng(seed)
    for i in range(count):
        name = CLASSES[i % len(CLASSES)]
        picture = PIL.Image.fromarray(rng.integers(0, 150, (SIZE, SIZE, 3), dtype=np.uint8))
        pen, colour = PIL.ImageDraw.Draw(picture), tuple(int(c) for c in rng.integers(110, 256, 3))
        r, (x, y) = int(rng.integers(4, 10)), (int(c) for c in rng.integers(10, SIZE - 10, 2))
        box = (x - r, y - r, x + r, y + r)
        if name == "circle":
            pen.ellipse(box, outline=colour, width=2)
        elif name == "square":
            pen.rectangle(box, outline=colour, width=2)
        else:
            pen.line((x - r, y, x + r, y), colour, 2)
            pen.line((x, y - r, x, y + r), colour, 2)
        path = folder / name / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)


def train(network: str, images: Path, weights: Path, epochs: int = 20, seed: int = 0) -> None:
    """Train a network from random weights, the ordinary way, and write them to a .safetensors file."""
    torch.manual_seed(seed)
    settings = Settings(model=network, data=(str(images),), image_size=SIZE, device="cpu")
    task = open_task(settings)
    model, _ = models.build(network, "none", task.classes)
    size, total = 32, task.train_count
    steps = epochs * (total // size)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    model.train()
    keys = [
        [(epoch * total + i, i) for i in part.tolist()]
        for epoch in range(epochs)
        for part in torch.randperm(total).split(size)
        if len(part) == size
    ]
    for x, y in batches(task, task.train, keys, settings):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    write_atomically(weights, safetensors.torch.save(model.state_dict()))
