"""Shrink a small convolutional network to 2 bits and to 1 bit per weight.  Under a minute on one core.

    python examples/digits.py --out demo-output

The data are the 1,797 handwritten digits that come with scikit-learn.  Writes a folder for each of the two, with the
.dkm file and report.html.  All that dkm needs is in `compress` below; `Diary` only keeps a log for the report.
"""

import argparse
import copy
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import dkm
from dkm.app import report
from dkm.app.run_folder import (
    FILES,
    EvalRecord,
    HistogramRecord,
    LayersRecord,
    RunFolder,
    StepRecord,
    plan_file,
)
from dkm.app.run_folder import Result as ResultFile

PLANS = ("all:2/1", "all:4/4")  # 4 scalars for each layer, or 16 vectors of 4 weights: 2 bits and 1 bit per weight
BATCH = 64
LEARNING_RATE = 2e-3
SHOWN = ("conv2.weight", "conv3.weight")  # the tensors in the report's histograms


@dataclass(frozen=True)
class Data:
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch; the last batch may be a small one."""
        return -(-len(self.x) // BATCH)


@dataclass(frozen=True)
class Result:
    """What came of one plan; accuracies are on the test images, in percent."""

    model: nn.Module
    plan: dkm.Plan
    recalibrated: float  # accuracy of the snapped network, with batch-norm statistics of its own
    loaded: float  # accuracy of the network that was read back from the file
    size: dkm.Plan  # the plan again, with .file_bytes
    file: Path


def load_data() -> Data:
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    train, test = train_test_split(range(len(y)), test_size=1 / 3, stratify=y, random_state=0)
    return Data(x[train], y[train], x[test], y[test])


def network() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 32, 3, padding=1, bias=False),
            norm1=nn.BatchNorm2d(32),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3, padding=1, bias=False),
            norm2=nn.BatchNorm2d(64),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            conv3=nn.Conv2d(64, 64, 3, padding=1, bias=False),
            norm3=nn.BatchNorm2d(64),
            relu3=nn.ReLU(),
            flat=nn.Flatten(),
            hidden=nn.Linear(64 * 4 * 4, 128),
            relu4=nn.ReLU(),
            classes=nn.Linear(128, 10),
        )
    )


def train(model: nn.Module, data: Data, epochs: int, after: Callable[[int, float], None]) -> None:
    """An ordinary training loop.  It does not know about dkm.  After each epoch it calls `after(epoch, loss)`."""
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * data.steps)
    for epoch in range(1, epochs + 1):
        model.train()
        total = 0.0
        for batch in torch.randperm(len(data.x)).split(BATCH):
            loss = F.cross_entropy(model(data.x[batch]), data.y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        after(epoch, total / len(data.x))


def compress(model: nn.Module, data: Data, text: str, epochs: int, diary: "Diary") -> Result:
    """Everything that dkm adds to a training script."""
    model = copy.deepcopy(model)
    plan = dkm.compress_(model, text, steps=epochs * data.steps)  # in place; the plan has a row for each tensor
    diary.begin(model, plan, text)
    train(model, data, epochs, diary.epoch)

    model.eval()  # evaluation mode: every weight is its nearest centroid
    dkm.recalibrate_(model, data.x.split(BATCH))
    recalibrated = accuracy(model, data)

    file = diary.folder.model
    dkm.save(model, file)
    loaded = dkm.load(file, into=network())  # a plain model, with dense weights
    return Result(model, plan, recalibrated, accuracy(loaded.eval(), data), dkm.size(model), file)


def with_soft_weights(model: nn.Module) -> nn.Module:
    """The model in evaluation mode, except that it keeps its train-time weights, to compare with the snapped ones."""
    model.eval()
    for module in model.modules():
        if isinstance(module, dkm.Clustered):
            module.train()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    return 100 * (model(data.x_test).argmax(1) == data.y_test).double().mean().item()


def progress(label: str, epoch: int, epochs: int, loss: float) -> None:
    """Show how far the training is: in a terminal one line that changes, elsewhere a line for every fifth epoch."""
    line = f"{label:<10} epoch {epoch:>2} of {epochs}, loss {loss:.4f}"
    if sys.stdout.isatty():
        print(f"\r{line}\033[K", end="\n" if epoch == epochs else "", flush=True)
    elif epoch % 5 == 0 or epoch == epochs:
        print(line, flush=True)


class Diary:
    """Writes the files that the report is made from.  `dkm compress` does this by itself."""

    def __init__(self, path: Path, data: Data, epochs: int, seed: int, before: float):
        self.folder, self.data, self.epochs, self.seed, self.before = RunFolder(path), data, epochs, seed, before
        path.mkdir(parents=True, exist_ok=True)
        for name in (*FILES, "report.html"):  # of an earlier demo
            (path / name).unlink(missing_ok=True)

    def begin(self, model: nn.Module, plan: dkm.Plan, text: str) -> None:
        """Note the plan, and measure the model before its first step."""
        self.started, self.text, self.model = time.perf_counter(), text, model
        self.monitor = dkm.monitor(model, every=1)
        config = (
            f'model = "digits"\nplan = "{text}"\nepochs = {self.epochs}\nlr = {LEARNING_RATE}\nseed = {self.seed}\n'
        )
        self.folder.config.write_text(config, encoding="utf-8")
        self.folder.write_plan(plan_file(plan, text))
        self._measure(0, None)

    def epoch(self, epoch: int, loss: float) -> None:
        """Note the loss of an epoch, and measure the model after it."""
        progress(self.text, epoch, self.epochs, loss)
        self.folder.append(StepRecord(kind="step", step=epoch * self.data.steps, epoch=epoch, loss=loss))
        self._measure(epoch, accuracy(with_soft_weights(self.model), self.data))

    def end(self, result: Result) -> Path:
        """Write the figures, and the report."""
        dense, file_bytes = 4 * result.plan.parameters, result.size.file_bytes
        figures = ResultFile(
            accuracy_before=self.before,
            accuracy_after=result.loaded,
            bytes_dense=dense,
            bytes_paper=result.plan.bytes,
            bytes_file=file_bytes,
            ratio=dense / file_bytes,
            seconds=time.perf_counter() - self.started,
            steps=self.epochs * self.data.steps,
            command=f"python examples/digits.py --epochs {self.epochs} --seed {self.seed}",
            seed=self.seed,
            finished=True,
            environment={"dkm": dkm.__version__, "torch": torch.__version__, "device": "cpu"},
        )
        self.folder.write_result(figures)
        return report.write(self.folder.path)

    def _measure(self, epoch: int, soft: float | None) -> None:
        """Note the accuracy with train-time weights, which is given, and what else can be measured now."""
        step, snapped = epoch * self.data.steps, accuracy(self.model.eval(), self.data)
        self.folder.append(EvalRecord(kind="eval", step=step, epoch=epoch, soft=soft, snapped=snapped))
        measured = self.monitor.record(step)
        self.folder.append(LayersRecord(kind="layers", step=step, tensors=measured["tensors"], total=measured["total"]))
        for name in SHOWN:
            self.folder.append(self._histogram(name, step))

    def _histogram(self, name: str, step: int) -> HistogramRecord:
        parametrization = self.model.get_submodule(name.removesuffix(".weight")).parametrizations.weight
        weight, clustered = parametrization.original.detach(), parametrization[0]
        counts, edges = torch.histogram(weight.flatten()[:: clustered.dim], 60)  # the first weight of each vector
        centroids = clustered.codes(weight)[0][:, 0]
        return HistogramRecord(
            kind="histogram",
            step=step,
            name=name,
            edges=edges.tolist(),
            counts=counts.tolist(),
            centroids=centroids.tolist(),
        )


def run(out: Path, epochs: int = 12, seed: int = 0) -> list[Result]:
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    data = load_data()
    print(f"{len(data.x):,} digits to train on, {len(data.x_test):,} to test with")

    model = network()
    train(model, data, epochs, lambda epoch, loss: progress("float32", epoch, epochs, loss))
    before = accuracy(model.eval(), data)
    safetensors.torch.save_file(model.state_dict(), out / "digits.safetensors")

    results = []
    for text in PLANS:
        diary = Diary(out / text.partition(":")[2].replace("/", "-"), data, epochs, seed, before)
        results.append(compress(model, data, text, epochs, diary))
        diary.end(results[-1])

    print(f"\nthe plan {PLANS[-1]}\n{results[-1].plan}\n")
    for result in results:
        print(report.summary(result.file.parent))
    print(f"\n{time.perf_counter() - started:.0f} s; open")
    for result in results:
        print(f"  {result.file.with_name('report.html')}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Shrink a small network to 2 bits and to 1 bit per weight.")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the files")
    parser.add_argument("--epochs", type=int, default=12, help="of training, and again of each compression")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the network is small, and the result must not depend on the number of cores
    run(arguments.out, arguments.epochs, arguments.seed)


if __name__ == "__main__":
    main()
