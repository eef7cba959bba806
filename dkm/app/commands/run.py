"""dkm run: a packed language model writes a text."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ...foundation.text import size_text
from ...modelling.packed_tensor import packed_tensors
from ...runtime.loading import load
from .. import models
from ..errors import Problem, say
from ..run_folder import RunFolder, run_of
from ..tasks.language import first_of
from ..tasks.transformer_files import tokenizer_and_config
from .application import command

TOKENS = 256  # where the user gives no number, and the model can read so many


@command(
    "run",
    "dkm run run",
    'dkm run stories.dkm --model stories15m --prompt "Once upon a time" --temperature 0.8 --seed 1',
)
def run_command(
    source: Annotated[Path, typer.Argument(metavar="FILE_OR_RUN", help="a .dkm file, or the folder of a run")],
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="the model's folder, of transformers; a run knows its own")
    ] = None,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="how the text begins", show_default=False)] = "",
    tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=f"how many to write at most [default: {TOKENS}]")
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(min=0, metavar="X", help="0: always the likeliest token; larger: more variety [default: 0.8]"),
    ] = 0.8,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="the same text again; without: another one each time")
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, or cuda [default: cpu]")] = "cpu",
) -> None:
    """Write a text with a compressed language model, which stays packed in memory.

    It needs the folder of the model for the tokenizer and the configuration, and no network.
    """
    file, name = _file_and_model(source, model)
    if not models.is_language_model(name):
        raise Problem(
            f"dkm run writes texts, and {name} is not a folder with a language model: its config.json must name a "
            "class ...ForCausalLM"
        )
    tokenizer, config = tokenizer_and_config(name)
    begun, end = _beginning(name, prompt, tokenizer, config)
    count = _room(tokens, len(begun), config)
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise Problem(f"--device {device}: this machine can compute on cpu{', cuda' * torch.cuda.is_available()}")
    network: Any = load(file, into=models.language_model_without_values(name), packed=True)
    network.to(device)
    if seed is not None:
        torch.manual_seed(seed)
    start = time.perf_counter()
    written = _write(network, tokenizer, torch.tensor([begun], device=device), count, temperature, end)
    _say_how_fast(network, written, time.perf_counter() - start)


def _file_and_model(source: Path, model: str | None) -> tuple[Path, str]:
    """The compressed file, and the folder of transformers that it belongs to."""
    folder = RunFolder(source) if source.is_dir() else run_of(source)
    if model is None and folder is not None:
        return folder.read_model(), str(folder.read_settings().model)
    if source.is_dir():
        raise Problem(f"{source} is a run, which knows its model: leave --model out")
    if not source.is_file():
        raise Problem(f"there is no run folder or file {source}")
    if model is None:
        raise Problem(f"{source} is in no run's folder, so it needs --model FOLDER as well")
    return source, model


def _beginning(name: str, prompt: str, tokenizer: Any, config: Any) -> tuple[list[int], Any]:
    """The tokens that a text begins with, as in training, and the one that ends it."""
    first = first_of(tokenizer.bos_token_id, config.bos_token_id)
    begun = ([] if first is None else [first]) + tokenizer(prompt, add_special_tokens=False)["input_ids"]
    end = first_of(tokenizer.eos_token_id, config.eos_token_id)
    if not begun:
        if end is None:
            raise Problem(f"the tokenizer in {name} has no token that begins or ends a text: give a --prompt")
        begun = [end]
    return begun, end


def _room(tokens: int | None, begun: int, config: Any) -> int:
    """How many tokens to write."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None:
        return tokens or TOKENS
    room = longest - begun
    if room < 1:
        raise Problem(f"the --prompt has {begun} tokens, and the model reads {longest}: give a shorter one")
    if tokens is not None and tokens > room:
        raise Problem(f"--tokens {tokens} is too many: after the beginning, the model has room for {room}")
    return tokens or min(TOKENS, room)


def _write(network: Any, tokenizer: Any, begun: torch.Tensor, count: int, temperature: float, end: Any) -> int:
    """Print the text while it comes into being; returns how many tokens were written."""
    from transformers import GenerationConfig, TextStreamer

    drawn = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature else dict(do_sample=False)
    network.generation_config = GenerationConfig(
        max_new_tokens=count, eos_token_id=end, pad_token_id=int(begun[0, 0]), use_cache=True, **drawn
    )
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    try:
        text = network.generate(begun, attention_mask=torch.ones_like(begun), streamer=streamer)
    except KeyboardInterrupt:
        print(flush=True)  # ends the line that was being written
        say("stopped")
        raise typer.Exit(130) from None
    return int(text.shape[1] - begun.shape[1])


def _say_how_fast(network: Any, written: int, seconds: float) -> None:
    # of tied tensors one
    held = sum(each.nbytes for each in {id(t): t for t in (*network.parameters(), *network.buffers())}.values())
    packed = len(packed_tensors(network))
    print(
        f"{written} tokens, {written / seconds:.1f} per second; the weights take {size_text(held)} of memory "
        f"({packed} tensors are packed)",
        file=sys.stderr,
    )
