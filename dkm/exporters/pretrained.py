"""Folders as `save_pretrained` of transformers writes them: configuration, weights in shards, tokenizer."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..foundation.errors import ExportError

INDEX = "model.safetensors.index.json"
TOKENIZER = (  # what AutoTokenizer and AutoProcessor read; a folder has some of them
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def write_folder(
    model: nn.Module, path: Path, state: dict[str, Tensor], quantization: Mapping[str, Any], max_shard_size: str
) -> None:
    """Write a model of transformers with other tensors than its own, which `quantization` says how to read.

    The tokenizer is copied from the folder that the model was read from.
    """
    own: Any = model
    if not all(hasattr(own, name) for name in ("save_pretrained", "config", "name_or_path")):
        raise ExportError(
            f"such a folder holds a model of transformers, with its config, and this is a {type(model).__name__}: "
            "give a model that has save_pretrained"
        )
    own.config.quantization_config = dict(quantization)
    if getattr(own.config, "use_cache", None) is False:
        own.config.use_cache = True  # training turns it off, and so does `export`; who reads the folder will generate
    try:
        own.save_pretrained(path, state_dict=state, max_shard_size=max_shard_size, save_original_format=False)
    except ValueError as error:  # a size that is none, or a configuration that transformers refuses
        raise ExportError(f"transformers cannot write the model: {error}") from error
    finally:
        del own.config.quantization_config
    for name in TOKENIZER:
        if own.name_or_path and Path(own.name_or_path, name).is_file():
            shutil.copyfile(Path(own.name_or_path, name), path / name)


def read_quantization(path: Path) -> dict[str, Any]:
    """The quantization_config of a folder."""
    found: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    return found


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder, of all its shards."""
    index = path / INDEX
    if not index.is_file():
        return load_file(path / "model.safetensors")
    files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    parts = {file: load_file(path / file) for file in set(files.values())}
    return {name: parts[file][name] for name, file in files.items()}


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in this narrower floating point where it holds them exactly; else as they are."""
    if not values.is_floating_point() or values.element_size() <= dtype.itemsize:
        return values
    narrow = values.to(dtype)
    return narrow if torch.equal(narrow.to(values.dtype), values) else values
