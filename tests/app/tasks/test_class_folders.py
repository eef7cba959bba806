"""Which output each class folder is: with a list, with names that are numbers, and with a part of the classes."""

from pathlib import Path

import numpy as np
import PIL.Image
import pytest

pytest.importorskip("typer")
pytest.importorskip("accelerate")
from command_place import call, flags

from dkm.app.errors import Problem
from dkm.app.tasks.class_folders import number_classes

TEN = [str(number) for number in range(10)]
NETWORK = """
import torch
from torch import nn

class Bright(nn.Module):
    '''Answers with the brightness: class 3 is a picture of 60.'''
    def __init__(self, classes):
        super().__init__()
        self.classes = classes

    def forward(self, x):
        brightness = (x.mean((2, 3))[:, 0] * 0.229 + 0.485) * 255
        return nn.functional.one_hot((brightness / 20).round().long(), self.classes).float()

def network(classes):
    return Bright(classes)

def twelve():
    return Bright(12)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("network.py").write_text(NETWORK)
    return tmp_path


def draw(folder: str, **classes: int) -> None:
    """A folder with two pictures of each class; the brightness is that of the class with this number."""
    for name, number in classes.items():
        for i in range(2):
            path = Path(folder, name.removeprefix("_"), f"{i}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(np.full((8, 8, 3), 20 * number, np.uint8)).save(path)


def evaluate(*more: str, code: int = 0, **options: str | None) -> None:
    given = dict(weights=None, plan=None, out=None, epochs=None)
    call("eval", *flags(**given | options), *more, code=code)


# --- the rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "outputs", "labels"),
    [
        (["b", "a"], None, [1, 0]),
        (TEN, None, list(range(10))),
        (TEN, 10, list(range(10))),
        (["3", "7"], 10, [3, 7]),
        (["0003", "0007"], 1000, [3, 7]),
        ([f"{number:04}" for number in range(12)], None, list(range(12))),
        (["1", "2", "3"], None, [0, 1, 2]),  # numbers that begin with 1 are no indices
        (["10", "20"], 3, [0, 1]),
        (["3", "x"], 10, [0, 1]),
        (["7", "07"], 10, [1, 0]),  # one number twice
        (["٣", "٤"], 10, [0, 1]),
    ],
)
def test_the_outputs_of_names(names: list[str], outputs: int | None, labels: list[int]):
    found = number_classes(names, [], outputs=outputs, file=None)
    assert [found.labels[name] for name in names] == labels
    assert found.classes == (outputs or len(names))


def test_numbers_that_imagefolder_would_order_otherwise():
    names = [str(number) for number in range(12)]
    found = number_classes(names, [], outputs=None, file=None)
    assert found.labels == {name: int(name) for name in names}
    assert "ImageFolder would take them in the order 0, 1, 10, ..." in found.notes[0]
    assert not number_classes(TEN, [], outputs=None, file=None).notes


def test_a_class_that_only_the_evaluation_has():
    assert number_classes(["3"], ["3", "5"], outputs=10, file=None).labels == {"3": 3, "5": 5}


def test_more_folders_than_outputs():
    with pytest.raises(Problem, match=r"there are 10 class folders for a model of 9 outputs \(--classes\)"):
        number_classes(TEN, [], outputs=9, file=None)


@pytest.mark.parametrize(
    ("text", "outputs", "sentence"),
    [
        ("cat\ndog\n", None, r"the class 'bird' is not in .*list\.txt: each line must be the name of a folder"),
        ("cat\nbirds\n", None, r"the class 'bird' is not in .*list\.txt: did you mean 'birds'\?"),
        ("cat\n\nbird\n", None, r"line 2 of .*list\.txt is empty"),
        ("cat\nbird\ncat\n", None, r"lines 1 and 3 of .*list\.txt are both 'cat'"),
        ("\n", None, r"list\.txt has no classes in it"),
        ("cat\nbird\n", 1, r"list\.txt has 2 classes, and the model has 1 outputs"),
    ],
)
def test_lists_that_cannot_be_meant(tmp_path: Path, text: str, outputs: int | None, sentence: str):
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(Problem, match=sentence):
        number_classes(["bird"], [], outputs=outputs, file=str(tmp_path / "list.txt"))


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("place")
def test_a_part_of_the_classes_with_a_list(capsys):
    draw("images", cat=3, dog=7)
    Path("list.txt").write_text(
        "\n".join(f"class {i}" if i not in (3, 7) else {3: "dog", 7: "cat"}[i] for i in range(9))
    )
    evaluate("--class-list", "list.txt")
    assert "0.00 % right" in capsys.readouterr().out  # each has the other's number
    draw("images", cat=7, dog=3)
    evaluate("--class-list", "list.txt")
    printed = capsys.readouterr().out
    assert "100.00 % right" in printed
    assert "warning" not in printed
    evaluate("--class-list", "list.txt", "--classes", "30")
    assert "100.00 % right" in capsys.readouterr().out
    evaluate("--class-list", "nowhere.txt", code=2)
    assert "cannot read the class list nowhere.txt" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
def test_a_part_of_the_classes_without_a_list_gives_a_warning(capsys):
    draw("images", cat=3, dog=7)
    for options in (dict(classes="12"), dict(model="network.py:twelve")):
        evaluate(**options)
        printed = capsys.readouterr().out
        assert "warning: there are 2 class folders for 12 outputs, and they are taken as the outputs 0 to 1" in printed
        assert printed.count("--class-list FILE") == 1


@pytest.mark.usefixtures("place")
def test_a_part_of_the_classes_by_number(capsys):
    draw("images", _0003=3, _0007=7)
    evaluate(classes="12")
    printed = capsys.readouterr().out
    assert "100.00 % right" in printed
    assert "warning" not in printed
    evaluate(model="network.py:twelve")
    assert "or --classes 12 where the names are the numbers of outputs" in capsys.readouterr().out
    evaluate(classes="1", code=2)
    assert "there are 2 class folders for a model of 1 outputs" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
def test_more_folders_than_the_model_turns_out_to_have(capsys):
    draw("images", **{f"class{number:02}": number % 12 for number in range(13)})
    evaluate(model="network.py:twelve", code=2)
    assert "there are 13 classes, and the model has 12 outputs" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
def test_a_list_is_for_images(capsys):
    Path("list.txt").write_text("a\nb\n")
    Path("t.csv").write_text("sentence,label\nx,1\n")
    evaluate("--class-list", "list.txt", data="t.csv", code=2)
    assert "--class-list is for folders of images" in capsys.readouterr().err
