"""dkm export: a compressed file in another format."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from ...exporters import TARGETS, export, named, option_types
from .. import models, run, settings
from ..errors import Problem, as_problems
from ..own_code import load_function
from ..run_folder import RunFolder
from ..screen import Screen
from ..tasks.batches import batches
from .application import command

WORDS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


@command(
    "export",
    "dkm export run --to safetensors",
    "dkm export run/model.dkm --to onnx --model resnet18 --option dynamic=batch --out resnet18.onnx",
)
def export_command(
    source: Annotated[Path, typer.Argument(metavar="FILE_OR_RUN", help="a .dkm file, or the folder of a run")],
    to: Annotated[str, typer.Option(metavar="|".join(TARGETS), help="the format")],
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", help="where to write; without: beside the .dkm file")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="as for compress --model; a run knows its own")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="outputs of --model; without: its own")
    ] = None,
    example: Annotated[
        str | None,
        typer.Option(
            metavar="INPUT",
            help="an input to check the result with: a shape such as 1x3x224x224, or FILE.py:FUNCTION; a run takes one "
            "of its data",
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, metavar="X", help="how far outputs may be from the model's [default: 0.0001]")
    ] = 1e-4,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="for onnx: dynamic=batch; may be repeated")
    ] = None,
) -> None:
    """Write a compressed model in another format, and check it against the model.

    safetensors has dense weights, for any program; onnx is for onnxruntime, and coreml for Apple's devices: both stay
    about as small as the .dkm file.
    """
    with as_problems():
        options = _options(to, option or [])
        target = named(to, options)
    if example is not None and not target.needs_example:
        raise Problem(f"--to {to} takes no --example: the values themselves are compared")
    is_run = source.is_dir()
    if is_run and (model is not None or classes is not None):
        raise Problem(f"{source} is a run, which knows its model: leave --model and --classes out")
    file = RunFolder(source).read_model() if is_run else source
    if not file.is_file():
        raise Problem(f"there is no file {source}")
    plain: nn.Module | None = None
    given: Any = None
    if is_run and target.needs_model:
        plain, given = _of_run(source, example)
    elif model is not None:
        plain = models.build(model, "none", classes).model
        given = _example(example, model, plain) if target.needs_example else None
    elif target.needs_model:
        raise Problem(f"--to {to} needs the model that {source} belongs to: give --model NAME")
    with as_problems():
        report = export(
            file, out or file.with_suffix(target.suffix), to, model=plain, example=given, tolerance=tolerance, **options
        )
    print(f"{report.table(shutil.get_terminal_size((100, 24)).columns)}\n\n{report.summary()}")


def _of_run(folder: Path, example: str | None) -> tuple[nn.Module, Any]:
    """The model of a run, and an input: a single one of those that it was evaluated on, unless another one is given."""
    stored = RunFolder(folder).read_settings()
    base = {name: getattr(stored, name) for name in settings.FIELDS} | {
        "weights": "none",
        "weights_key": None,
        "device": "cpu",
    }
    with Screen() as screen:
        stage, model = run.open_stage(settings.make(base), screen, trains=False)
    if example is not None:
        return model, _example(example, str(stored.model), model)
    batch = next(iter(batches(stage.task, stage.task.eval, [[(0, 0)]], stage.settings)))
    inputs = stage.task.split(stage.move(batch))
    return model, inputs.kwargs or inputs.args


def _example(text: str | None, name: str, model: nn.Module) -> Any:
    """The input that `--example` names; without it, a usual one for a model of this name."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    own = load_function(text) if text else None
    if own is not None:
        made = own()
        if not isinstance(made, Tensor | Mapping | Iterable):
            raise Problem(f"{text} must return a tensor, a tuple of tensors or a dict of them: the inputs of the model")
        return made
    if text is None:
        if load_function(name) is not None:
            raise Problem("which input does the model take? give --example 1x3x224x224, or FILE.py:FUNCTION")
        text = "1x16" if vocabulary else "1x3x224x224"
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise Problem(f"--example must be a shape such as 1x3x224x224, or FILE.py:FUNCTION, got {text}")
    shape = tuple(map(int, sizes))
    if vocabulary and len(shape) == 2:
        return {"input_ids": torch.randint(vocabulary, shape, generator=generator)}
    return torch.randn(shape, generator=generator)


def _options(to: str, texts: list[str]) -> dict[str, Any]:
    """NAME=VALUE texts as values of the types that the target declares.  A name that it has not is left a text: the
    error about it comes with the names that there are."""
    types = option_types(to) if to in TARGETS else {}
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option must be NAME=VALUE, got {text}")
        found[name] = _typed(text, value, types.get(name, str))
    return found


def _typed(text: str, value: str, kind: Any) -> Any:
    if kind is bool:
        if value.lower() not in WORDS:
            raise ValueError(f"--option {text}: the value must be yes or no")
        return WORDS[value.lower()]
    if kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"--option {text}: the value must be a number") from None
    return value
