"""Whether onnxruntime computes what PyTorch computes, for whole networks at several plans, and what a file takes.

    python -m experiments.onnx_models                                    # all of it: half an hour on 2 cores
    python -m experiments.onnx_models --model resnet18 --plan 2/1 --plan "4/4 scaled per 16 rows"
    python -m experiments.onnx_models --trained resnet50.safetensors     # a trained ResNet-50, at 224 x 224

The networks have random weights, which are clustered without training: a difference between the two programs does not
depend on what the weights are good for.  Each file is loaded in a process of its own, where the time and the memory are
measured that onnxruntime takes for it; the dense network of the same weights is loaded in the same way.

Both programs compute in float32.  So the table also has how far each of them is from the network in float64, and how
far that is from itself where nothing but the result of each layer is rounded to float32, which no program can avoid.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime
import torch
import torchvision
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import dkm
from benchmarks.table import table as as_text
from dkm.exporters.target import largest_difference, tensors_in

PLANS = ("2/1", "3/1", "5/8", "8/16", "4/4")
FINER = ("", " scaled", " per 16 rows", " scaled per 16 rows")
HEADER = ["network", "plan", "difference", "PyTorch", "onnxruntime", "rounded", "of outputs up to"]
HEADER += ["ONNX", "its tensors", ".dkm", "tensors / .dkm", "load", "memory"]

LOADER = """
import json, os, resource, sys, time
import onnxruntime

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before, start = resident(), time.perf_counter()
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
seconds, after = time.perf_counter() - start, resident()
print(json.dumps({"seconds": seconds, "bytes": after - before}))
"""


class Network(NamedTuple):
    """A network, with random weights unless it says otherwise, and an input for it."""

    model: nn.Module
    example: Any
    is_trained: bool = False


def networks() -> dict[str, Any]:
    """Functions that make a network, by name.  Those of torchvision have their full widths and depths, and get small
    pictures; those of transformers have their full form and fewer, narrower layers."""
    small = dict(vocab_size=4000, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    narrow = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    ids = {"input_ids": torch.arange(16).view(1, 16)}

    def picture(name: str, **options: Any) -> Any:
        def make() -> Network:
            model = getattr(torchvision.models, name)(**options)
            if name == "vit_b_16":  # its last layer is zero before training
                nn.init.normal_(model.heads.head.weight, std=0.02)
            return Network(model, torch.randn(1, 3, 64, 64))

        return make

    return {
        **{name: picture(name) for name in ("resnet18", "resnet50", "mobilenet_v2")},
        "vit_b_16": picture("vit_b_16", image_size=64),
        "BERT": lambda: Network(transformers.BertForMaskedLM(transformers.BertConfig(**narrow, **small)), ids),
        "GPT-2": lambda: Network(
            transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=256, n_layer=4, n_head=4, **small)), ids
        ),
        "Llama": lambda: Network(
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**narrow, **small, tie_word_embeddings=True)), ids
        ),
    }


def trained_resnet50(weights: Path) -> Network:
    """The original ResNet-50, whose stages begin with a 1 x 1 convolution of stride 2, with weights of Keras'."""
    model = torchvision.models.resnet50()
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    model.load_state_dict(load_file(weights))
    return Network(model, torch.randn(1, 3, 224, 224), is_trained=True)


class Errors(NamedTuple):
    """Largest absolute differences from the network in float64."""

    pytorch: float
    onnxruntime: float
    rounded: float  # of itself, if the result of each layer is rounded to float32


@torch.no_grad()
def errors(make: Any, example: Any, folder: Path) -> Errors:
    """Of the network in folder/model.dkm, and of folder/model.onnx."""
    model = make().model.eval()
    dkm.load(folder / "model.dkm", into=model)
    args, kwargs = as_inputs(example)
    own = tensors_in(model(*args, **kwargs))[0]
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    feed = dict(zip(names, args, strict=False)) | kwargs
    theirs = torch.from_numpy(session.run(None, {name: feed[name].numpy() for name in names})[0])
    model, args = model.double(), tuple(each.double() for each in args)
    exact = tensors_in(model(*args, **kwargs))[0]
    for module in model.modules():
        if not any(module.children()):
            module.register_forward_hook(_as_float32)
    rounded = tensors_in(model(*args, **kwargs))[0]
    return Errors(*(largest_difference(each, exact) for each in (own, theirs, rounded)))


