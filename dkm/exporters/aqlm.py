"""Target `aqlm`: a folder that transformers loads with its own AQLM layers, where the package aqlm is installed.

AQLM's "1x8g8" is vectors of 8 weights along the input, one codebook of 256 of them, a scale for each row.  Ours are
these where a whole number of our vectors makes 8 weights and their codes fit 8 bits: 8/8, and also 4/4 and 2/2, whose
codes are then pairs and fours of ours.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..clustering.vectors import compute_dtype
from ..formats.described import Codes, Described
from .pretrained import narrowed, read_quantization, read_weights, write_folder
from .target import Checked, Job, Row, Target, largest_difference, register

VECTOR, BITS = 8, 8
CONFIG = {
    "quant_method": "aqlm",
    "in_group_size": VECTOR,
    "out_group_size": 1,
    "num_codebooks": 1,
    "nbits_per_codebook": BITS,
}
PARTS = ("codes", "codebooks", "scales")
CHECKED = "weights read back, and decoded as AQLM defines it"


@dataclass(frozen=True)
class Layer:
    """A linear layer as AQLM stores it."""

    codes: Tensor  # (out, in / 8, 1) int8: numbers from 128 on are negative
    codebooks: Tensor  # (1, 256, 1, 8)
    scales: Tensor  # (out, 1, 1, 1)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """`(out, in)`: what AQLM's kernels compute with, for a model of this dtype."""
        wide = compute_dtype(dtype)
        vectors = self.codebooks[0, :, 0].to(wide)[self.codes[:, :, 0].long() % 2**BITS]
        return (vectors * self.scales[:, :, 0].to(wide)).to(dtype).flatten(1)


@register("aqlm")
@dataclass(frozen=True)
class AQLM(Target):
    """Linear layers with codes that AQLM can hold; everything else is dense, in 16 bits where these hold it exactly."""

    suffix: ClassVar[str] = ".aqlm"
    needs_example: ClassVar[bool] = False
    max_shard_size: str = "5GB"  # of a file with weights

    def write(self, job: Job, path: Path) -> list[Row]:
        layers, reasons = _fitting(job)
        state: dict[str, Tensor] = {}
        rows = []
        for each in job.tensors:
            if each.name in layers:
                layer, prefix = layers[each.name], each.name.removesuffix("weight")
                state |= {f"{prefix}{part}": getattr(layer, part) for part in PARTS}
                size = sum(getattr(layer, part).nbytes for part in PARTS)
                rows.append(Row.of(each, "8-bit codes and a codebook", size))
            else:
                values = _dense(each)
                state |= dict.fromkeys((each.name, *each.aliases), values)
                written = str(values.dtype).removeprefix("torch.")
                rows.append(Row.of(each, written, values.nbytes, reasons.get(each.name, "")))
        config = CONFIG | {"linear_weights_not_to_quantize": _not_to_quantize(job.plain_model, layers)}
        write_folder(job.plain_model, path, state, config, self.max_shard_size)
        return rows

    def check(self, job: Job, path: Path) -> Checked:
        kept = set(read_quantization(path)["linear_weights_not_to_quantize"])
        state = read_weights(path)
        furthest = 0.0
        for each in job.tensors:
            own, prefix = each.values(), each.name.removesuffix("weight")
            name = next((name for name in (each.name, *each.aliases) if name in state), None)
            if name is not None:
                found = state[name].to(own.dtype)
            elif f"{prefix}codes" in state and each.name not in kept:
                found = Layer(*(state[f"{prefix}{part}"] for part in PARTS)).weight(own.dtype)
            else:
                return Checked(math.inf, f"{each.name} is not in the folder")
            same = found.shape == own.shape and torch.equal(found, own)
            furthest = max(furthest, 0.0 if same else largest_difference(found, own))
        return Checked(furthest, CHECKED)


