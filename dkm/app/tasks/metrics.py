"""What is measured on the evaluation examples: sums over batches, which also add up over processes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import Problem
from ..measures import F1, LARGEST, MATTHEWS, SPEARMAN, TOP5, Score

MANY_OUTPUTS = 100  # from here on, the share of right answers among the five likeliest is measured, too


class Metric(ABC):
    """Sums that grow with every batch."""

    @abstractmethod
    def add(self, logits: Tensor, labels: Tensor, rows: Tensor | None = None) -> None:
        """Count a batch.  `rows` says to which example of the batch each entry belongs, where that is not clear."""

    @abstractmethod
    def totals(self, first: int, step: int) -> Tensor:
        """A float64 vector whose sum over all processes is what `score` takes.  The k-th example that was added here is
        number `first + step * k` of all."""

    @abstractmethod
    def score(self, totals: Sequence[float]) -> Score:
        """The result for these totals, which may be those of several processes added together."""


class Classification(Metric):
    """Accuracy and mean cross-entropy; of many outputs also the top-5 accuracy, and with `pairs` and two outputs F1 and
    Matthews' correlation, for which class 1 is the positive one."""

    def __init__(self, device: torch.device, *, pairs: bool = False):
        # right answers, cross-entropy, examples; examples with a top 5, right ones; of two outputs [label, answer]
        self.sums = torch.zeros(9, dtype=torch.float64, device=device)
        self.pairs = pairs
        self.labels_checked = False

    def add(self, logits: Tensor, labels: Tensor, rows: Tensor | None = None) -> None:
        """Count `(batch, classes)` logits for `(batch,)` labels; Problem where they have other shapes."""
        if logits.ndim != 2 or labels.ndim != 1:
            raise Problem(
                f"a classifier gives (batch, classes) for labels (batch,), and this gives "
                f"{tuple(logits.shape)} for {tuple(labels.shape)}"
            )
        if not self.labels_checked:  # for the first batch only, because it waits for the GPU
            self.labels_checked = True
            if labels.is_floating_point():
                raise Problem("the labels are numbers with a fraction, and a classifier needs the numbers of classes")
            if int(labels.max()) >= logits.shape[1]:
                raise Problem(
                    f"the data have the label {int(labels.max())} and the model has {logits.shape[1]} outputs"
                )
        answers = logits.argmax(1)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        self.sums[:2] += torch.stack([(answers == labels).sum().double(), loss.double()])
        self.sums[2] += len(labels)
        if logits.shape[1] >= MANY_OUTPUTS:
            self.sums[3] += len(labels)
            self.sums[4] += (logits.topk(5, dim=1).indices == labels[:, None]).sum()
        if self.pairs and logits.shape[1] == 2:
            self.sums[5:] += (2 * labels + answers).bincount(minlength=4)

    def totals(self, first: int, step: int) -> Tensor:
        """The sums themselves."""
        return self.sums

    def score(self, totals: Sequence[float]) -> Score:
        """Accuracy in percent, and the mean cross-entropy.

        The standard error is the standard deviation of the accuracy that is likely after this evaluation, when all were
        equally likely before: of many examples sqrt(p (1 - p) / n), and not 0 where a few are all right.
        """
        right, loss, count, with_top5, right_in_top5, *pairs = totals
        share = (right + 1) / (count + 2)
        error = 100 * math.sqrt(share * (1 - share) / (count + 3))
        more = {TOP5.name: 100 * right_in_top5 / with_top5} if with_top5 else {}
        return Score(100 * right / count, loss / count, round(count), error, more | _of_pairs(*pairs))


def _of_pairs(both_no: float, false_yes: float, missed: float, both_yes: float) -> dict[str, float]:
    """F1 and Matthews' correlation, times 100, for these counts; nothing where nothing was counted.  Where a quotient
    does not exist, because one class was never there or never answered, it is 0."""
    if not both_no + false_yes + missed + both_yes:
        return {}
    either = 2 * both_yes + false_yes + missed
    spread = (both_yes + false_yes) * (both_yes + missed) * (both_no + false_yes) * (both_no + missed)
    matthews = (both_yes * both_no - false_yes * missed) / math.sqrt(spread) if spread else 0.0
    return {F1.name: 200 * both_yes / either if either else 0.0, MATTHEWS.name: 100 * matthews}


