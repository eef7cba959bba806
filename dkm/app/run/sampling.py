"""The texts that a language model writes, to be trained on."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import Problem
from ..tasks.language import OwnTexts
from .listener import Listener
from .order import seed_from
from .stage import Stage
from .stopping import Stopped

AT_ONCE = {"cuda": 2048, "cpu": 64}  # texts; fewer where the memory is too small


@torch.no_grad()
def write_texts(stage: Stage, model: Any, own: OwnTexts, count: int, listener: Listener) -> Tensor:
    """The `(count, length)` int32 tokens of texts that the model writes, each token drawn as the model expects it.

    Where a text ends before that length, the model goes on as it would after an end.  Every process writes a part, and
    all get all texts.  They depend on the seed and on the kind of device; a GPU computes in bfloat16.
    """
    accelerator = stage.accelerator
    processes, rank = accelerator.num_processes, accelerator.process_index
    device = accelerator.device
    tokens = torch.zeros(count, own.length, dtype=torch.int32, device=device)
    stopped = torch.zeros(1, device=device)
    at, end = count * rank // processes, count * (rank + 1) // processes
    size, mine = AT_ONCE.get(device.type, AT_ONCE["cpu"]), end - at
    listener.sampled(0, count)
    while at < end:
        if stage.check_for_stop():
            stopped.fill_(1)
            break
        size = min(size, end - at)
        torch.manual_seed(seed_from(stage.settings.seed, "texts", at))
        try:
            begun = torch.full((size, 1), own.beginning, device=device)
            with _drawing_as_it_is(model, own, device):
                tokens[at : at + size] = model.generate(begun, attention_mask=torch.ones_like(begun))
        except torch.OutOfMemoryError:
            if size == 1:
                raise
            size = -(-size // 2)
            continue
        at += size
        listener.sampled(count - (end - at) * count // max(1, mine), count)
    if accelerator.reduce(stopped).item():
        raise Stopped
    return accelerator.reduce(tokens).cpu()  # all others have zeros where one process has its texts


@contextlib.contextmanager
def _drawing_as_it_is(model: Any, own: OwnTexts, device: torch.device) -> Iterator[None]:
    """Let `model.generate` draw from the model's distribution as it is, whatever its folder says about writing."""
    from transformers import GenerationConfig

    if not getattr(model, "can_generate", bool)():
        raise Problem(f"a {type(model).__name__} cannot write texts: give text files, --data FILE.txt")
    in_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    before = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_length=own.length,
        use_cache=True,
        pad_token_id=own.beginning,
    )
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16):
            yield
    finally:
        model.generation_config = before
