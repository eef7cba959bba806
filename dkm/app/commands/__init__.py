"""The commands: a file for each, whose import adds it to `app`.  The order here is that of the help."""

# isort: off
from .application import app
from . import compress, sweep, evaluate, plan, inspect, export, run, report, compare, recipes, methods, demo, completion

__all__ = [
    "app",
    "compare",
    "completion",
    "compress",
    "demo",
    "evaluate",
    "export",
    "inspect",
    "methods",
    "plan",
    "recipes",
    "report",
    "run",
    "sweep",
]
