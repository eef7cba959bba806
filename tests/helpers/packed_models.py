"""A network of every kind of layer that can be packed, its compressed file, and the models that read it."""

from pathlib import Path

import torch
from torch import Tensor, nn

import dkm

PLAN = "emb.weight:3/2, lstm:2 per row, att:3/1 scaled, att.out_proj:6, conv:4/4, "
PLAN += "back:2/1 per 4x8, wide:5/2, mixed:2, bag:4/2"


class Layers(nn.Module):
    """Recurrent, attention, convolutions, a bilinear layer, embeddings; the first embedding is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 24, bidirectional=True)
        self.att = nn.MultiheadAttention(48, 4)
        self.conv = nn.Conv1d(48, 32, 3)
        self.norm = nn.BatchNorm1d(32)
        self.back = nn.ConvTranspose1d(32, 16, 3)
        self.wide = nn.Linear(16, 33)
        self.mixed = nn.Bilinear(33, 16, 16)
        self.bag = nn.EmbeddingBag(50, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(self.emb(x))
        h, _ = self.att(h, h, h)
        h = self.back(self.norm(self.conv(h.permute(1, 2, 0)))).permute(2, 0, 1)
        return self.head(self.mixed(self.wide(h), h) + self.bag(x.T))


def words() -> Tensor:
    return torch.randint(50, (9, 4), generator=torch.Generator().manual_seed(0))


def write_layers(path: Path) -> Path:
    """The file of the network, whose weights are clustered by k-means."""
    torch.manual_seed(0)
    model = Layers()
    dkm.compress_(model, PLAN, tau=1.0)
    dkm.save(model, path)
    return path


def weights(model: nn.Module) -> dict[str, Tensor]:
    """What every layer gives when its weight is read, packed or not."""
    return {
        f"{path}.{name}": getattr(module, name).detach()
        for path, module in model.named_modules()
        for name in dir(module)
        if "weight" in name
        and not name.startswith(("_", "packed", "all_weights", "flat"))
        and isinstance(getattr(module, name), Tensor)
    }
