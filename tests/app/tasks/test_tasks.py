"""What a kind of data decides, and that another kind is one class and its registration."""

from typing import ClassVar, Self

import pytest
import torch
from torch.utils.data import TensorDataset

from dkm.app import tasks
from dkm.app.errors import Problem
from dkm.app.settings import FIELDS, Settings
from dkm.app.tasks import KINDS, Task, open_task
from dkm.app.tasks.images import ImageTask
from dkm.app.tasks.metrics import Classification
from dkm.app.tasks.texts import TextTask


def test_the_help_names_the_defaults_of_the_kinds():
    sizes, rates = FIELDS["batch_size"].metadata["help"], FIELDS["lr"].metadata["help"]
    assert f"{ImageTask.default_batch_size} images or {TextTask.default_batch_size} texts" in sizes
    images, texts, sgd = (f"{rate:g}" for rate in (Task.default_lr, TextTask.default_lr, Task.default_sgd_lr))
    assert [float(word.strip(",")) for word in rates.split() if word[0].isdigit()] == [
        *map(float, (images, texts, sgd))
    ]


def test_another_kind_of_data(monkeypatch: pytest.MonkeyPatch):
    class Sounds(Task):
        unit: ClassVar[str] = "sounds"
        default_lr: ClassVar[float] = 1e-3

        @classmethod
        def recognizes(cls, settings: Settings) -> bool:
            return settings.data[0].endswith(".wav")

        @classmethod
        def open(cls, settings: Settings) -> Self:
            examples = TensorDataset(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
            return cls(examples, examples, 2)

    monkeypatch.setattr(tasks, "KINDS", (Sounds, *KINDS))
    task = open_task(Settings(data=("a.wav",)))
    assert (task.unit, task.train_count, task.learning_rate("adamw"), task.learning_rate("sgd")) == (
        "sounds",
        4,
        1e-3,
        Task.default_sgd_lr,
    )


def test_the_metric_adds_up_over_batches():
    logits, labels = torch.randn(10, 3), torch.arange(10) % 3
    whole, parts = Classification(torch.device("cpu")), Classification(torch.device("cpu"))
    whole.add(logits, labels)
    for part in range(0, 10, 4):
        parts.add(logits[part : part + 4], labels[part : part + 4])
    score, again = (metric.score(metric.totals(0, 1).tolist()) for metric in (whole, parts))
    assert score.value == 10 * (logits.argmax(1) == labels).sum().item()
    assert score.examples == 10
    assert score.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert again == score._replace(loss=pytest.approx(score.loss, rel=1e-5))


@pytest.mark.parametrize(
    ("logits", "labels", "sentence"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 3]), "the data have the label 3 and the model has 3 outputs"),
        (torch.zeros(2, 3, 4), torch.tensor([0, 1]), r"this gives \(2, 3, 4\) for \(2,\)"),
    ],
)
def test_a_model_that_is_no_classifier_of_these_labels(logits: torch.Tensor, labels: torch.Tensor, sentence: str):
    with pytest.raises(Problem, match=sentence):
        Classification(torch.device("cpu")).add(logits, labels)
