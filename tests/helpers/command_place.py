"""A folder to call the command in: pictures, a network and its weights."""

from pathlib import Path

import accelerate
import numpy as np
import PIL.Image
import pytest
import safetensors.torch

from dkm.app import cli, settings
from dkm.app.own_code import load_function

NETWORK = """
import os
import time

from torch import nn

class Pause(nn.Module):
    def forward(self, x):
        time.sleep(float(os.environ.get("SECONDS_PER_STEP", "0")))
        return x

def network(classes=2):
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
    return nn.Sequential(*layers, Pause())

def number():
    return 1

def data():
    import torch
    examples = torch.utils.data.TensorDataset(torch.randn(24, 3, 8, 8), torch.arange(24) % 2)
    return tuple(torch.utils.data.random_split(examples, [16, 8]))
"""


def make_place(folder: Path) -> None:
    """Fill a folder with what the command needs."""
    rng = np.random.default_rng(0)
    for i in range(20):
        path = folder / "images" / "ab"[i % 2] / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(path)
    (folder / "network.py").write_text(NETWORK)
    model = load_function(f"{folder / 'network.py'}:network")()
    safetensors.torch.save_file(model.state_dict(), folder / "weights.safetensors")


ORDINARY = dict(
    model="network.py:network", weights="weights.safetensors", data="images", plan="0:2, 4:2", out="run", epochs="1",
    batch_size="6", image_size="8", resize="8", device="cpu",
)  # fmt: skip


def flags(**options: str | None) -> list[str]:
    chosen = ORDINARY | options
    return [word for name, value in chosen.items() if value is not None for word in (settings.flag(name), value)]


def call(*arguments: str, code: int = 0) -> None:
    """The command, as a user types it, in this process."""
    accelerate.state.AcceleratorState._reset_state(True)
    with pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    assert end.value.code == code
