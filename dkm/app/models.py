"""Models by their names, and weights from files.  Nothing is ever downloaded."""

import difflib
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..formats.dkm_file import load
from .errors import Problem
from .mobilenet_v1 import mobilenet_v1
from .own_code import load_function


class Pixels(NamedTuple):
    """How a model wants its images to be normalised and resized."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bilinear"


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


def build(name: str, weights: str | None, classes: int | None) -> Built:
    """The model of this name, with its weights.

    `classes` is the number of outputs; None leaves as many as the model has by itself, and a language model as it is.
    `weights` is a file, or "none" for random ones.  It may be None where the name alone says which weights to take: a
    folder of transformers, or a function of the user's own.
    """
    own = load_function(name)
    if own is not None:
        parameters = inspect.signature(own).parameters
        key = next((key for key in ("classes", "num_classes") if key in parameters), None)
        model = own(**({key: classes} if key and classes else {}))
        if not isinstance(model, nn.Module):
            raise Problem(f"{name} must return a torch.nn.Module, and gave a {type(model).__name__}")
    elif is_transformer(name):
        return _transformer(name, weights, classes)
    else:
        model = _named(name, weights, classes)
        if weights is None:
            raise Problem(
                f"{name} needs trained weights: give --weights FILE, or --weights none to train it from random"
            )
    if weights is not None and weights != "none":
        load_weights(model, weights, classes)
    return Built(model, [])


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


def _transformer(name: str, weights: str | None, classes: int | None) -> Built:
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
            if weights != "none":
                load_weights(model, weights, classes)
            return Built(_for_training(model) if predicts_tokens else model, [])
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


def load_weights(model: nn.Module, path: str, classes: int | None = None) -> None:
    """Read a file of weights into a model.  Where they do not fit, the model stays as it was, and Problem is raised;
    its message names `classes` where that number is what does not fit."""
    state = read_weights(path)
    own = model.state_dict()
    extra = [key for key in state if key not in own and not key.startswith(("aux1.", "aux2.", "AuxLogits."))]
    problems = [
        f"{key} is {tuple(state[key].shape)} in the file and {tuple(tensor.shape)} in the model"
        + (f" of {classes} classes (--classes)" if tensor.ndim and len(tensor) == classes else "")
        for key, tensor in own.items()
        if key in state and state[key].shape != tensor.shape
    ]
    # num_batches_tracked is a counter that old files lack, and that nothing here needs.
    # A tied weight has several names, of which a file may have one.
    places = {own[key].data_ptr() for key in state if key in own}
    absent = [key for key in own if key not in state and own[key].data_ptr() not in places]
    problems += [f"the file has no {key}" for key in absent if not key.endswith("num_batches_tracked")]
    problems += [f"the model has no {key}" for key in extra]
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise Problem(f"the weights in {path} do not fit the model: {problems[0]}{more}")
    model.load_state_dict({key: value for key, value in state.items() if key in own}, strict=False)


def read_weights(path: str) -> dict[str, Tensor]:
    """The state dict in a .safetensors file, a .dkm file, or one that torch.save wrote and that holds only tensors."""
    file = Path(path)
    if not file.is_file():
        raise Problem(f"there is no weights file {path}")
    if file.suffix == ".dkm":
        loaded = load(file)
        assert isinstance(loaded, dict)
        return loaded
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except SafetensorError:
        raise Problem(f"{path} is not a safetensors file, or is cut off: get it anew") from None
    except Exception as error:  # torch.load raises many kinds: RuntimeError, EOFError, UnpicklingError, ...
        if "GLOBAL" in str(error):  # the file names something to call
            raise Problem(
                f"{path} holds more than tensors and cannot be read safely: save the state_dict alone, "
                "torch.save(model.state_dict(), FILE)"
            ) from None
        raise Problem(f"{path} is not a weights file that torch.save wrote, or is cut off") from None
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise Problem(f"{path} does not hold a state_dict: names and tensors")
    return {key.removeprefix("module."): value for key, value in state.items()}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
