"""The kinds of data that a model can be trained on: one file for each, and their registration here.

    FunctionTask   a function of the user's own, FILE.py:FUNCTION
    TextTask       tables of texts
    LanguageTask   texts for a language model, or its own
    ImageTask      images in class folders or tar files

A task says everything that depends on the kind of data: how `--data` is opened, the defaults of batch size and learning
rate, the metric.  For another kind of data write a subclass of `Task` and name it in KINDS.
"""

from ..errors import Problem
from ..settings import Settings, flag
from .functions import FunctionTask
from .images import ImageTask
from .language import LanguageTask
from .task import Task
from .texts import TextTask

# The first one that recognizes the data opens it.
KINDS: tuple[type[Task], ...] = (FunctionTask, TextTask, LanguageTask, ImageTask)

__all__ = ["KINDS", "ImageTask", "LanguageTask", "Task", "open_task"]


def open_task(settings: Settings) -> Task:
    """Open what `--data` and `--eval-data` name.  Reads names and tables, but no images yet."""
    if not settings.data:
        raise Problem("no data: give --data FOLDER, a .tar file of class folders, a table, text, or FILE.py:FUNCTION")
    kind = next(kind for kind in KINDS if kind.recognizes(settings))
    for name in ("class_list", "skip_bad_images"):
        if getattr(settings, name) and not issubclass(kind, ImageTask):
            raise Problem(f"{flag(name)} is for folders of images: leave it out")
    return kind.open(settings)
