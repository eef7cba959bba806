"""The settings of a run, declared once: the command's flags, config files and config.toml in the run folder follow.

A config file is TOML or YAML with a key for each flag, such as `batch-size = 64`.  A flag wins over the file, and the
file wins over the defaults.  The clustering options take their defaults, limits and explanations from
`dkm.clustering.options`.
"""

import contextlib
import dataclasses
import difflib
import json
import math
import re
import shlex
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..clustering import temperature
from ..clustering.options import DKMOptions
from ..formats.entropy import CODINGS, check_coding
from ..modelling.methods import METHODS, named
from ..plans.target_size import ALLOCATORS
from .errors import Problem, as_problems
from .own_code import load_function


def _setting(
    default: Any, help: str, panel: str, *, word: str = "", choices: tuple[str, ...] = (), least: float | None = None
) -> Any:
    """A field of Settings.  `panel` is its heading in --help, `word` what stands for the value there, and
    `meanings.MEANINGS` says more of some values.  A value is one of `choices`, or at least `least`."""
    return field(default=default, metadata=dict(help=help, panel=panel, word=word, choices=choices, least=least))


def _clustering_setting(name: str, help: str, *, word: str = "") -> Any:
    """A field of Settings whose default and limits are those of DKMOptions; the words are for the command's users."""
    declared = next(option for option in dataclasses.fields(DKMOptions) if option.name == name)
    return field(
        default=declared.default, metadata={**declared.metadata, "help": help, "panel": _CLUSTERING, "word": word}
    )


