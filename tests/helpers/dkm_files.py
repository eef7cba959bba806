"""A small network, compressed and trained for two steps, and the header of the file that it makes."""

import json
import struct

import torch
from torch import nn

import dkm


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 7, 3),
        nn.BatchNorm2d(7),
        nn.ReLU(),
        nn.Conv2d(7, 5, (1, 3), bias=False),
        nn.BatchNorm2d(5),
        nn.Flatten(),
        nn.Linear(40, 11),
    ).to(dtype)


def images(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(6, 3, 6, 6, generator=torch.Generator().manual_seed(7)).to(dtype)


def trained(text: str = "0:3/2, 3:2, 6:4/3", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Compressed and trained for two steps, so that no weight is at its centroid; in evaluation mode."""
    model = net(dtype)
    dkm.compress_(model, text, steps=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(2):
        model(torch.randn(6, 3, 6, 6).to(dtype)).float().square().mean().backward()
        optimizer.step()
    return model.eval()


def header(data: bytes) -> dict:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])
