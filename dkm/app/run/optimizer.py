"""The optimizer and its learning rate."""

import math

import torch
from torch import Tensor, nn

from ..settings import Settings


def make_optimizer(settings: Settings, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The optimizer that the settings name, for all parameters that train."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.optimizer == "sgd":
        fused = all(parameter.is_cuda for parameter in trained) or None  # a CUDA graph needs the fused one
        return torch.optim.SGD(trained, lr, momentum=settings.momentum, weight_decay=settings.weight_decay, fused=fused)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.optimizer]
    return kind(trained, lr, weight_decay=settings.weight_decay)


def learning_rate(settings: Settings, highest: float, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0, of `steps`: it rises in the warmup, then follows the schedule."""
    warmup = settings.warmup * steps
    if step < warmup:
        return highest * (step + 1) / (warmup + 1)
    left = 1 - (step - warmup) / max(1.0, steps - warmup)
    return highest * {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}[settings.schedule]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set it in place where it is a tensor: a CUDA graph reads that tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
