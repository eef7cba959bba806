"""Models by their names, with weights from files.  Nothing is ever downloaded."""

import difflib
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .checkpoint_files import load_weights
from .errors import Problem
from .mobilenet_v1 import mobilenet_v1
from .own_code import load_function


class Pixels(NamedTuple):
    """How a model wants its images to be normalised and resized."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bilinear"


LUMA = (0.299, 0.587, 0.114)  # how much of red, green and blue is in a grey picture of Pillow's


class Built(NamedTuple):
    """A model, and what the user should know about how it was made."""

    model: nn.Module
    notes: list[str]


def is_transformer(name: str) -> bool:
    """Whether a model's name is that of a folder, as transformers writes them."""
    return Path(name).is_dir()


def is_language_model(name: str) -> bool:
    """Whether the folder of this name holds a model of transformers that predicts the next token."""
    file = Path(name, "config.json")
    if not is_transformer(name) or not file.is_file():
        return False
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # `build` says what is wrong
    classes = config.get("architectures") if isinstance(config, dict) else None
    return isinstance(classes, list) and any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in classes)


def build(name: str, weights: str | None, classes: int | None, weights_key: str | None = None) -> Built:
    """The model of this name, with its weights.

    `classes` is the number of outputs; None leaves as many as the model has by itself, and a language model as it is.
    `weights` is a file, or "none" for random ones.  It may be None where the name alone says which weights to take: a
    folder of transformers, or a function of the user's own.  `weights_key` says which weights of the file.
    """
    own = load_function(name)
    if own is not None:
        parameters = inspect.signature(own).parameters
        key = next((key for key in ("classes", "num_classes") if key in parameters), None)
        model = own(**({key: classes} if key and classes else {}))
        if not isinstance(model, nn.Module):
            raise Problem(f"{name} must return a torch.nn.Module, and gave a {type(model).__name__}")
    elif is_transformer(name):
        return _transformer(name, weights, classes, weights_key)
    else:
        model = _named(name, weights, classes)
        if weights is None:
            raise Problem(
                f"{name} needs trained weights: give --weights FILE, or --weights none to train it from random"
            )
    notes = [] if weights in (None, "none") else load_weights(model, str(weights), classes, weights_key)
    return Built(model, notes)


def model_without_values(name: str, classes: int | None) -> nn.Module:
    """The model for a plan, which needs names and shapes only: where possible without memory for its values."""
    own = load_function(name)
    if own is None and not is_transformer(name):
        with torch.device("meta"):
            return _named(name, "none", classes)
    return build(name, "none", classes).model


def language_model_without_values(name: str) -> nn.Module:
    """The language model in a folder of transformers: parameters without memory, buffers with their values."""
    import transformers
    from accelerate import init_empty_weights

    try:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        with init_empty_weights(include_buffers=False):
            return transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, RuntimeError) as error:
        raise Problem(f"cannot make the model in {name}: {_first_line(error)}") from None


