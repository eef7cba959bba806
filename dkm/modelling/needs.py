"""What a method needs from a training besides the weight, and the line with which the training gives it.

A class says so in `needs`.  The training calls the functions of `training/needs.py`, and these call the methods of
`Needs` below.  What was not given is an error, in the first step that could have done something with it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..foundation.errors import NeedError

NEEDS = {
    "batches": "before the training, dkm.calibrate_(model, batches) with a few batches of its data",
    "loss": "in every step, loss = loss + dkm.method_loss(model) before loss.backward()",
}


class Needs(nn.Module):
    """The part of a clustered weight that knows what its method needs, and what it was given.

    One more buffer, of methods that need something: `was_given`, (needs,) uint8, so that a checkpoint knows.
    """

    needs: ClassVar[tuple[str, ...]] = ()  # of NEEDS
    sees_gradients: ClassVar[bool] = False  # whether batches are shown by gradients, not by what comes to the modules
    method: ClassVar[str] = ""  # the name that it is registered under
    layers: ClassVar[tuple[type[nn.Module], ...]] = ()  # the only ones it can be used in, where `compute` is its own

    step: Tensor
    was_given: Tensor

    def begin_needs(self, device: torch.device) -> None:
        """Nothing was given yet."""
        self.given: set[str] = set()
        self.read_at: int | None = None  # the version of the weight that training has read last
        self.changes = 0  # how often it has read another one
        self.dense = False  # whether reading the weight gives the weight itself: while batches are shown
        if self.needs:
            self.register_buffer("was_given", torch.zeros(len(self.needs), dtype=torch.uint8, device=device))

    def give(self, need: str) -> None:
        """The training has given this."""
        if need not in self.given:
            self.given.add(need)
            self.was_given[self.needs.index(need)] = 1

    def needs_loaded(self) -> None:
        """A checkpoint was loaded: its training may have given what this one has not."""
        self.read_at, self.changes = None, 0
        if self.needs and not self.was_given.is_meta:
            self.given = {need for need, given in zip(self.needs, self.was_given.tolist(), strict=True) if given}

    def check_needs(self, weight: Tensor) -> None:
        """NeedError where the training goes on without what the method needs.  Nothing waits for a device.

        A term of the loss is missing where training reads a weight that has changed twice since its first read: PyTorch
        counts the changes of a tensor.  One of them may be another one than the step of an optimizer.
        """
        if "batches" in self.needs and "batches" not in self.given and self.training:
            raise self._lack("batches")
        if "loss" in self.needs and "loss" not in self.given and not torch.compiler.is_compiling():
            if self.training and weight.requires_grad and torch.is_grad_enabled():
                self.changes += self.read_at not in (None, weight._version)
                self.read_at = weight._version
            if self.changes > 1:
                raise self._lack("loss")

    def check_given(self) -> None:
        """NeedError where a result is asked for, and the method never had what it needs."""
        for need in self.needs:
            if need not in self.given and (need != "loss" or int(self.step)):
                raise self._lack(need)

    def _lack(self, need: str) -> NeedError:
        return NeedError(f'method="{self.method}" needs a line that this training does not have: {NEEDS[need]}')

    # --- what a method with needs or layers implements

    def observe(self, module: nn.Module, name: str, inputs: tuple[Any, ...]) -> None:
        """A batch has come to the module that computes with the weight; `name` is that of the weight."""
        raise NotImplementedError

    def observe_gradient(self, gradient: Tensor) -> None:
        """A batch has come, and this is the derivative of a random number by the weight, see `training.distill.probe`:
        the mean of its squares is what a change of each value does to the answers."""
        raise NotImplementedError

    def calibrate(self, weight: Tensor, name: str) -> None:
        """All batches have come."""
        raise NotImplementedError

    @classmethod
    def calibrate_together(cls, shown: Sequence[tuple["Needs", Tensor, str]]) -> None:
        """All batches have come, for all weights of a model."""
        for clustered, weight, name in shown:
            clustered.calibrate(weight, name)

    def loss_term(self, weight: Tensor) -> Tensor:
        """`()`: what this weight adds to the loss, with gradient."""
        raise NotImplementedError

    def compute(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """What one of the `layers` outputs in training instead of y, which it has computed from x."""
        raise NotImplementedError
