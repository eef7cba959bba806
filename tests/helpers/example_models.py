"""Small networks that several tests make plans for."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import dkm


def resnet_like() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),  # 432 parameters: small
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 80, 3),  # 11,520: not
        nn.BatchNorm2d(80),
        nn.Flatten(),
        nn.Linear(80, 130),  # 10,400: not
        nn.Linear(130, 10),  # 1,300: small
    )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(400, 30)
        self.output = nn.Linear(30, 400)
        self.output.weight = self.embedding.weight


class Conv1D(nn.Module):
    """As in transformers: neither Linear nor Conv, one matrix called weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 30))
        self.bias = nn.Parameter(torch.randn(30))


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 20, 30))
        self.table = nn.Parameter(torch.randn(20, 30))
        self.linear = nn.Linear(30, 4)


MODELS = {
    "resnet": resnet_like,
    "tied": Tied,
    "bare": Bare,
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False),
    "rnn": lambda: nn.ModuleDict({"a": nn.LSTM(3, 4, 2, proj_size=2), "b": nn.Embedding(4, 3), "c": nn.RNN(2, 2)}),
    "weight_norm": lambda: nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Linear(5, 2)),
}


def decided(plan: dkm.Plan) -> dict[str, tuple[int, int]]:
    """The tensors that a plan clusters, with their bits and dim."""
    return {row.name: (row.bits, row.dim) for row in plan.rows if row.bits is not None}
