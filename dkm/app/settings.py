"""The settings of a run: declared once, here; the command's flags, the config files and the run folder all follow.

A config file is TOML or YAML with a key for each flag, `batch-size = 64`.  Flags win over the file, the file over
the defaults.
"""

import contextlib
import dataclasses
import difflib
import json
import math
import shlex
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..foundation.errors import DKMError


class Problem(DKMError):
    """What a user can put right.  The message is one sentence: what is wrong, and what to do."""


def _setting(default: Any, help: str, panel: str, *, choices: tuple[str, ...] = (), least: float | None = None) -> Any:
    return field(default=default, metadata=dict(help=help, panel=panel, choices=choices, least=least))


_MODEL, _TRAINING, _CLUSTERING, _DATA, _RUNNING = "Model and data", "Training", "Clustering", "Reading data", "Running"


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on.  None: chosen from the rest, and said in the output."""

    model: str | None = _setting(
        None, "a torchvision model, timm/NAME, a transformers folder, or FILE.py:FUNCTION", _MODEL
    )
    weights: str | None = _setting(None, "a file: .safetensors, .pth or .dkm; or none, to start from random", _MODEL)
    data: tuple[str, ...] = _setting(
        (),
        "a folder of class folders, .tar files of them, a .parquet, .tsv or .csv table, or FILE.py:FUNCTION; "
        "may be repeated",
        _MODEL,
    )
    eval_data: tuple[str, ...] = _setting(
        (), "the same, to measure the accuracy on; without: DATA/val, or a tenth of DATA", _MODEL
    )
    plan: str | None = _setting(None, "which layers, how finely: 'cv:4/4, fc:8/4'", _MODEL)
    target_size: str | None = _setting(
        None, "choose bits and dim within 1.0MB or 40kB, for what the plan leaves open", _MODEL
    )
    out: str | None = _setting(None, "the folder of the run; must not exist yet, or be empty", _MODEL)

    epochs: int = _setting(10, "of training", _TRAINING, least=0)
    batch_size: int | None = _setting(None, "in each process; without: 64 images or 32 texts", _TRAINING, least=1)
    optimizer: str = _setting("adamw", "", _TRAINING, choices=("adamw", "adam", "sgd"))
    lr: float | None = _setting(
        None, "at its highest; without: 3e-4, 5e-5 for text, 0.008 with sgd", _TRAINING, least=0
    )
    schedule: str = _setting("cosine", "of the learning rate", _TRAINING, choices=("cosine", "linear", "constant"))
    warmup: float = _setting(0.0, "the share of the training in which the learning rate rises", _TRAINING, least=0)
    weight_decay: float = _setting(0.0, "", _TRAINING, least=0)
    momentum: float = _setting(0.9, "of sgd", _TRAINING, least=0)
    clip: float | None = _setting(None, "the largest norm of the gradient", _TRAINING, least=0)
    label_smoothing: float = _setting(0.0, "", _TRAINING, least=0)
    teacher: str = _setting(
        "none", "self: learn from the model as it was, needs no labels", _TRAINING, choices=("none", "self")
    )
    temperature: float = _setting(1.0, "of the teacher's distribution", _TRAINING, least=0)
    label_share: float = _setting(
        0.0, "with a teacher: the share of the loss that is from the labels", _TRAINING, least=0
    )
    mixup: float = _setting(0.0, "images: mix pairs, by Beta(mixup, mixup)", _TRAINING, least=0)
    batch_norm: str = _setting(
        "train", "frozen: re-estimate the statistics once, and train with those", _TRAINING, choices=("train", "frozen")
    )
    recalibrate: int = _setting(
        3200, "on how many examples to re-estimate batch norm's statistics; 0: not at all", _TRAINING, least=0
    )
    eval_every: int = _setting(1, "epochs from one evaluation to the next", _TRAINING, least=1)

    method: str = _setting("dkm", "how to cluster while training", _CLUSTERING)
    tau: str = _setting("auto", "auto, learn, a number, geometric:HOT:COLD, ...", _CLUSTERING)
    eps: float = _setting(1e-4, "the iterations end when no centroid moves farther", _CLUSTERING, least=0)
    max_iter: int = _setting(5, "iterations of a clustering, at most", _CLUSTERING, least=1)
    gradient: str = _setting("unrolled", "", _CLUSTERING, choices=("unrolled", "last", "implicit"))

    classes: int | None = _setting(None, "outputs of the model; without: the classes of the data", _DATA, least=1)
    image_size: int = _setting(224, "pixels, of the square that the model sees", _DATA, least=1)
    resize: int | None = _setting(
        None, "pixels, of the shorter side before cropping; without: 8/7 of the size", _DATA, least=1
    )
    augment: str = _setting(
        "light",
        "light: crops and flips at the scale of evaluation; medium, imagenet: crops of at least 35 %, 8 % of the image",
        _DATA,
        choices=("none", "light", "medium", "imagenet"),
    )
    text_columns: str | None = _setting(None, "one or two, 'question,sentence'; without: those that hold text", _DATA)
    label_column: str = _setting("label", "", _DATA)
    max_length: int = _setting(128, "tokens", _DATA, least=1)
    workers: int = _setting(0, "processes that read data", _DATA, least=0)

    autocast: str = _setting("no", "", _RUNNING, choices=("no", "bf16", "fp16"))
    device: str = _setting("auto", "", _RUNNING, choices=("auto", "cpu"))
    seed: int = _setting(0, "", _RUNNING, least=0)
    checkpoint_every: float = _setting(60.0, "seconds from one checkpoint to the next", _RUNNING, least=0)


FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
# What may differ when a run is resumed: it changes how, not what.
FREE = ("workers", "checkpoint_every")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def kind(name: str) -> type:
    """str, int, float or tuple: what a setting is, None aside."""
    hint = FIELDS[name].type
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next(typing.get_origin(part) or part for part in parts if part is not types.NoneType)


def make(*layers: dict[str, Any]) -> Settings:
    """Settings from dicts, later ones win; every value checked."""
    values: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            name = key.replace("-", "_")
            if name not in FIELDS:
                close = difflib.get_close_matches(name, FIELDS, n=1)
                hint = f"did you mean {close[0].replace('_', '-')}?" if close else "see dkm compress --help"
                raise Problem(f"there is no setting '{key}': {hint}")
            values[name] = _checked(name, value)
    settings = Settings(**values)
    for name in ("label_share", "warmup", "label_smoothing"):
        if getattr(settings, name) > 1:
            raise Problem(f"{flag(name)} is a share, from 0 to 1, and not {getattr(settings, name):g}")
    for name in ("temperature", "clip"):
        if getattr(settings, name) == 0:
            raise Problem(f"{flag(name)} must be more than 0")
    for name in ("label_share", "temperature"):
        if settings.teacher == "none" and getattr(settings, name) != FIELDS[name].default:
            raise Problem(f"{flag(name)} is about a teacher: give --teacher self, or leave it out")
    if settings.seed >= 2**63:
        raise Problem(f"--seed must be less than 2^63, and not {settings.seed}")
    return settings


def _checked(name: str, value: Any) -> Any:
    wanted, rules = kind(name), FIELDS[name].metadata
    if value is None and FIELDS[name].default is None:
        return None
    if wanted is tuple:
        value = (value,) if isinstance(value, str) else value
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise Problem(f"{flag(name)} must be text, or a list of texts, and not {value!r}")
    if name == "tau" and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)  # a number in a config file
    if name in ("autocast", "weights", "teacher") and value is False:
        value = "no" if name == "autocast" else "none"  # YAML reads an unquoted `no` as false
    if wanted is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            value = float(value)  # text: YAML takes 1e-3 for that
    if not isinstance(value, wanted) or isinstance(value, bool) or (wanted is float and not math.isfinite(value)):
        words = {str: "text", int: "a whole number", float: "a number"}
        raise Problem(f"{flag(name)} must be {words[wanted]}, and not {value!r}")
    if rules["choices"] and value not in rules["choices"]:
        raise Problem(f"{flag(name)} must be one of {', '.join(rules['choices'])}, and not '{value}'")
    if rules["least"] is not None and value < rules["least"]:
        raise Problem(f"{flag(name)} must be at least {rules['least']}, and not {value}")
    return value


def read(path: Path) -> dict[str, Any]:
    """A config file, TOML or YAML by its ending."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Problem(f"{path} is not a text file: name a .toml or .yaml file") from None
    except OSError as error:
        raise Problem(f"cannot read the config file {path}: {error.strerror}") from None
    if path.suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError:
            raise Problem(f"{path}: YAML needs pyyaml; pip install pyyaml, or write TOML") from None
        try:
            values = yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise Problem(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    else:
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise Problem(f"{path} is not TOML: {error}") from None
    if not isinstance(values, dict):
        raise Problem(f"{path} must hold a key for each setting, such as epochs = 10")
    return values


def as_toml(settings: Settings) -> str:
    """Every setting, a line each; those that are None are absent."""
    lines = []
    for name in FIELDS:
        value = getattr(settings, name)
        if value is not None:
            value = list(value) if isinstance(value, tuple) else value
            lines.append(f"{name.replace('_', '-')} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def as_command(settings: Settings) -> str:
    """The command line that makes these settings."""
    words = ["dkm", "compress"]
    for name, declared in FIELDS.items():
        value = getattr(settings, name)
        if value != declared.default:
            for item in value if isinstance(value, tuple) else (value,):
                words += [flag(name), str(item)]
    return shlex.join(words)