def aqlm_layer(each: Described) -> Layer | str:
    """The weight of a linear layer as AQLM stores it, or why it cannot."""
    content = each.content
    assert isinstance(content, Codes)
    out, width = each.shape
    bits, dim = content.bits, content.dim
    if content.outliers is not None:
        return f"AQLM stores no value besides codes, and this has {content.outliers}"
    if VECTOR % dim or bits * (VECTOR // dim) > BITS:
        return f"AQLM's codes have 8 bits for 8 weights, and this is {content.spec.label}"
    if width % VECTOR:
        return f"AQLM's vectors lie along the inputs, and 8 does not divide {width}"
    if each.grouping.count > 1:
        return "AQLM has one codebook for a layer, and this has one for each group"
    joined, n = VECTOR // dim, out * width // dim
    shifts = torch.arange(joined) * bits
    codes = (content.codes(0, n).view(-1, joined) << shifts).sum(1)
    each_code = torch.arange(2**BITS)[:, None] >> shifts & 2**bits - 1  # of a number that stands for several
    books = content.centroids.cpu().float().view(-1, dim)[each_code].flatten(1)
    scales = torch.ones(out) if content.scales is None else content.scales.cpu().float()
    sixteen = torch.bfloat16 if each.dtype == torch.bfloat16 else torch.float16
    layer = Layer(
        codes.to(torch.uint8).view(torch.int8).view(out, width // VECTOR, 1),
        narrowed(books, sixteen).view(1, 2**BITS, 1, VECTOR),
        narrowed(scales * 2.0**content.exponent, sixteen).view(out, 1, 1, 1),
    )
    if not torch.equal(layer.weight(each.dtype), each.values()):
        return "its weights are too small or too large for a codebook and scales"
    return layer


def _fitting(job: Job) -> tuple[dict[str, Layer], dict[str, str]]:
    """The layers that AQLM can hold, by the names of their weights, and why it cannot hold other clustered tensors."""
    linear = {f"{name}.weight" for name, module in job.plain_model.named_modules() if type(module) is nn.Linear}
    layers: dict[str, Layer] = {}
    reasons: dict[str, str] = {}
    for each in job.tensors:
        if not isinstance(each.content, Codes):
            continue
        if each.name not in linear:
            reasons[each.name] = "AQLM is for linear layers"
        elif each.aliases:
            reasons[each.name] = "AQLM's layers cannot share a weight"
        elif isinstance(own := aqlm_layer(each), str):
            reasons[each.name] = own
        else:
            layers[each.name] = own
    # transformers compares the names of modules with the beginnings and ends of those that it is to leave alone
    while True:
        kept = tuple(_dense_linears(job.plain_model, layers))
        caught = [name for name in layers if name.removesuffix(".weight").endswith(kept) or name.startswith(kept)]
        if not caught:
            return layers, reasons
        for name in caught:
            del layers[name]
            reasons[name] = "its name begins or ends as that of a dense layer, which transformers would confuse"


def _dense_linears(model: nn.Module, layers: dict[str, Layer]) -> list[str]:
    """The names of all linear layers, also of those that transformers takes for some, that are not in `layers`."""
    modules = model.named_modules(remove_duplicate=False)
    return [name for name, each in modules if isinstance(each, nn.Linear) and f"{name}.weight" not in layers]


def _not_to_quantize(model: nn.Module, layers: dict[str, Layer]) -> list[str]:
    """The dense linear layers: transformers 5 wants the names of modules, transformers 4 those of weights."""
    return [text for name in _dense_linears(model, layers) for text in (name, f"{name}.weight")]


def _dense(each: Described) -> Tensor:
    """The values, in 16 bits where these hold them exactly."""
    if isinstance(each.content, Tensor):
        stored: Any = each.content
        return stored.cpu().contiguous().clone()
    return narrowed(each.values().cpu(), torch.bfloat16 if each.dtype == torch.bfloat16 else torch.float16)
