"""A small language model for the tests: a Llama of two layers with random weights, and a tokenizer of 60 words."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dkm.app.settings import Settings, make

WORDS = [f"word{i}" for i in range(57)]


def make_language_model(folder: Path, *, tied: bool = True, length: int = 32) -> Path:
    """Write the model and its tokenizer, as `save_pretrained` does."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=length,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,  # so that the model prefers some words to others
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {word: token for token, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return folder


def write_texts(path: Path, count: int, *, seed: int = 0, longest: int = 24) -> Path:
    """A file of texts of 1 to `longest` words in two lines, with one or two blank lines between two of them."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        words = rng.choices(WORDS[:20], k=rng.randint(1, longest))
        half = len(words) // 2
        texts.append(" ".join(words[:half]) + "\n" + " ".join(words[half:]))
    path.write_text("".join(text.strip() + "\n\n" + "\n" * (i % 2) for i, text in enumerate(texts)))
    return path


def language_settings(place: Path, out: Path, **options) -> Settings:
    """A run of the model in `place/model`, on its own texts unless `options` say otherwise."""
    given = dict(
        model=str(place / "model"),
        data="self",
        eval_data=str(place / "valid.txt"),
        plan="all:3",
        out=str(out),
        teacher="self",
        epochs=2,
        batch_size=8,
        max_length=16,
        lr=1e-2,
        device="cpu",
    )
    given |= options
    if given["data"] == "self":
        given.setdefault("samples", 27)
    return make(given)


def make_language_place(place: Path) -> Path:
    """Fill a folder with what a run needs."""
    make_language_model(place / "model")
    write_texts(place / "train.txt", 40, seed=1)
    write_texts(place / "valid.txt", 10, seed=2)
    return place
