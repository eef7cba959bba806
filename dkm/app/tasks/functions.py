"""Data from a function of the user's own, FILE.py:FUNCTION."""

from typing import ClassVar

from ..errors import Problem
from ..own_code import load_function
from ..settings import Settings
from .regression import Regression, check_for_regression
from .task import Task


class FunctionTask(Task):
    """The two datasets that the function returns."""

    unit: ClassVar[str] = "examples"

    @classmethod
    def recognizes(cls, settings: Settings) -> bool:
        """One FILE.py:FUNCTION, and nothing else."""
        return len(settings.data) == 1 and load_function(settings.data[0]) is not None

    @classmethod
    def open(cls, settings: Settings) -> "FunctionTask":
        """Call the function, which gives the data to evaluate on as well."""
        name = settings.data[0]
        if settings.eval_data not in ((), settings.data):
            raise Problem(f"{name} gives the data to evaluate on, too: leave out --eval-data")
        make = load_function(name)
        assert make is not None  # see `recognizes`
        pair = make()
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(hasattr(part, "__getitem__") for part in pair):
            raise Problem(f"{name} must return two datasets, (train, eval), each with len() and [index]")
        train, evaluation = pair
        if not len(train) or not len(evaluation):
            raise Problem(f"{name} gave an empty dataset: both, train and eval, need examples")
        if settings.classes == 1:
            check_for_regression(settings)
        task = (FunctionRegression if settings.classes == 1 else cls)(train, evaluation, settings.classes)
        task.measured_places = [f"the second dataset of {name}"]
        return task


class FunctionRegression(Regression, FunctionTask):
    """The same, with numbers to be predicted."""