class NextToken(Metric):
    """Perplexity, exp of the mean negative log likelihood of a token."""

    def __init__(self, device: torch.device):
        # Over texts: likelihood, tokens, texts; their squares and the product of the first two, for the error.
        self.sums = torch.zeros(6, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, labels: Tensor, rows: Tensor | None = None) -> None:
        """Count `(tokens, vocabulary)` logits for the `(tokens,)` that came; `rows` says in which text each came."""
        likelihoods = F.cross_entropy(logits, labels, reduction="none").double()
        if rows is None:
            rows = torch.zeros_like(labels)
        texts = int(rows.max()) + 1
        nats = likelihoods.new_zeros(texts).index_add_(0, rows, likelihoods)
        tokens = rows.bincount(minlength=texts).double()
        self.sums[0] += likelihoods.sum()
        self.sums[1] += len(labels)
        self.sums[2] += texts
        self.sums[3:] += torch.stack([nats @ nats, tokens @ tokens, nats @ tokens])

    def totals(self, first: int, step: int) -> Tensor:
        """The sums themselves."""
        return self.sums

    def score(self, totals: Sequence[float]) -> Score:
        """The perplexity, infinite where it is larger than any that a file of a run may hold; and its logarithm.

        Its standard error is that between texts, because the tokens of one text are alike.
        """
        nats, tokens, texts, nats_squared, tokens_squared, product = totals
        loss = nats / tokens
        if loss > math.log(LARGEST):
            return Score(math.inf, loss, round(texts), None, {})
        value, error = math.exp(loss), None
        if texts > 1:
            spread = max(0.0, nats_squared - 2 * loss * product + loss**2 * tokens_squared)
            error = value * math.sqrt(spread * texts / (texts - 1)) / tokens
        return Score(value, loss, round(texts), error, {})


class Correlation(Metric):
    """Pearson's and Spearman's correlation of one output with labels that are numbers, and the mean squared error."""

    def __init__(self, device: torch.device, count: int):
        self.device, self.count = device, count
        self.answers: list[Tensor] = []
        self.labels: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor, rows: Tensor | None = None) -> None:
        """Keep `(batch,)` answers for `(batch,)` labels."""
        self.answers.append(logits.double())
        self.labels.append(labels.double())

    def totals(self, first: int, step: int) -> Tensor:
        """Answers and labels of all examples, with zeros where another process has them."""
        totals = torch.zeros(2, self.count, dtype=torch.float64, device=self.device)
        if self.answers:
            mine = slice(first, first + step * sum(map(len, self.answers)), step)
            totals[0, mine], totals[1, mine] = torch.cat(self.answers), torch.cat(self.labels)
        return totals.flatten()

    def score(self, totals: Sequence[float]) -> Score:
        """Both correlations times 100, and the mean squared error.  The standard error is that of Fisher's z."""
        answers, labels = torch.tensor(totals, dtype=torch.float64).reshape(2, -1)
        loss, count = float((answers - labels).square().mean()), len(labels)
        pearson = _correlation(answers, labels)
        spearman = _correlation(_ranks(answers), _ranks(labels))
        error = 100 * (1 - pearson**2) / math.sqrt(count - 3) if count > 3 else None
        return Score(100 * pearson, loss, count, error, {SPEARMAN.name: 100 * spearman})


def _correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation; 0 where one of the two is always the same, and has none."""
    a, b = a - a.mean(), b - b.mean()
    spread = float(a.norm() * b.norm())
    return float(a @ b) / spread if spread else spread  # NaN stays NaN


def _ranks(values: Tensor) -> Tensor:
    """The rank of each value; equal ones share the mean of theirs."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[place]
