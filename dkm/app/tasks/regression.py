"""Numbers to be predicted, such as how alike two sentences are: a model of one output, and labels with fractions."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import Problem
from ..measures import PEARSON, Measure
from ..settings import FIELDS, Settings, flag
from .metrics import Correlation, Metric
from .task import Compared, Task

_FOR_CLASSES = ("label_smoothing", "temperature", "target_size")


class Regression(Task):
    """What is different from classes: the loss is the mean squared error, and the metric Pearson's correlation."""

    measure: ClassVar[Measure] = PEARSON

    def metric(self, device: torch.device) -> Metric:
        """Pearson's and Spearman's correlation."""
        return Correlation(device, self.eval_count)

    def compared(self, output: Any, labels: Tensor, *, may_be_filled_up: bool = True) -> Compared:
        """`(batch, 1)` or `(batch,)` answers and as many labels -> `(batch,)` each."""
        answers = self.logits(output)
        if answers.ndim == 2 and answers.shape[1] == 1:
            answers = answers.squeeze(1)
        if answers.ndim != 1 or labels.ndim != 1:
            raise Problem(
                f"regression needs one output, (batch, 1), and labels (batch,), and this gives {tuple(answers.shape)} "
                f"for {tuple(labels.shape)}"
            )
        return Compared(answers, labels.float())

    def loss(self, answers: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
        """The mean squared error."""
        return F.mse_loss(answers, labels)

    def distance(self, answers: Tensor, taught: Tensor, temperature: float) -> Tensor:
        """The mean squared error against the teacher's answers."""
        return F.mse_loss(answers, taught.float())


def check_for_regression(settings: Settings) -> None:
    """Raise Problem where a setting makes sense for classes only."""
    for name in _FOR_CLASSES:
        if getattr(settings, name) != FIELDS[name].default:
            raise Problem(f"{flag(name)} is for classes, and this is regression: leave it out")