def _named(name: str, weights: str | None, classes: int | None) -> nn.Module:
    """The model of torchvision or timm that has this name, or MobileNet-v1, with random values."""
    options: dict[str, Any] = {} if classes is None else {"num_classes": classes}
    if name == "mobilenet_v1":  # which torchvision lacks
        return mobilenet_v1(**options)
    import torchvision

    if not name.startswith("timm/") and name in torchvision.models.list_models(torchvision.models):
        if name in ("googlenet", "inception_v3"):
            # Their second outputs serve training from random only.  Pretrained ones expect another normalisation.
            options |= dict(aux_logits=False, init_weights=True, transform_input=weights not in (None, "none"))
        return torchvision.models.get_model(name, weights=None, **options)
    timm: Any = None
    if importlib.util.find_spec("timm"):
        timm = importlib.import_module("timm")
    elif name.startswith("timm/"):
        raise Problem(f"{name} needs timm: pip install timm")
    plain = name.removeprefix("timm/")
    if timm is not None and timm.is_model(plain):
        return timm.create_model(plain, pretrained=False, **options)
    known = [*known_names(), *(timm.list_models() if timm else ())]
    close = difflib.get_close_matches(plain, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise Problem(
        f"there is no model '{name}': {hint}give one of torchvision or timm, a transformers folder, or FILE.py:FUNCTION"
    )


def known_names() -> list[str]:
    """The names of models that need nothing but torchvision."""
    import torchvision

    return ["mobilenet_v1", *torchvision.models.list_models(torchvision.models)]


def pixels(name: str) -> Pixels:
    """How a model wants its images: what timm knows of its models; for others ImageNet's mean and deviation."""
    import torchvision

    plain = name.removeprefix("timm/")
    is_torchvisions = not name.startswith("timm/") and name in torchvision.models.list_models(torchvision.models)
    if is_torchvisions or not importlib.util.find_spec("timm"):
        return Pixels()
    import timm

    wanted = timm.get_pretrained_cfg(plain) if timm.is_model(plain) else None
    return Pixels() if wanted is None else Pixels(wanted.mean, wanted.std, wanted.interpolation)


def takes_grey(model: nn.Module, size: int) -> bool:
    """Whether a model of images, `size` pixels wide and high, takes one channel: by its first layer."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)), None)
    if isinstance(first, nn.Conv2d):
        return first.in_channels == 1
    return first is not None and first.in_features == size**2


def grey(looks: Pixels) -> Pixels:
    """The same for grey images, whose brightness is that of ITU-R 601: the channels' mean and deviation, weighted as
    the channels are.  The deviation is exact where the channels rise and fall together, as they nearly do."""
    if len(looks.mean) == 1:
        return looks
    mean, std = (sum(w * x for w, x in zip(LUMA, each, strict=True)) for each in (looks.mean, looks.std))
    return Pixels((mean,), (std,), looks.interpolation)


def _transformer(name: str, weights: str | None, classes: int | None, weights_key: str | None) -> Built:
    """The model in a folder of transformers, with the folder's weights unless others are given."""
    if not Path(name, "config.json").is_file():
        raise Problem(f"the folder {name} has no config.json: give a model's folder, as save_pretrained writes it")
    try:
        import transformers
    except ImportError:
        raise Problem(f"the model {name} needs transformers: pip install transformers") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    predicts_tokens = classes is None and is_language_model(name)
    auto: Any = (
        transformers.AutoModelForCausalLM if predicts_tokens else transformers.AutoModelForSequenceClassification
    )
    try:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        if classes is not None:
            config.num_labels = classes
        packed = (getattr(config, "quantization_config", None) or {}).get("quant_method") == "dkm"
        if packed:
            from ..integrations import quantizer  # noqa: F401  # registers itself with transformers
        if packed and weights is not None:
            del config.quantization_config  # the model gets dense weights
        if weights is not None:
            model = auto.from_config(config)
            notes = [] if weights == "none" else load_weights(model, weights, classes, weights_key)
            return Built(_for_training(model) if predicts_tokens else model, notes)
        model, found = auto.from_pretrained(
            name, config=config, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
        model = model.dequantize() if packed else model
    except (OSError, ValueError, RuntimeError) as error:
        raise Problem(f"cannot read the model in {name}: {_first_line(error)}") from None
    if found["mismatched_keys"]:
        key, theirs, ours = max(found["mismatched_keys"], key=lambda each: (len(each[1]), each[0]))
        raise Problem(
            f"the weights in {name} do not fit: {key} is {tuple(theirs)} there and {tuple(ours)} in a model of "
            f"{classes} classes; give data of the classes that the model was trained on"
        )
    missing = sorted(found["missing_keys"])
    model = _for_training(model) if predicts_tokens else model
    return Built(model, [f"not in {name}, starts from random: {', '.join(missing)}"] if missing else [])


def _for_training(model: Any) -> nn.Module:
    """A language model in float32, because small steps are lost in 16 bits; without the cache for writing texts."""
    model.config.use_cache = False
    return model.float()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
