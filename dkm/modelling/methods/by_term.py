"""What the methods share that train the weights as they are, and draw them into clusters by a term of the loss."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...clustering.options import MethodOptions, StartOptions, option
from ...clustering.vectors import compute_dtype, from_vectors, to_vectors
from .by_vectors import ByVectors


@dataclass(frozen=True, kw_only=True)
class TermOptions(StartOptions):
    """What these methods take."""

    strength: float = option(5.0, "how strongly the term pulls at the end of the training", least=0)
    first: float = option(0.01, "the part of that strength with which it begins", least=1e-9)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None and self.first != 1:
            raise ValueError(
                f"the strength grows from first={self.first} of itself over the training: say how many optimizer "
                "steps you will train, steps=<an integer of at least 1>, got steps=None; or give first=1"
            )


class Term(NamedTuple):
    """A term of the loss, of strength 1."""

    value: Tensor  # ()
    pull: Tensor  # (n, d): its gradient, which is about the distance of each vector from its cluster


class ByTerm(ByVectors):
    """A method whose weights train as they are, with a term of the loss that pulls them to clusters.

    The pull is about the distance of a weight from its cluster, times the strength, in the units of the weight: SGD
    takes the part `lr * strength` of the way in a step, whatever the scale of the weights and of their rows.  The
    strength grows geometrically over the training, so that the weights have gathered when they are snapped.
    """

    Options: ClassVar[type[MethodOptions]] = TermOptions
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    options: TermOptions

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options: Any):
        super().__init__(weight, bits, dim, **options)
        self.steps = self.options.steps

    @abstractmethod
    def term(self, V: Tensor, C: Tensor) -> Term:
        """The term of the `(n, d)` vectors, for the centroids `(k, d)` to start from.  Changes nothing."""

    def loss_term(self, weight: Tensor) -> Tensor:
        """`()`: the term, with gradient.  Where rows have scales, its value is that for the mean of their squares."""
        now = self.moment(weight)
        with torch.autocast(weight.device.type, enabled=False), torch.no_grad():
            plain = weight.detach()
            value, pull = self.term(to_vectors(self.scaled(plain), self.dim).to(compute_dtype(plain.dtype)), now.start)
            units = self.unscaled(torch.ones_like(plain, dtype=pull.dtype))
            # The weight is `units` times what was clustered, and so is its way to the cluster.  Without the square, the
            # gradient would be that way divided by the square of the unit: rows of small weights would run away.
            value, G = value * units.square().mean(), units * from_vectors(pull, plain.shape)
        # the value, with the gradient that is known: nothing of the size of n k is kept for it
        return self.strength(now.step) * (value + (G * (weight - plain)).sum())

    def strength(self, step: Tensor) -> Tensor | float:
        """Of the term, after `step` steps."""
        if not self.anneals or self.steps is None:
            return self.options.strength
        return self.options.strength * self.options.first ** (1 - (step / self.steps).clamp(max=1))

    @property
    def anneals(self) -> bool:
        """Whether the strength changes over `steps`."""
        return self.options.first != 1

    def set_steps(self, steps: int) -> None:
        """The strength is at its end after so many optimizer steps."""
        self.steps = steps
