"""Texts for language models: how they are read, and what is wrong with them, in a sentence."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from small_language import language_settings, make_language_model, make_language_place

from dkm.app.errors import Problem
from dkm.app.settings import Settings
from dkm.app.tasks import open_task


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_place(tmp_path_factory.mktemp("language"))


def tokens(task_data) -> list[list[int]]:
    return [text.tolist() for text in task_data.tokens]


def test_texts_begin_with_their_token_and_are_cut(place: Path, tmp_path: Path):
    (tmp_path / "a.txt").write_text("\n\nword0 word1\nword2\n\n \t\nword3\n\n\n\n" + "word4 " * 40)
    (tmp_path / "b.txt").write_text("word5 nonsense")
    files = (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    task = open_task(language_settings(place, tmp_path, data=files, eval_data=str(tmp_path / "b.txt"), max_length=5))
    assert tokens(task.train) == [[1, 3, 4, 5], [1, 6], [1, 7, 7, 7, 7], [1, 8, 0]]
    assert tokens(task.eval) == [[1, 8, 0]]
    longest = open_task(language_settings(place, tmp_path, data=files[0], max_length=None))
    assert len(longest.train.tokens[0]) == 4
    assert len(longest.train.tokens[2]) == 32  # what the model can read


def test_a_tenth_is_held_out(place: Path, tmp_path: Path):
    (tmp_path / "t.txt").write_text("\n\n".join(f"word{i}" for i in range(20)))
    task = open_task(language_settings(place, tmp_path, data=str(tmp_path / "t.txt"), eval_data=()))
    assert tokens(task.eval) == [[1, 12], [1, 22]]
    assert task.train_count == 18


def test_a_text_without_a_beginning(place: Path, tmp_path: Path):
    """Without a token for it, texts are as they are, and there is nothing that the model could begin with."""
    model = make_language_model(tmp_path / "model")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        values = json.loads((model / name).read_text())
        gone = ("bos_token", "eos_token", "bos_token_id", "eos_token_id")
        (model / name).write_text(json.dumps({k: None if k in gone else v for k, v in values.items()}))
    (tmp_path / "valid.txt").write_text("word1 word2 word3")
    with pytest.raises(Problem, match="cannot write by itself, because its tokenizer has no token that begins"):
        open_task(language_settings(tmp_path, tmp_path / "run"))
    valid = str(tmp_path / "valid.txt")
    assert tokens(open_task(language_settings(tmp_path, tmp_path / "run", data=valid)).train) == [[4, 5, 6]]
    (tmp_path / "one.txt").write_text("word1 word2\n\nword3\n")
    with pytest.raises(Problem, match=r"text 2 of .*one\.txt has fewer than 2 tokens"):
        open_task(language_settings(tmp_path, tmp_path / "run", data=str(tmp_path / "one.txt")))


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        (b"", {}, r"t\.txt has no text in it"),
        (b" \n\n\t\n", {}, r"t\.txt has no text in it"),
        (b"\xff\xfe\x00", {}, r"t\.txt is not a text file in UTF-8"),
        (b"word1", {"eval_data": ()}, "has one text, too few to hold some out"),
        (b"word1", {"max_length": 33}, "--max-length 33 is more than the 32 tokens that .* can read"),
        (b"word1", {"max_length": 1}, "--max-length must be at least 2"),
        (b"word1", {"classes": 2}, "--classes is not for language models"),
        (b"word1", {"mixup": 0.5}, "--mixup is not for language models"),
        (b"word1", {"eval_data": "nowhere.txt"}, r"there is no folder or file nowhere\.txt"),
        (b"word1", {"model": "resnet18"}, r"t\.txt is for a language model, and resnet18 is not a folder with one"),
    ],
)
def test_texts_with_problems(place: Path, tmp_path: Path, text: bytes, options: dict, sentence: str):
    (tmp_path / "t.txt").write_bytes(text)
    with pytest.raises(Problem, match=sentence):
        open_task(language_settings(place, tmp_path, **{"data": str(tmp_path / "t.txt"), **options}))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"eval_data": ()}, "the model's own texts are for training: give a text file to measure on, --eval-data"),
        ({"data": ("self", "more.txt")}, "there is no folder or file more.txt"),
        ({"data": ("self", __file__)}, "--data self stands for all training data"),
        ({"eval_data": str(Path(__file__).parent)}, "is a folder: for a language model, give text files"),
        ({"model": "resnet18"}, "self is for a language model, and resnet18 is not"),
    ],
)
def test_own_texts_with_problems(place: Path, tmp_path: Path, options: dict, sentence: str):
    with pytest.raises(Problem, match=sentence):
        open_task(language_settings(place, tmp_path, **options))


def test_models_with_problems(place: Path, tmp_path: Path):
    model = make_language_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())

    def opened(**changes) -> None:
        (model / "config.json").write_text(json.dumps(config | changes))
        open_task(language_settings(place, tmp_path, model=str(model)))

    opened()
    with pytest.raises(Problem, match=r"self is for a language model, and .*model is not a folder with one"):
        opened(architectures=["LlamaForSequenceClassification"])
    with pytest.raises(Problem, match=r"gives the token [0-9]+, and the model knows only 10 of them"):
        opened(vocab_size=10)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(Problem, match=r"cannot read the tokenizer in .*model: "):
        opened()


def test_samples_without_own_texts():
    from dkm.app.settings import make

    with pytest.raises(Problem, match="--samples is about the model's own texts: give --data self, or leave it out"):
        make(dict(data="texts.txt", samples=3))
    assert make(dict(data="self", samples=3)) == Settings(data=("self",), samples=3)


def test_a_table_is_still_for_classification(place: Path, tmp_path: Path):
    (tmp_path / "t.csv").write_text("text,label\n" + "word1,0\nword2,1\n" * 10)
    task = open_task(Settings(model=str(place / "model"), data=(str(tmp_path / "t.csv"),)))
    assert task.classes == 2