NO_TRACKER = "none"
TRACKERS = (NO_TRACKER, "tensorboard", "wandb")
_MODEL, _TRAINING, _CLUSTERING, _DATA, _RUNNING = "Model and data", "Training", "Clustering", "Reading data", "Running"


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on.  Where a value is None, the run chooses it from the others and prints it."""

    model: str | None = _setting(
        None,
        "a name of torchvision (resnet18), timm/NAME, a folder of transformers, or a function of yours that returns "
        "the model, FILE.py:FUNCTION",
        _MODEL,
        word="MODEL",
    )
    weights: str | None = _setting(
        None,
        "the trained weights: a .safetensors, .pth or .dkm file; or none, to start from random ones",
        _MODEL,
        word="FILE",
    )
    weights_key: str | None = _setting(
        None, "which weights of the file, if it holds several, such as state_dict_ema", _MODEL, word="KEY"
    )
    data: tuple[str, ...] = _setting(
        (),
        "the examples: a folder with a folder of images for each class, .tar files of such folders, a .parquet, "
        ".tsv or .csv table of texts, FILE.py:FUNCTION, or for a language model text files or self (what the model "
        "writes); may be repeated",
        _MODEL,
        word="PATH",
    )
    eval_data: tuple[str, ...] = _setting(
        (), "what to measure on, in the same forms; without: DATA/val, or a tenth of DATA", _MODEL, word="PATH"
    )
    plan: str | None = _setting(
        None, "which layers become how small, such as 'cv:4/4, fc:8/4'; dkm plan shows it", _MODEL, word="PLAN"
    )
    target_size: str | None = _setting(
        None,
        "1.0MB or 40kB: choose the bits of all layers that --plan leaves open for a file of this size",
        _MODEL,
        word="SIZE",
    )
    allocator: str = _setting("dkm", "how bits are chosen for --target-size", _MODEL, choices=tuple(ALLOCATORS))
    episodes: int | None = _setting(
        None, "with --allocator haq: how many plans it tries; without: 600", _MODEL, word="N", least=1
    )
    out: str | None = _setting(
        None, "the folder for the file, the report and the log; a new or empty one", _MODEL, word="FOLDER"
    )
    coding: str = _setting("packed", "how the file holds the codes", _MODEL, choices=CODINGS)

    epochs: int = _setting(10, "how often to train on all of the data; 0 is --no-training", _TRAINING, least=0)
    batch_size: int | None = _setting(
        None, "examples per step, in each process; without: 64 images or 32 texts", _TRAINING, least=1
    )
    optimizer: str = _setting("adamw", "what makes the steps", _TRAINING, choices=("adamw", "adam", "sgd"))
    lr: float | None = _setting(
        None,
        "the learning rate at its highest; without: 3e-4, 5e-5 to classify texts, 0.008 with sgd",
        _TRAINING,
        least=0,
    )
    schedule: str = _setting(
        "cosine", "how the learning rate falls", _TRAINING, choices=("cosine", "linear", "constant")
    )
    warmup: float = _setting(
        0.0, "the share of the training in which the learning rate rises, such as 0.1", _TRAINING, least=0
    )
    weight_decay: float = _setting(0.0, "how strongly the optimizer pulls weights to 0", _TRAINING, least=0)
    momentum: float = _setting(0.9, "of sgd", _TRAINING, least=0)
    clip: float | None = _setting(None, "the largest norm of the gradient; without: any", _TRAINING, least=0)
    label_smoothing: float = _setting(
        0.0, "the share of each label that goes to all classes, such as 0.1", _TRAINING, least=0
    )
    teacher: str = _setting("none", "whom to learn from", _TRAINING, choices=("none", "self"))
    temperature: float = _setting(
        1.0, "of the teacher's answers; above 1, unlikely classes get more weight", _TRAINING, least=0
    )
    label_share: float = _setting(
        0.0, "with a teacher: the share of the loss that comes from the labels", _TRAINING, least=0
    )
    reconstruct: int = _setting(
        0,
        "with a teacher: first train block by block, so often on --reconstruct-examples; few images then suffice",
        _TRAINING,
        word="N",
        least=0,
    )
    reconstruct_examples: int = _setting(
        2048, "training examples for that, augmented; more than there are: several versions of each", _TRAINING, least=1
    )
    reconstruct_lr: float = _setting(3e-3, "the learning rate of that, at its highest", _TRAINING, least=0)
    mixup: float = _setting(
        0.0, "of images: train on mixtures of two, by Beta(X, X), such as 0.2; 0: never", _TRAINING, least=0
    )
    batch_norm: str = _setting(
        "train", "which statistics batch norm trains with", _TRAINING, choices=("train", "frozen")
    )
    recalibrate: int = _setting(
        3200,
        "how many examples re-estimate batch norm's statistics before each evaluation; 0: not at all",
        _TRAINING,
        least=0,
    )
    eval_every: int = _setting(1, "epochs from one evaluation to the next", _TRAINING, least=1)

    method: str = _setting("dkm", "how weights are clustered while they train", _CLUSTERING)
    tau: str = _clustering_setting(
        "tau",
        "the temperature of dkm and gumbel: how soft the mixtures of centroids are; a unit is "
        "a tensor's mean squared error after k-means",
        word="TAU",
    )
    eps: float = _clustering_setting("eps", "iterations end when no centroid moves farther than this")
    max_iter: int = _clustering_setting("max_iter", "iterations of k-means in one step, at most")
    gradient: str = _clustering_setting("gradient", "how dkm's gradient goes back through its iterations")
    method_option: tuple[str, ...] = _setting(
        (),
        "an option that the method has of its own, as dkm methods NAME shows; may be repeated",
        _CLUSTERING,
        word="NAME=VALUE",
    )

    classes: int | None = _setting(
        None, "how many outputs the model has; without: one for each class of the data", _DATA, least=1
    )
    class_list: str | None = _setting(
        None,
        "a text file with the name of a class folder in each line, in the order of the model's outputs; without: "
        "alphabetical, or by their numbers",
        _DATA,
        word="FILE",
    )
    skip_bad_images: bool = _setting(False, "leave out images that cannot be read, instead of stopping", _DATA)
    image_size: int = _setting(224, "pixels of the square that the model sees", _DATA, least=1)
    resize: int | None = _setting(
        None, "pixels of an image's shorter side before it is cropped; without: 8/7 of --image-size", _DATA, least=1
    )
    augment: str = _setting(
        "light", "how images are varied in training", _DATA, choices=("none", "light", "medium", "imagenet")
    )
    text_columns: str | None = _setting(
        None, "one or two of a table, 'question,sentence'; without: those that hold text", _DATA, word="NAMES"
    )
    label_column: str = _setting("label", "the column of a table that has the classes", _DATA, word="NAME")
    max_length: int | None = _setting(
        None,
        "tokens that are read of a text; without: 128, of a language model 256 or what it can read",
        _DATA,
        least=1,
    )
    samples: int | None = _setting(
        None, "with --data self: how many texts the model writes; without: 4096", _DATA, least=1
    )
    workers: int = _setting(0, "processes that read data, besides the one that trains", _DATA, least=0)

    autocast: str = _setting(
        "no", "16-bit arithmetic: faster on a GPU, less exact", _RUNNING, choices=("no", "bf16", "fp16")
    )
    device: str = _setting(
        "auto", "auto (a GPU where there is one), cpu, cuda, or cuda:1 for a GPU by its number", _RUNNING, word="DEVICE"
    )
    seed: int = _setting(0, "of everything random", _RUNNING, least=0)
    tracker: str = _setting(NO_TRACKER, "where to log the figures besides log.jsonl", _RUNNING, word="NAME")
    checkpoint_every: float = _setting(60.0, "seconds from one checkpoint to the next", _RUNNING, least=0)


_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")
LONGEST_CONFIG = 1_000_000  # characters
OWN_SAMPLES = "self"  # as --data: what the language model itself writes
FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
# These change how a run is computed, not what comes out.
CHANGEABLE_ON_RESUME = ("workers", "checkpoint_every", "tracker")


def flag(name: str) -> str:
    """The flag of a setting: `batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


def kind(name: str) -> type:
    """The type of a setting: str, int, float, bool or tuple.  That it may also be None is left out."""
    hint = FIELDS[name].type
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next(typing.get_origin(part) or part for part in parts if part is not types.NoneType)


def make(*layers: dict[str, Any]) -> Settings:
    """Settings from dicts, of which later ones win.  Every value is checked, and a wrong one raises Problem."""
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
    _check_training(settings)
    _check_clustering(settings)
    return settings


def clustering_options(settings: Settings, steps: int) -> dict[str, Any]:
    """What `compress_` takes besides the plan and the method, for a training of so many optimizer steps."""
    return _method_options(settings) | dict(
        steps=max(1, steps),
        tau=temperature.parse(settings.tau),
        eps=settings.eps,
        max_iter=settings.max_iter,
        gradient=settings.gradient,
        seed=settings.seed,
    )


def _method_options(settings: Settings) -> dict[str, Any]:
    """The options of the method by name, as numbers where they are some; Problem where one has a flag of its own."""
    options: dict[str, Any] = {}
    for text in settings.method_option:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise Problem(f"--method-option is NAME=VALUE, such as p=0.2, and not '{text}'")
        if name in (*FIELDS, "steps"):
            instead = "the run knows the steps" if name == "steps" else f"give {flag(name)}"
            raise Problem(f"--method-option is for options without a flag, and not for {name}: {instead}")
        if name in options:
            raise Problem(f"--method-option gives {name} twice: leave one out")
        options[name] = as_number(value.strip())
    return options


def as_number(text: str) -> int | float | str:
    """The number that a text is, or the text."""
    for number in (int, float):  # an integer is both
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def _check_training(settings: Settings) -> None:
    """Raise Problem where settings of the training are out of their range or do not go together."""
    for name in ("label_share", "warmup", "label_smoothing"):
        if getattr(settings, name) > 1:
            raise Problem(f"{flag(name)} is a share, from 0 to 1, and not {getattr(settings, name):g}")
    for name in ("temperature", "clip", "reconstruct_lr"):
        if getattr(settings, name) == 0:
            raise Problem(f"{flag(name)} must be more than 0")
    for name in ("reconstruct_examples", "reconstruct_lr"):
        if not settings.reconstruct and getattr(settings, name) != FIELDS[name].default:
            raise Problem(f"{flag(name)} is about training block by block: give --reconstruct N, or leave it out")
    for name in ("label_share", "temperature", "reconstruct"):
        if settings.teacher == "none" and getattr(settings, name) != FIELDS[name].default:
            raise Problem(f"{flag(name)} is about a teacher: give --teacher self, or leave it out")
    if settings.weights_key is not None and settings.weights in (None, "none"):
        raise Problem("--weights-key is about a file of weights: give --weights FILE, or leave it out")
    if settings.episodes is not None and settings.allocator != "haq":
        raise Problem("--episodes is about haq: give --allocator haq, or leave it out")
    if settings.samples is not None and OWN_SAMPLES not in settings.data:
        raise Problem(f"--samples is about the model's own texts: give --data {OWN_SAMPLES}, or leave it out")
    if not _DEVICE.fullmatch(settings.device):
        raise Problem(
            f"--device must be auto, cpu, cuda, or cuda:1 for a GPU by its number, and not '{settings.device}'"
        )
    if settings.tracker not in TRACKERS and ".py:" not in settings.tracker:
        raise Problem(f"--tracker must be {', '.join(TRACKERS)} or FILE.py:FUNCTION, and not '{settings.tracker}'")
    if settings.seed >= 2**63:
        raise Problem(f"--seed must be less than 2^63, and not {settings.seed}")


def _check_clustering(settings: Settings) -> None:
    """Raise Problem unless the method exists and takes these options, and codes can be coded: before any data is
    opened."""
    if settings.method not in METHODS and settings.model is not None:
        load_function(settings.model)  # the user's own file may register a method
    with as_problems():
        named(settings.method, clustering_options(settings, steps=1))
        check_coding(settings.coding)


def _checked(name: str, value: Any) -> Any:
    """The value of one setting, in its type; Problem where it is none that the setting may have."""
    wanted, rules = kind(name), FIELDS[name].metadata
    if value is None and FIELDS[name].default is None:
        return None
    if any("\0" in text for text in (value if isinstance(value, list | tuple) else [value]) if isinstance(text, str)):
        raise Problem(f"{flag(name)} holds the character NUL, which no name or path can have")
    if wanted is tuple:
        value = (value,) if isinstance(value, str) else value
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise Problem(f"{flag(name)} must be text, or a list of texts, and not {value!r}")
    if wanted is bool:
        if isinstance(value, bool):
            return value
        raise Problem(f"{flag(name)} must be true or false, and not {value!r}")
    if name == "tau" and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)  # a number in a config file
    if name in ("autocast", "weights", "teacher", "tracker") and value is False:
        value = "no" if name == "autocast" else "none"  # YAML reads an unquoted `no` as false
    if wanted is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            value = float(value)  # YAML reads 1e-3 as text
    infinite = isinstance(value, float) and not math.isfinite(value)
    if not isinstance(value, wanted) or isinstance(value, bool) or infinite:
        words = {str: "text", int: "a whole number", float: "a number"}
        raise Problem(f"{flag(name)} must be {words[wanted]}, and not {value!r}")
    if rules["choices"] and value not in rules["choices"]:
        raise Problem(f"{flag(name)} must be one of {', '.join(rules['choices'])}, and not '{value}'")
    if rules["least"] is not None and value < rules["least"]:
        raise Problem(f"{flag(name)} must be at least {rules['least']}, and not {value}")
    return value


def read(path: Path) -> dict[str, Any]:
    """The values in a config file; its ending tells TOML from YAML."""
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read(LONGEST_CONFIG + 1)
    except UnicodeDecodeError:
        raise Problem(f"{path} is not a text file: name a .toml or .yaml file") from None
    except OSError as error:
        raise Problem(f"cannot read the config file {path}: {error.strerror}") from None
    if len(text) > LONGEST_CONFIG:
        raise Problem(f"{path} is too long for a config file: it has more than {LONGEST_CONFIG:,} characters")
    if path.suffix in (".yaml", ".yml"):
        values = _read_yaml(text, path)
    else:
        try:
            values = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise Problem(f"{path} is not TOML: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise Problem(f"{path} must hold a key for each setting, such as epochs = 10")
    return values


def _read_yaml(text: str, path: Path) -> Any:
    """What a YAML document holds.  Aliases are refused: a few lines of them can stand for more than fits in memory."""
    try:
        import yaml
    except ImportError:
        raise Problem(f"{path}: YAML needs pyyaml; pip install pyyaml, or write TOML") from None
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise Problem(f"{path} has an alias (*name), which config files may not have: write the value out")
        return yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Problem(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def as_toml(settings: Settings) -> str:
    """A line for every setting; those that are None are left out."""
    lines = []
    for name in FIELDS:
        value = getattr(settings, name)
        if value is not None:
            value = list(value) if isinstance(value, tuple) else value
            lines.append(f"{name.replace('_', '-')} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def as_command(settings: Settings) -> str:
    """The command line that gives these settings."""
    words = ["dkm", "compress"]
    for name, declared in FIELDS.items():
        value = getattr(settings, name)
        if value is True:
            words.append(flag(name))
        elif value != declared.default:
            for item in value if isinstance(value, tuple) else (value,):
                words += [flag(name), str(item)]
    return shlex.join(words)
