"""dkm eval measures the data that it is given, and says what it measures; a run's own data as the run did."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("accelerate")
from command_place import call, flags, make_place
from small_bert import make_bert

PLAIN = dict(plan=None, out=None, epochs=None)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with 20 pictures of two classes, a network and its weights."""
    monkeypatch.chdir(tmp_path)
    make_place(tmp_path)
    return tmp_path


@pytest.fixture
def run(place: Path, capsys) -> dict:
    """A run without training; returns its result."""
    call("compress", *flags(epochs="0"))
    capsys.readouterr()
    return json.loads(Path("run/result.json").read_text())


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("given", [dict(data="images"), dict(data=None, eval_data="images")])
def test_all_of_what_is_given(capsys, given: dict):
    call("eval", *flags(**PLAIN, **given))
    printed = capsys.readouterr().out
    assert "measuring all 20 images in images\n" in printed
    assert ", 20 images)" in printed


def test_the_part_to_evaluate_on_where_it_has_one(place: Path, capsys):
    shutil.copytree("images", "both/train")
    for name in ("a/00.png", "b/01.png", "b/03.png"):
        Path("both/val", name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path("images", name), Path("both/val", name))
    for given in (dict(data="both"), dict(data=None, eval_data="both"), dict(data="images", eval_data="both")):
        call("eval", *flags(**PLAIN, **given))
        assert "measuring all 3 images in both/val\n" in capsys.readouterr().out
    shutil.rmtree("both/val")
    call("eval", *flags(**PLAIN | dict(data="both")))
    assert "measuring all 20 images in both/train\n" in capsys.readouterr().out


def test_a_run_measures_what_it_measured_and_says_how_many(place: Path, run: dict, capsys):
    call("eval", "run")
    printed = capsys.readouterr().out
    assert f"measuring 2 of the 20 images in {place / 'images'}, which are held out of the training\n" in printed
    assert f"{run['accuracy_after']:.2f} % right" in printed


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("name", ["--data", "--eval-data"])
def test_other_data_for_a_run(capsys, name: str):
    """The classes are those of the run, of which the data may have a part."""
    shutil.copytree("images/b", "some/b")
    call("eval", "run", name, "some")
    only_b = capsys.readouterr().out
    assert "measuring all 10 images in some\n" in only_b
    call("eval", "run", name, "images")
    both = capsys.readouterr().out
    shutil.copytree("images/a", "others/a")
    call("eval", "run", name, "others")
    shares = [float(text.partition(" % right")[0].split()[-1]) for text in (only_b, both, capsys.readouterr().out)]
    assert shares[1] == (shares[0] + shares[2]) / 2  # b is the second class in `some`, too


@pytest.mark.usefixtures("run")
def test_a_function_for_a_run(capsys):
    call("eval", "run", "--data", "network.py:data")
    assert "measuring all 8 examples in the second dataset of network.py:data\n" in capsys.readouterr().out


@pytest.mark.usefixtures("place")
def test_tables(capsys):
    pytest.importorskip("transformers")
    make_bert(Path("bert"))
    rows = [f"{word}\t{label}" for label, word in enumerate(("bad", "good"))] * 10
    Path("all").mkdir()
    Path("all/train.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
    bert = dict(model="bert", weights=None)
    for given in (dict(data="all"), dict(data="all/train.tsv"), dict(data=None, eval_data="all/train.tsv")):
        call("eval", *flags(**PLAIN, **bert, **given))
        assert "measuring all 20 texts in all/train.tsv\n" in capsys.readouterr().out
    Path("all/dev.tsv").write_text("\n".join(["sentence\tlabel", *rows[:3]]))
    call("eval", *flags(**PLAIN, **bert, data="all"))
    assert "measuring all 3 texts in all/dev.tsv\n" in capsys.readouterr().out


@pytest.mark.usefixtures("place")
def test_texts_for_a_language_model(capsys):
    pytest.importorskip("transformers")
    from small_language import make_language_model, write_texts

    make_language_model(Path("model"))
    write_texts(Path("some.txt"), 20)
    call("eval", *flags(**PLAIN, model="model", weights=None, data="some.txt"))
    assert "measuring all 20 texts in some.txt\n" in capsys.readouterr().out
