"""Shrink a small convolutional network with Lightning.  About 20 seconds on one core.

    pip install -e ".[lightning,demo]"
    python examples/lightning_digits.py --out lightning-output

The data and the network are those of digits.py.  dkm adds only the callback in `compress`.
"""

import argparse
from pathlib import Path

import torch
from digits import BATCH, LEARNING_RATE, Data, accuracy, load_data, network
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dkm
from dkm.integrations.lightning import DKMCallback

PLAN = "all:4/4"  # 16 vectors of 4 weights for each layer: 1 bit per weight


class Digits(LightningModule):
    """An ordinary LightningModule, which does not know about dkm."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.Adam(self.parameters(), LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(model: nn.Module, data: Data, out: Path, epochs: int, callbacks: list) -> None:
    """Train as always, without dkm."""
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=out,
        callbacks=[*callbacks, ModelCheckpoint(out, filename="{epoch}")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(model.train()), DataLoader(TensorDataset(data.x, data.y), BATCH, shuffle=True))


def compress(model: nn.Module, data: Data, out: Path, epochs: int) -> None:
    """Train with dkm and write `Digits.model` to out/model.dkm.  After a crash use fit(..., ckpt_path="last")."""
    fit(model, data, out, epochs, [DKMCallback(PLAN, module="model", recalibrate=data.steps)])


def run(out: Path, epochs: int = 8) -> tuple[float, float, float]:
    """Accuracies in percent: before compression, compressed, and read back from the file."""
    seed_everything(0, verbose=False)
    data, model = load_data(), network()
    fit(model, data, out / "plain", epochs, [])
    before = accuracy(model.eval(), data)

    compress(model, data, out / "compressed", epochs)
    after, size = accuracy(model.eval(), data), dkm.size(model)
    loaded = dkm.load(out / "compressed" / "model.dkm", into=network())  # a plain network, with dense weights
    again = accuracy(loaded.eval(), data)

    print(f"\n{size.summary()}")
    print(f"float32     {before:.1f} %  {4 * size.parameters:,} bytes")
    print(f"compressed  {after:.1f} %  {size.file_bytes:,} bytes; read back from the file {again:.1f} %")
    return before, after, again


def main() -> None:
    parser = argparse.ArgumentParser(description="Shrink a small convolutional network with Lightning.")
    parser.add_argument("--out", type=Path, default=Path("lightning-output"), help="folder for the files")
    parser.add_argument("--epochs", type=int, default=8, help="of training, and again of compression")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the network is small
    run(arguments.out, arguments.epochs)


if __name__ == "__main__":
    main()
