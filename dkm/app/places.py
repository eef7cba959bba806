"""Settings that mean the same in every working directory, and how to show them to a stranger."""

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from .own_code import names_function
from .settings import OWN_SAMPLES, Settings


def located(settings: Settings) -> Settings:
    """The settings with every path absolute; where the run itself goes, `out`, is not one that it reads."""
    weights, data, evaluation = settings.weights, settings.data, settings.eval_data
    return replace(
        settings,
        model=None if settings.model is None else _model(settings.model),
        weights=weights if weights in (None, "none") else _absolute(str(weights)),
        data=tuple(each if each == OWN_SAMPLES else _absolute(each) for each in data),
        eval_data=tuple(map(_absolute, evaluation)),
        class_list=None if settings.class_list is None else _absolute(settings.class_list),
        tracker=_absolute(settings.tracker) if names_function(settings.tracker) else settings.tracker,
    )


def without_places(text: str, settings: dict[str, Any]) -> str:
    """The text with only the last part of each absolute path that these settings name: the report is for strangers."""
    named: set[str] = set()
    for key in ("model", "weights", "data", "eval-data", "class-list", "out", "tracker"):
        value = settings.get(key)
        named.update(str(each) for each in (value if isinstance(value, list) else [value]) if each)
    for name in sorted(filter(os.path.isabs, named), key=len, reverse=True):
        for written in (name, json.dumps(name, ensure_ascii=False)[1:-1], shlex.quote(name)[1:-1]):
            text = text.replace(written, Path(name).name)
    return text


def _model(name: str) -> str:
    """Names of torchvision and timm are no paths."""
    return _absolute(name) if names_function(name) or Path(name).is_dir() else name


def _absolute(path: str) -> str:
    return os.path.abspath(path)  # FILE.py:FUNCTION as well: the colon stays in the last part
