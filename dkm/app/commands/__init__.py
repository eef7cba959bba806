"""The commands: a file for each, whose import adds it to `app`.  The order here is that of the help."""

# isort: off
from .application import app
from . import compress, evaluate, plan, inspect, export, report, recipes, demo

__all__ = ["app", "compress", "demo", "evaluate", "export", "inspect", "plan", "recipes", "report"]
