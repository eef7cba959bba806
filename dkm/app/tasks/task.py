"""What every kind of data has: examples to train and to evaluate on, the defaults that suit them, and the metric."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from ...training.distill import distill
from ..errors import Problem
from ..measures import ACCURACY, Measure
from ..settings import Settings
from .metrics import Classification, Metric

HELD_OUT = 10  # one example in so many, of each class, is evaluated on where no evaluation data was given

Example = TypeVar("Example")


class Inputs(NamedTuple):
    """A batch, taken apart."""

    args: tuple[Tensor, ...]  # what the model takes by position
    kwargs: dict[str, Tensor]  # what the model takes by name
    labels: Tensor


class Compared(NamedTuple):
    """What the loss compares, with a row for each answer of the model."""

    logits: Tensor  # (rows, classes)
    labels: Tensor  # (rows,)
    examples: Tensor | None = None  # (rows,): to which example of the batch each belongs; None: each is one


class Task(ABC):
    """Opened data of one kind.

    An example is `(x, label)`, or a dict of what the model takes by name, with "labels".  Reading an example of `train`
    may draw random numbers; reading one of `eval` always gives the same.
    """

    unit: ClassVar[str]  # what the examples are called in the output: "images"
    default_batch_size: ClassVar[int] = 64  # in each process
    default_lr: ClassVar[float] = 3e-4  # the highest learning rate, with Adam and AdamW
    default_sgd_lr: ClassVar[float] = 0.008
    measure: ClassVar[Measure] = ACCURACY
    measured_count: ClassVar[int] = 256  # examples on which the cost of clustering each layer is measured
    batches_have_one_shape = False  # those to train on; only then the steps can be a CUDA graph
    hint: ClassVar[str] = "give the data that it is made for"  # where the model cannot take the examples

    def __init__(
        self,
        train: Dataset,
        eval: Dataset,
        classes: int | None,
        collate: Callable[[list[Any]], Any] = default_collate,
    ):
        self.train, self.eval, self.classes, self.collate = train, eval, classes, collate
        self.notes: list[str] = []  # what the user should know
        self.measured_places: list[str] = []  # where the examples to evaluate on are
        self.is_held_out = False  # whether these are a part of what would be trained on

    @classmethod
    @abstractmethod
    def recognizes(cls, settings: Settings) -> bool:
        """Whether `--data`, of which there is at least one, names data of this kind."""

    @classmethod
    @abstractmethod
    def open(cls, settings: Settings) -> "Task":
        """Open the data; Problem where they cannot be used."""

    @property
    def train_count(self) -> int:
        """How many examples there are to train on."""
        return len(self.train)  # type: ignore[arg-type]  # torch's Dataset declares no __len__

    @property
    def eval_count(self) -> int:
        """How many examples there are to evaluate on."""
        return len(self.eval)  # type: ignore[arg-type]

    def what_is_measured(self) -> str:
        """The examples to evaluate on, in words: all 300 images in folder."""
        where = f" in {' and '.join(self.measured_places)}" if self.measured_places else ""
        if self.is_held_out:
            every = self.train_count + self.eval_count
            return f"{self.eval_count:,} of the {every:,} {self.unit}{where}, which are held out of the training"
        return f"all {self.eval_count:,} {self.unit}{where}"

    def suit(self, model: nn.Module) -> None:  # noqa: B027  # most kinds have nothing to do
        """Give the examples the form that the model takes, where that depends on the model itself."""

    def check_outputs(self, outputs: int) -> str | None:
        """A warning about how many outputs the model turns out to have; Problem where it cannot be meant."""
        return None

    def learning_rate(self, optimizer: str) -> float:
        """The highest learning rate, where the user gives none."""
        return self.default_sgd_lr if optimizer == "sgd" else self.default_lr

    def metric(self, device: torch.device) -> Metric:
        """A new metric, which has seen no batch yet."""
        return Classification(device)

    def split(self, batch: Any) -> Inputs:
        """Take a collated batch apart."""
        if isinstance(batch, dict):
            if "labels" not in batch:
                raise Problem(f"an example that is a dict must have 'labels', and this has {', '.join(batch)}")
            return Inputs((), {key: value for key, value in batch.items() if key != "labels"}, batch["labels"])
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return Inputs((batch[0],), {}, batch[1])
        raise Problem(f"an example must be (input, label) or a dict with 'labels', and is a {type(batch).__name__}")

    def logits(self, output: Any) -> Tensor:
        """What the model returned -> `(batch, classes)`.  Models of transformers return an object that holds them."""
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            kind = type(output).__name__
            raise Problem(f"the model must give a tensor, or an object with one as .logits, and gives a {kind}")
        return logits

    def compared(self, output: Any, labels: Tensor, *, may_be_filled_up: bool = True) -> Compared:
        """The model's answers and the labels that belong to them.

        Where examples have different lengths, a batch is filled up; what is only filling is left out here.  Without
        `may_be_filled_up` there is none.
        """
        return Compared(self.logits(output), labels)

    def loss(self, logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
        """The loss of what `compared` gave, against the labels."""
        return F.cross_entropy(logits, labels, label_smoothing=label_smoothing)

    def distance(self, logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
        """The loss of what `compared` gave, against what it gave for the teacher."""
        return distill(logits, taught, temperature=temperature)


def held_out(examples: Sequence[Example]) -> Sequence[Example]:
    """Those examples of one class to evaluate on: the last of every ten, in their order; of fewer than ten the last,
    unless there is only one."""
    return examples[HELD_OUT - 1 :: HELD_OUT] or examples[1:][-1:]


def check_that_paths_exist(settings: Settings) -> None:
    """Raise Problem where `--data` or `--eval-data` names something that is not there."""
    for path in (*settings.data, *settings.eval_data):
        if not Path(path).exists():
            raise Problem(f"there is no folder or file {path}")
        if not Path(path).is_dir() and not Path(path).is_file():  # a pipe would be waited for without end
            raise Problem(f"{path} is neither a folder nor an ordinary file, but a pipe, socket or device")