def _as_float32(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output.float().double() if isinstance(output, Tensor) and output.is_floating_point() else output


def loaded(file: Path) -> tuple[float, int]:
    """Seconds and bytes of resident memory that onnxruntime takes to load a file."""
    done = subprocess.run([sys.executable, "-c", LOADER, str(file)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return found["seconds"], found["bytes"]


def outputs_up_to(model: nn.Module, example: Any) -> float:
    """The largest absolute output.  An untrained network may lose its input on the way; then nothing is compared."""
    (args, kwargs), outputs = as_inputs(example), []
    with torch.no_grad():
        for inputs in (args, tuple(-each for each in args)):
            words = {key: value.flip(-1) if outputs else value for key, value in kwargs.items()}
            outputs.append(tensors_in(model(*inputs, **words))[0])
    if not (outputs[0] - outputs[1]).abs().max() > 1e-3:
        raise SystemExit("the outputs do not depend on the inputs: such a network shows nothing")
    return float(outputs[0].abs().max())


def as_inputs(example: Any) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """By position and by name."""
    return ((example,), {}) if isinstance(example, Tensor) else ((), example)


def measure(name: str, make: Any, plan: str, folder: Path) -> list[str]:
    """A row of the table: compress, export, compare, load."""
    torch.manual_seed(0)
    model, example, is_trained = make()
    model.eval()
    dkm.compress_(model, f"all:{plan}", tau=1.0)
    # pictures: batch norm keeps the activations of random weights in range
    if isinstance(example, Tensor) and not is_trained:
        dkm.recalibrate_(model, [torch.randn(16, *example.shape[1:])])
    largest = outputs_up_to(model, example)
    packed = dkm.save(model, folder / "model.dkm")
    # not the 1e-4 that is usual: the table shall say how far
    report = dkm.export(model, folder / "model.onnx", to="onnx", example=example, tolerance=1.0)
    tensors = sum(row.bytes for row in report.rows)
    if report.dense:
        raise SystemExit(f"{name} at {plan}: {report.dense[0].name} is dense, {report.dense[0].why}")
    seconds, memory = loaded(folder / "model.onnx")
    return [
        name,
        plan,
        f"{report.checked.difference:.1e}",
        *(f"{each:.1e}" for each in errors(make, example, folder)),
        f"{largest:.2g}",
        f"{report.bytes:,}",
        f"{tensors:,}",
        f"{packed:,}",
        f"{tensors / packed:.3f}",
        f"{seconds:.2f} s",
        f"{memory / 1e6:.0f} MB",
    ]


def dense(name: str, make: Any, folder: Path) -> list[str]:
    """The row of the network without compression."""
    torch.manual_seed(0)
    model, example, _ = make()
    args, kwargs = as_inputs(example)
    config = getattr(model, "config", None)
    if config is not None:
        config.use_cache = False
    torch.onnx.export(model.eval(), args, folder / "dense.onnx", kwargs=kwargs, verbose=False, external_data=False)
    seconds, memory = loaded(folder / "dense.onnx")
    size = (folder / "dense.onnx").stat().st_size
    return [name, "dense", *[""] * 5, f"{size:,}", "", "", "", f"{seconds:.2f} s", f"{memory / 1e6:.0f} MB"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.onnx_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = networks()
    parser.add_argument("--model", action="append", choices=known, help="may be repeated; without: all")
    parser.add_argument("--plan", action="append", help="after `all:`; may be repeated; without: all, with scales, ...")
    parser.add_argument("--trained", type=Path, metavar="FILE", help="weights of ResNet-50: this network alone")
    given = parser.parse_args(arguments)
    if given.trained:
        known = {"resnet50, trained": lambda: trained_resnet50(given.trained)}
    plans = given.plan or [f"{plan}{finer}" for finer in FINER for plan in PLANS]
    rows = []
    for name in given.model or known:
        with tempfile.TemporaryDirectory() as folder:
            for plan in ("dense", *plans):
                start = time.perf_counter()
                if plan == "dense":
                    rows.append(dense(name, known[name], Path(folder)))
                else:
                    rows.append(measure(name, known[name], plan, Path(folder)))
                print(*rows[-1], f"({time.perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    print(as_text(HEADER, rows))


if __name__ == "__main__":
    main()
