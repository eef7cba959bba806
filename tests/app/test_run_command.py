"""dkm run: a language model writes a text from its file, packed."""

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")
import transformers
from small_language import language_settings, make_language_model

import dkm
from dkm.app import cli
from dkm.app.commands import run as command
from dkm.app.run_folder import RunFolder, plan_file
from dkm.runtime.packed import PackedWeight


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a language model, its compressed file, and a run that has both."""
    place = tmp_path_factory.mktemp("language")
    make_language_model(place / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    plan = dkm.compress_(model, "all:4/2", tau=1.0)
    dkm.save(model, place / "small.dkm")
    folder = RunFolder(place / "run")
    folder.create(language_settings(place, place / "run", data=str(place / "model")), plan_file(plan, "all:4/2"))
    shutil.copy(place / "small.dkm", folder.model)
    return place


@pytest.fixture
def place(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def call(*arguments: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", *arguments])
    assert end.value.code == code


def test_a_file_writes_and_the_same_seed_writes_the_same(place: Path, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        call("small.dkm", "--model", "model", "--prompt", "word3 word7", "--tokens", "20", "--seed", seed)
        printed = capsys.readouterr()
        assert printed.out.startswith("word3 word7 ")
        assert "15 tensors are packed" in printed.err
        texts.append(printed.out)
    assert texts[0] == texts[1] != texts[2]


def test_it_writes_what_the_dense_model_writes(place: Path, capsys):
    call("run", "--temperature", "0", "--tokens", "5")
    dense = transformers.AutoModelForCausalLM.from_pretrained("model")
    dkm.load("small.dkm", into=dense)
    begun, options = torch.tensor([[1]]), dict(do_sample=False, max_new_tokens=5, pad_token_id=1)
    text = dense.eval().generate(begun, attention_mask=torch.ones_like(begun), **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    assert capsys.readouterr().out.split() == tokenizer.decode(text[0], skip_special_tokens=True).split()


def test_a_run_and_its_file_know_their_model_and_nothing_is_decoded_whole(place: Path, capsys, monkeypatch):
    def refused(weight):
        raise AssertionError("the whole weight is decoded")

    monkeypatch.setattr(PackedWeight, "dense", refused)
    for source in ("run", "run/model.dkm"):
        call(source, "--tokens", "3")
        assert capsys.readouterr().out.strip()


def test_stopping_leaves_a_clean_line(place: Path, capsys, monkeypatch):
    def stopped(*arguments, **options):
        print("word1", end="")
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", stopped)
    call("run", code=130)
    printed = capsys.readouterr()
    assert printed.out == "word1\n"
    assert printed.err == "dkm: stopped\n"


PROBLEMS = {
    ("small.dkm",): "small.dkm is in no run's folder, so it needs --model FOLDER as well",
    ("absent.dkm",): "there is no run folder or file absent.dkm",
    ("run", "--model", "model"): "run is a run, which knows its model: leave --model out",
    ("model",): "model is not the folder of a run",
    ("small.dkm", "--model", "resnet18"): "dkm run writes texts, and resnet18 is not a folder with a language model",
    ("run", "--prompt", " ".join(["word1"] * 40)): "the --prompt has 41 tokens, and the model reads 32",
    ("run", "--tokens", "40"): "--tokens 40 is too many: after the beginning, the model has room for 31",
    ("run", "--device", "tpu"): "--device tpu: this machine can compute on cpu",
    ("model/model.safetensors", "--model", "model"): "is a safetensors file that dkm did not write",
}


@pytest.mark.parametrize("arguments", PROBLEMS, ids=lambda arguments: " ".join(arguments)[:40])
def test_problems(arguments: tuple[str, ...], place: Path, capsys):
    call(*arguments, code=2)
    printed = capsys.readouterr()
    assert PROBLEMS[arguments] in printed.err
    assert len(printed.err.splitlines()) == 1


def test_a_model_of_another_shape_is_a_sentence(place: Path, tmp_path: Path, capsys):
    shutil.copytree("model", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"vocab_size": 65}))
    call("small.dkm", "--model", str(tmp_path / "other"), code=2)
    assert "does not fit this model: model.embed_tokens.weight is (64, 32) in the file" in capsys.readouterr().err


def test_a_model_that_has_no_beginning_needs_a_prompt():
    class Nothing:
        bos_token_id = eos_token_id = None

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [7] * len(text.split())}

    assert command._beginning("folder", "one two", Nothing(), Nothing()) == ([7, 7], None)
    with pytest.raises(dkm.DKMError, match="the tokenizer in folder has no token that begins or ends a text"):
        command._beginning("folder", "", Nothing(), Nothing())
