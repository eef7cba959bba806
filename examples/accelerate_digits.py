"""Shrink a small convolutional network with Accelerate.  About 20 seconds on one core.

    pip install -e ".[accelerate,demo]"
    python examples/accelerate_digits.py --out accelerate-output
    accelerate launch examples/accelerate_digits.py      # on the devices that `accelerate config` names

The data and the network are those of digits.py.  dkm needs three lines, which are numbered.
"""

import argparse
import math
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from digits import BATCH, LEARNING_RATE, Data, accuracy, load_data, network
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dkm

PLAN = "all:4/4"  # 16 vectors of 4 weights for each layer: 1 bit per weight


def fit(model: nn.Module, data: Data, out: Path, epochs: int, plan: str | None = None) -> nn.Module:
    """An Accelerate loop with gradient accumulation and checkpoints.  After a crash, run it again and it continues."""
    project = ProjectConfiguration(str(out), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_config=project)
    loader = accelerator.prepare(DataLoader(TensorDataset(data.x, data.y), BATCH // 2, shuffle=True))
    # The loader is prepared first, because its length is then that of one process.
    steps = epochs * math.ceil(len(loader) / accelerator.gradient_accumulation_steps)
    if plan is not None:
        dkm.compress_(model, plan, steps=steps)  # 1. before `prepare` wraps the model
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    saved = sorted((out / "checkpoints").glob("checkpoint_*"), key=lambda folder: int(folder.name.rpartition("_")[2]))
    first = 0
    if saved:
        accelerator.load_state(str(saved[-1]))  # it includes dkm's state, which is in the model
        first = accelerator.project_configuration.iteration = int(saved[-1].name.rpartition("_")[2]) + 1
    model.train()
    for _ in range(first, epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.save_state()

    accelerator.wait_for_everyone()
    model = accelerator.unwrap_model(model)
    if plan is not None and accelerator.is_main_process:
        dkm.recalibrate_(model, data.x.split(BATCH))  # 2. batch norm's statistics for the snapped network
        dkm.save(model, out / "model.dkm")  # 3. in one process only
    return model


def run(out: Path, epochs: int = 6) -> tuple[float, float, float]:
    """Accuracies in percent: before compression, compressed, and read back from the file."""
    set_seed(0)
    data = load_data()
    model = fit(network(), data, out / "plain", epochs)
    before = accuracy(model.eval(), data)

    model = fit(model, data, out / "compressed", epochs, PLAN)
    after, size = accuracy(model.eval(), data), dkm.size(model)
    loaded = dkm.load(out / "compressed" / "model.dkm", into=network())  # a plain network, with dense weights
    again = accuracy(loaded.eval(), data)

    print(f"\n{size.summary()}")
    print(f"float32     {before:.1f} %  {4 * size.parameters:,} bytes")
    print(f"compressed  {after:.1f} %  {size.file_bytes:,} bytes; read back from the file {again:.1f} %")
    return before, after, again


def main() -> None:
    parser = argparse.ArgumentParser(description="Shrink a small convolutional network with Accelerate.")
    parser.add_argument("--out", type=Path, default=Path("accelerate-output"), help="folder for the files")
    parser.add_argument("--epochs", type=int, default=6, help="of training, and again of compression")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the network is small
    run(arguments.out, arguments.epochs)


if __name__ == "__main__":
    main()
