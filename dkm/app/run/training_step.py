"""One step of the optimizer on one batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...training.capture import capture
from ...training.needs import method_loss, needs
from ..tasks.task import Compared
from .listener import Listener
from .optimizer import learning_rate, make_optimizer, set_learning_rate
from .order import seed_from
from .stage import Stage


class TrainingStep:
    """Takes the steps of a training: mixup, the loss with or without a teacher, the backward pass, the optimizer.

    On one GPU, with batches of one shape, a step is launched as one CUDA graph.
    """

    def __init__(self, stage: Stage, model: nn.Module, teacher: nn.Module | None, listener: Listener):
        settings = stage.settings
        self.stage, self.settings, self.accelerator = stage, settings, stage.accelerator
        self.model, self.teacher, self.listener = model, teacher, listener
        self.highest_lr = stage.task.learning_rate(settings.optimizer) if settings.lr is None else settings.lr
        self.adds_to_the_loss = needs(model, "loss")
        optimizer = make_optimizer(settings, model, self.highest_lr)
        self.wrapped, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.compute: Callable[..., Tensor] = self._compute
        if self._can_be_a_graph():
            self.compute = capture(self._compute, self.optimizer.optimizer)

    def _can_be_a_graph(self) -> bool:
        return (
            self.accelerator.device.type == "cuda"
            and self.accelerator.num_processes == 1
            and self.stage.task.batches_have_one_shape
            and self.settings.autocast != "fp16"  # its scaler reads the gradients
            and self.settings.method == "dkm"
        )

    def take(self, batch: Any, step: int, steps: int) -> tuple[Tensor, float]:
        """Take the step of this number, counted from 0, of `steps`; returns its loss and learning rate."""
        torch.manual_seed(seed_from(self.settings.seed, "step", step, self.accelerator.process_index))  # dropout, mixup
        lr = learning_rate(self.settings, self.highest_lr, step, steps)
        set_learning_rate(self.optimizer, lr)
        self.wrapped.train()
        if self.settings.batch_norm == "frozen":
            for module in self.model.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        inputs = self._mixed(self.stage.move(batch))
        try:
            return self.compute(*inputs), lr
        except RuntimeError:
            if not isinstance(self.compute, capture) or not self.compute.capturing:
                raise
        self.listener.note("this model's steps cannot be a CUDA graph: they are launched one by one")
        self.compute = self._compute
        self.optimizer.zero_grad()
        return self.compute(*inputs), lr

    def restore_optimizer(self, state: dict[str, Any]) -> None:
        """Go on with the optimizer's state from a checkpoint."""
        self.optimizer.load_state_dict(state)
        for group in self.optimizer.param_groups:  # `capture` has changed these, and may do so again
            group["lr"] = self.highest_lr
            if "capturable" in group:
                group["capturable"] = False

    def _mixed(self, batch: Any) -> tuple[Any, ...]:
        """The arguments of `_compute`; with mixup also which example each one is mixed with, and its own share."""
        args, kwargs, labels = self.stage.task.split(batch)
        if not args:
            return kwargs, labels
        if not self.settings.mixup:
            return *args, labels
        share = torch.distributions.Beta(self.settings.mixup, self.settings.mixup).sample()
        return *args, labels, torch.randperm(len(labels)).to(labels.device), share.to(labels.device)

    def _compute(
        self, x: Tensor | dict[str, Tensor], labels: Tensor, other: Tensor | None = None, share: Tensor | None = None
    ) -> Tensor:
        """The loss, its gradient, and the step of the optimizer; returns the loss."""
        loss = self._loss(x, labels, other, share)
        if self.adds_to_the_loss:
            loss = loss + method_loss(self.model)
        self.accelerator.backward(loss)
        if self.settings.clip is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _loss(
        self, x: Tensor | dict[str, Tensor], labels: Tensor, other: Tensor | None, share: Tensor | None
    ) -> Tensor:
        settings, task = self.settings, self.stage.task
        args, kwargs = ((), x) if isinstance(x, dict) else ((x,), {})
        if other is not None and share is not None and isinstance(x, Tensor):
            args = (x * share + x[other] * (1 - share),)

        def compared(model: nn.Module) -> Compared:
            may_be_filled_up = not task.batches_have_one_shape
            return task.compared(model(*args, **kwargs), labels, may_be_filled_up=may_be_filled_up)

        with self.accelerator.autocast():
            answered = compared(self.wrapped)
            logits, wanted = answered.logits.float(), answered.labels
            weighted_labels: list[tuple[Tensor, Tensor | float]] = [(wanted, 1.0)]
            if other is not None and share is not None:
                weighted_labels = [(wanted, share), (wanted[other], 1 - share)]
            loss: Tensor | float = 0.0
            label_share = 1.0
            if self.teacher is not None:
                with torch.no_grad():
                    taught = compared(self.teacher).logits
                label_share = settings.label_share
                loss = (1 - label_share) * task.distance(logits, taught, settings.temperature)
            for target, weight in weighted_labels if label_share else ():
                loss = loss + label_share * weight * task.loss(logits, target, settings.label_smoothing)
        assert isinstance(loss, Tensor)  # there is a teacher, or the labels have the whole share
        return loss
