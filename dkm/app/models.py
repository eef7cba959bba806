"""A model by its name, and weights into it.  Nothing is ever downloaded."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..formats.dkm_file import load
from .settings import Problem


class Pixels(NamedTuple):
    """How a model wants its images."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bilinear"


def function(spec: str) -> Callable[..., Any] | None:
    """FILE.py:FUNCTION -> the function; None where the text is something else."""
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        return None
    path = Path(file).resolve()
    if not path.is_file():
        raise Problem(f"there is no file {file}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # its own imports, of files beside it
    # under the file's own name: worker processes import it again by that name
    module = sys.modules.get(path.stem)
    if module is None or getattr(module, "__file__", None) != str(path):
        found = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(found)
        sys.modules[path.stem] = module
        try:
            found.loader.exec_module(module)
        except SyntaxError as error:
            raise Problem(f"{file} is not Python: {error.msg}, line {error.lineno}") from None
    if not callable(getattr(module, name, None)):
        raise Problem(f"{file} has no function '{name}'")
    return getattr(module, name)


def is_transformer(name: str) -> bool:
    return Path(name).is_dir()


def build(name: str, weights: str | None, classes: int | None) -> tuple[nn.Module, list[str]]:
    """The model, with its weights, and what to tell the user about it.

    `classes` None: as many outputs as the model has by itself.  Where a name alone says which weights to take
    (a transformers folder, a function of your own) `weights` may be None; "none" leaves it untrained.
    """
    own = function(name)
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
    if weights not in (None, "none"):
        fill(model, weights, classes)
    return model, []


def outline(name: str, classes: int | None) -> nn.Module:
    """The model without its values, for a plan."""
    own = function(name)
    if own is None and not is_transformer(name):
        with torch.device("meta"):
            return _named(name, "none", classes)
    return build(name, "none", classes)[0]


def _named(name: str, weights: str | None, classes: int | None) -> nn.Module:
    options = {} if classes is None else {"num_classes": classes}
    import torchvision

    if not name.startswith("timm/") and name in torchvision.models.list_models(torchvision.models):
        if name in ("googlenet", "inception_v3"):
            # their second outputs serve training from random only; pretrained ones expect another normalisation
            options |= dict(aux_logits=False, init_weights=True, transform_input=weights not in (None, "none"))
        return torchvision.models.get_model(name, weights=None, **options)
    try:
        import timm
    except ImportError:
        if name.startswith("timm/"):
            raise Problem(f"{name} needs timm: pip install timm") from None
        timm = None
    plain = name.removeprefix("timm/")
    if timm is not None and timm.is_model(plain):
        return timm.create_model(plain, pretrained=False, **options)
    import difflib

    known = [*torchvision.models.list_models(torchvision.models), *(timm.list_models() if timm else ())]
    close = difflib.get_close_matches(plain, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise Problem(
        f"there is no model '{name}': {hint}give one of torchvision or timm, a transformers folder, or FILE.py:FUNCTION"
    )


def pixels(name: str) -> Pixels:
    """timm says what each model was trained with; the others had ImageNet's mean and deviation."""
    import torchvision

    plain = name.removeprefix("timm/")
    torchvisions = not name.startswith("timm/") and name in torchvision.models.list_models(torchvision.models)
    if torchvisions or not importlib.util.find_spec("timm"):
        return Pixels()
    import timm

    wanted = timm.get_pretrained_cfg(plain) if timm.is_model(plain) else None
    return Pixels() if wanted is None else Pixels(wanted.mean, wanted.std, wanted.interpolation)


def _transformer(name: str, weights: str | None, classes: int | None) -> tuple[nn.Module, list[str]]:
    if not Path(name, "config.json").is_file():
        raise Problem(f"the folder {name} has no config.json: give a model's folder, as save_pretrained writes it")
    try:
        import transformers
    except ImportError:
        raise Problem(f"the model {name} needs transformers: pip install transformers") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    auto = transformers.AutoModelForSequenceClassification
    try:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        if classes is not None:
            config.num_labels = classes
        if weights is not None:
            model = auto.from_config(config)
            if weights != "none":
                fill(model, weights, classes)
            return model, []
        model, found = auto.from_pretrained(
            name, config=config, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise Problem(f"cannot read the model in {name}: {_first_line(error)}") from None
    if found["mismatched_keys"]:
        key, theirs, ours = max(found["mismatched_keys"], key=lambda each: (len(each[1]), each[0]))
        raise Problem(
            f"the weights in {name} do not fit: {key} is {tuple(theirs)} there and {tuple(ours)} in a model of "
            f"{classes} classes; give data of the classes that the model was trained on"
        )
    missing = sorted(found["missing_keys"])
    return model, [f"not in {name}, starts from random: {', '.join(missing)}"] if missing else []


def fill(model: nn.Module, path: str, classes: int | None = None) -> None:
    """Read weights into a model; it stays as it was where they do not fit.  `classes` explains a model's outputs."""
    state = read(path)
    own = model.state_dict()
    extra = [key for key in state if key not in own and not key.startswith(("aux1.", "aux2.", "AuxLogits."))]
    problems = [
        f"{key} is {tuple(state[key].shape)} in the file and {tuple(tensor.shape)} in the model"
        + (f" of {classes} classes (--classes)" if tensor.ndim and len(tensor) == classes else "")
        for key, tensor in own.items()
        if key in state and state[key].shape != tensor.shape
    ]
    # a counter that old files lack, and that nothing needs
    problems += [f"the file has no {k}" for k in own if k not in state and not k.endswith("num_batches_tracked")]
    problems += [f"the model has no {key}" for key in extra]
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise Problem(f"the weights in {path} do not fit the model: {problems[0]}{more}")
    model.load_state_dict({key: value for key, value in state.items() if key in own}, strict=False)


def read(path: str) -> dict[str, Tensor]:
    """A state dict from .safetensors, .dkm, or what torch.save wrote of tensors and nothing else."""
    file = Path(path)
    if not file.is_file():
        raise Problem(f"there is no weights file {path}")
    if file.suffix == ".dkm":
        return load(file)
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except SafetensorError:
        raise Problem(f"{path} is not a safetensors file, or is cut off: get it anew") from None
    except Exception as error:  # torch.load raises what comes to hand: RuntimeError, EOFError, UnpicklingError, ...
        if "GLOBAL" in str(error):  # it names something to call
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
