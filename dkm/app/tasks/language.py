"""Texts for a language model, which learns to predict each next token: files, or what the model itself writes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from .. import models
from ..errors import Problem, reason_of
from ..measures import PERPLEXITY, Measure
from ..settings import OWN_SAMPLES, Settings
from .metrics import Metric, NextToken
from .tables import find_table
from .task import Compared, Task, check_that_paths_exist, held_out
from .transformer_files import tokenizer_and_config

LENGTH = 256  # tokens of a text, with the token that begins it
SAMPLES = 4096  # texts that the model writes, where the user gives no number
NOTHING = -100  # the label of a place that has no token: PyTorch's loss leaves it out


class LanguageTask(Task):
    """Texts as tokens, from the token that begins a text to the length where all are cut.

    An example is `(tokens, labels)`, where the labels are the tokens again.  Shorter texts of a batch are filled up at
    their end, which a model that only looks back never sees.
    """

    unit: ClassVar[str] = "texts"
    measure: ClassVar[Measure] = PERPLEXITY
    default_batch_size: ClassVar[int] = 32
    default_lr: ClassVar[float] = 3e-4
    measured_count: ClassVar[int] = 8  # the logits of all their tokens are kept, as many as there are words

    def __init__(self, train: "Texts | None", evaluation: "Texts", own: "OwnTexts | None"):
        super().__init__(Texts([]) if train is None else train, evaluation, None, fill_up)
        self.own = own
        self.batches_have_one_shape = own is not None

    @classmethod
    def recognizes(cls, settings: Settings) -> bool:
        """A text file or the model's own samples; or anything but a table, where the model is a language model."""
        first, name = settings.data[0], settings.model
        if OWN_SAMPLES in settings.data or Path(first).suffix == ".txt":
            return True
        return name is not None and models.is_language_model(name) and find_table(first, "train") is None

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Read the texts and turn them into tokens; the model's own are written later, see `OwnTexts`."""
        check_that_paths_exist(replace(settings, data=tuple(path for path in settings.data if path != OWN_SAMPLES)))
        _check_files((*settings.data, *settings.eval_data))
        tokenizer = _Tokenizer(settings)
        if settings.data == (OWN_SAMPLES,):
            if not settings.eval_data:
                raise Problem("the model's own texts are for training: give a text file to measure on, --eval-data")
            evaluation = tokenizer.texts(settings.eval_data)
            own = OwnTexts(tokenizer.beginning(), tokenizer.length, settings.samples or SAMPLES)
            return cls(None, evaluation, own)._measured_on(settings.eval_data)
        if OWN_SAMPLES in settings.data:
            raise Problem(f"--data {OWN_SAMPLES} stands for all training data: leave out the other --data")
        train = tokenizer.texts(settings.data)
        if settings.eval_data:
            evaluation = train if settings.eval_data == settings.data else tokenizer.texts(settings.eval_data)
            return cls(train, evaluation, None)._measured_on(settings.eval_data)
        kept_back = set(held_out(range(len(train))))
        if not kept_back:
            raise Problem(f"{settings.data[0]} has one text, too few to hold some out: give --eval-data as well")
        evaluation = Texts([text for i, text in enumerate(train.tokens) if i in kept_back])
        task = cls(Texts([text for i, text in enumerate(train.tokens) if i not in kept_back]), evaluation, None)
        task.is_held_out = True
        return task._measured_on(settings.data)

    def _measured_on(self, places: Sequence[str]) -> Self:
        self.measured_places = list(places)
        return self

    @property
    def train_count(self) -> int:
        """How many texts there are to train on, or will be."""
        return self.own.count if self.own is not None else super().train_count

    def use_own_texts(self, tokens: Tensor) -> None:
        """Train on these, `(texts, length)`, which the model has written."""
        assert self.own is not None
        self.own.count = len(tokens)
        self.train = Texts(tokens)

    def metric(self, device: torch.device) -> Metric:
        """Perplexity."""
        return NextToken(device)

    def compared(self, output: Any, labels: Tensor, *, may_be_filled_up: bool = True) -> Compared:
        """`(batch, length, vocabulary)` logits, `(batch, length)` labels -> `(tokens, vocabulary)`, `(tokens,)`: every
        token that has one before it, and what the model said after that one."""
        logits, wanted = self.logits(output)[:, :-1], labels[:, 1:]
        if not may_be_filled_up:  # how many tokens there are is known without asking the GPU, as a CUDA graph needs it
            return Compared(logits.flatten(0, 1), wanted.flatten())
        there = wanted != NOTHING
        return Compared(logits[there], wanted[there], there.nonzero()[:, 0])


