"""The plan that a text means."""

from ..modelling.parameters import Owned
from .rows import Plan
from .selection import apply


def plan_of(walk: list[Owned], text: str | None) -> Plan:
    """The plan that a text means for these parameters of a model."""
    return Plan(tuple(apply(walk, text)[0]))
