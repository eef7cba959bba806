"""CIFAR-10: the ResNets of He et al. (2016, section 4.2), and the data, on the device they are used on."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's: what the weights were trained with


class Block(nn.Module):
    """Two convolutions and a shortcut without weights: every second pixel, and zeros for the new channels."""

    def __init__(self, channels: int, out: int):
        super().__init__()
        self.stride, self.extra = out // channels, out - channels
        self.conv1 = nn.Conv2d(channels, out, 3, self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.extra:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra // 2, self.extra // 2))
        return F.relu(x + y)


class ResNet(nn.Module):
    """Images `(n, 3, 32, 32)` -> logits `(n, 10)`.  Depth 20, 32, 44, ..."""

    def __init__(self, depth: int = 20):
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16) for _ in range(blocks)))
        self.layer2 = nn.Sequential(Block(16, 32), *(Block(32, 32) for _ in range(blocks - 1)))
        self.layer3 = nn.Sequential(Block(32, 64), *(Block(64, 64) for _ in range(blocks - 1)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


@dataclass(frozen=True)
class Cifar10:
    """All of it, on one device: no worker, no copy, no waiting."""

    x: Tensor  # (n, 40, 40, 3) uint8, black around the 32 x 32
    y: Tensor  # (n,) int64
    x_test: Tensor  # (m, 32, 32, 3) uint8
    y_test: Tensor  # (m,) int64
    mean: Tensor  # (3,)
    std: Tensor  # (3,)

    @classmethod
    def load(cls, folder: Path, device: torch.device | str) -> "Cifar10":
        """From every `*.npz` in the folder, in the order of their names: arrays `x`, `y`, `x_test`, `y_test`, in one
        file or several; images uint8 `(n, 32, 32, 3)`."""
        parts: dict[str, list[np.ndarray]] = {name: [] for name in ("x", "y", "x_test", "y_test")}
        for path in sorted(folder.glob("*.npz")):
            with np.load(path) as arrays:
                for name in arrays:
                    parts[name].append(arrays[name])
        if not all(parts.values()):
            raise FileNotFoundError(f"{folder} has no CIFAR-10: it needs *.npz files with x, y, x_test and y_test")
        x, y, x_test, y_test = (torch.from_numpy(np.concatenate(arrays)).to(device) for arrays in parts.values())
        mean, std = (torch.tensor(values, device=device) * 255 for values in (MEAN, STD))
        return cls(F.pad(x, (0, 0, 4, 4, 4, 4)), y.long(), x_test, y_test.long(), mean, std)

    def batch(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Training images at random crops, half of them mirrored: `(b, 3, 32, 32)` float32, `(b,)`."""
        b, device = len(index), index.device
        row, column, mirrored = torch.randint(9 * 9 * 2, (3, b), generator=generator, device=device)
        pixels = torch.arange(32, device=device)
        rows = row[:, None] % 9 + pixels
        columns = column[:, None] % 9 + torch.where(mirrored[:, None] % 2 == 0, pixels, 31 - pixels)
        return self.normalize(self.x[index[:, None, None], rows[:, :, None], columns[:, None, :]]), self.y[index]

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Percent of the test images, in evaluation mode."""
        model.eval()
        pairs = zip(self.x_test.split(1000), self.y_test.split(1000), strict=True)
        correct = sum((model(self.normalize(x)).argmax(1) == y).sum() for x, y in pairs)
        return 100 * float(correct) / len(self.y_test)

    def normalize(self, images: Tensor) -> Tensor:
        """`(n, height, width, 3)` uint8 -> `(n, 3, height, width)` float32, in memory as it was: channels last."""
        return ((images - self.mean) / self.std).permute(0, 3, 1, 2)