class Texts(Dataset):
    """`(tokens, labels)` for each text; the labels are the tokens again."""

    def __init__(self, tokens: Sequence[Tensor] | Tensor):
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = self.tokens[index].long()
        return tokens, tokens


@dataclass
class OwnTexts:
    """The texts that the uncompressed model is to write: each begins with `beginning` and has `length` tokens."""

    beginning: int
    length: int
    count: int


def fill_up(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The batch of some texts, as long as the longest."""
    tokens = pad_sequence([tokens for tokens, _ in items], batch_first=True)
    return tokens, pad_sequence([labels for _, labels in items], batch_first=True, padding_value=NOTHING)


class _Tokenizer:
    """Texts -> tokens, as the model in a folder reads them; Problem where it is no language model."""

    def __init__(self, settings: Settings):
        name = str(settings.model)
        if not models.is_language_model(name):
            raise Problem(
                f"{settings.data[0]} is for a language model, and {name} is not a folder with one: its config.json "
                "must name a class ...ForCausalLM"
            )
        for flag, value in (("--classes", settings.classes), ("--mixup", settings.mixup)):
            if value:
                raise Problem(f"{flag} is not for language models: leave it out")
        self.folder = name
        self.tokenizer, config = tokenizer_and_config(name)
        self.begin = first_of(self.tokenizer.bos_token_id, config.bos_token_id)
        self.end = first_of(self.tokenizer.eos_token_id, config.eos_token_id)
        self.words = config.vocab_size
        longest = getattr(config, "max_position_embeddings", None) or settings.max_length or LENGTH
        self.length = settings.max_length or min(LENGTH, longest)
        if self.length > longest:
            raise Problem(f"--max-length {self.length} is more than the {longest} tokens that {name} can read")
        if self.length < 2:
            raise Problem("--max-length must be at least 2 for a language model: a token, and the one after it")

    def beginning(self) -> int:
        """The token before a text that the model writes by itself."""
        if self.begin is None and self.end is None:
            raise Problem(
                f"{self.folder} cannot write by itself, because its tokenizer has no token that begins or ends a text: "
                "give text files, --data FILE.txt"
            )
        return self.begin if self.begin is not None else self.end

    def texts(self, paths: Sequence[str]) -> Texts:
        """The texts in these files, which are separated by blank lines."""
        found: list[Tensor] = []
        first = [] if self.begin is None else [self.begin]
        for path in paths:
            texts = _read_texts(path)
            cut = dict(add_special_tokens=False, truncation=True, max_length=self.length - len(first))
            for number, tokens in enumerate(self.tokenizer(texts, **cut)["input_ids"], 1):
                if len(first) + len(tokens) < 2:
                    raise Problem(f"text {number} of {path} has fewer than 2 tokens, so there is nothing to predict")
                if max(tokens) >= self.words:
                    raise Problem(
                        f"the tokenizer in {self.folder} gives the token {max(tokens)}, and the model knows only "
                        f"{self.words} of them: they do not belong together"
                    )
                found.append(torch.tensor(first + tokens, dtype=torch.int32))
        return Texts(found)


def first_of(*tokens: Any) -> Any:
    """The first that is there; of a list of tokens its first."""
    found = next((token for token in tokens if token is not None), None)
    return found[0] if isinstance(found, list) else found


def _check_files(paths: Sequence[str]) -> None:
    for path in paths:
        if Path(path).is_dir():
            raise Problem(f"{path} is a folder: for a language model, give text files, or --data {OWN_SAMPLES}")


def _read_texts(path: str) -> list[str]:
    """The texts of a file: what is between blank lines."""
    try:
        content = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Problem(f"{path} is not a text file in UTF-8") from None
    except OSError as error:
        raise Problem(f"cannot read {path}: {reason_of(error)}") from None
    texts = [text.strip() for text in re.split(r"\n[^\S\n]*\n", content)]
    texts = [text for text in texts if text]
    if not texts:
        raise Problem(f"{path} has no text in it")
    return texts
