"""What is measured on the evaluation examples: sums over batches, which also add up over processes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import Problem
from ..measures import LARGEST


class Score(NamedTuple):
    """The result of an evaluation."""

    value: float  # of what the task measures: accuracy in percent, or perplexity
    loss: float  # mean over the examples, or over the tokens


class Metric(ABC):
    """Sums that grow with every batch.  `sums` is a float64 vector on the device of the model."""

    sums: Tensor

    @abstractmethod
    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch."""

    @staticmethod
    @abstractmethod
    def score(sums: Sequence[float]) -> Score:
        """The result for these sums, which may be those of several processes added together."""


class Classification(Metric):
    """Accuracy and mean cross-entropy.  `sums` are: right answers, cross-entropy, examples."""

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.labels_checked = False

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count `(batch, classes)` logits for `(batch,)` labels; Problem where they have other shapes."""
        if logits.ndim != 2 or labels.ndim != 1:
            raise Problem(
                f"a classifier gives (batch, classes) for labels (batch,), and this gives "
                f"{tuple(logits.shape)} for {tuple(labels.shape)}"
            )
        if not self.labels_checked:  # for the first batch only, because it waits for the GPU
            self.labels_checked = True
            if int(labels.max()) >= logits.shape[1]:
                raise Problem(
                    f"the data have the label {int(labels.max())} and the model has {logits.shape[1]} outputs"
                )
        right = (logits.argmax(1) == labels).sum()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        self.sums[:2] += torch.stack([right.double(), loss.double()])
        self.sums[2] += len(labels)

    @staticmethod
    def score(sums: Sequence[float]) -> Score:
        """Accuracy in percent, and the mean cross-entropy."""
        right, loss, count = sums
        return Score(100 * right / count, loss / count)


class NextToken(Metric):
    """Perplexity, exp of the mean negative log likelihood of a token.  `sums` are: that of all tokens, tokens."""

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count `(tokens, vocabulary)` logits for the `(tokens,)` that came."""
        likelihoods = F.cross_entropy(logits, labels, reduction="none")
        self.sums[0] += likelihoods.double().sum()
        self.sums[1] += len(labels)

    @staticmethod
    def score(sums: Sequence[float]) -> Score:
        """The perplexity, infinite where it is larger than any that a file of a run may hold; and its logarithm."""
        loss = sums[0] / sums[1]
        return Score(math.inf if loss > math.log(LARGEST) else math.exp(loss), loss)
