"""Exceptions in the user's own functions: their part of the traceback and one sentence; and models that cannot take the
data."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("accelerate")
from command_place import call, flags, make_place

from dkm.app.commands import compress

DATA = """
import torch

class Examples(torch.utils.data.Dataset):
    def __init__(self, broken=-1):
        self.broken = broken

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == self.broken:
            self.fail(index)
        return torch.zeros(3, 8, 8), index % 2

    def fail(self, index):
        raise KeyError(f"no example {index}")

def data():
    open("nowhere.txt")

def of_a_worker():
    return Examples(13), Examples()

def good():
    return Examples(), Examples()
"""
MODEL = """
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x).reshape(len(x), 7)

def network():
    return Network()

def broken():
    return Nothing()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_place(tmp_path)
    Path("own_data.py").write_text(DATA)
    Path("own_model.py").write_text(MODEL)
    Path("imports.py").write_text("import beside_it\n")
    Path("beside_it.py").write_text("import torch\n\nfaulty = torch.zeros(2) + torch.zeros(3)\n")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "functions", "sentence"),
    [
        (
            dict(data="own_data.py:data"),
            ["data"],
            "own_data.py, line 20, in data: FileNotFoundError: [Errno 2] No such file or directory: 'nowhere.txt'",
        ),
        (
            dict(data="own_data.py:of_a_worker"),
            ["__getitem__", "fail"],
            "own_data.py, line 17, in fail: KeyError: 'no example 13'",
        ),
        (
            dict(data="own_data.py:of_a_worker", workers="1"),
            ["__getitem__", "fail"],
            "own_data.py, line 17, in fail: KeyError: 'no example 13'",
        ),
        (
            dict(model="own_model.py:network", weights=None, data="own_data.py:good", plan="conv:2"),
            ["forward"],
            "own_model.py, line 10, in forward: RuntimeError: shape '[6, 7]' is invalid for input of size 864",
        ),
        (
            dict(model="own_model.py:broken", weights=None),
            ["broken"],
            "own_model.py, line 16, in broken: NameError: name 'Nothing' is not defined",
        ),
        (
            dict(data="imports.py:data"),
            ["<module>", "<module>"],
            "beside_it.py, line 3, in <module>: RuntimeError: The size of tensor a (2) must match the size of tensor b "
            "(3) at non-singleton dimension 0",
        ),
    ],
    ids=["data", "example", "worker", "model", "function", "import"],
)
def test_the_frames_of_the_user_and_a_sentence(capsys, options: dict, functions: list[str], sentence: str):
    call("compress", *flags(**options), code=2)
    first, *frames, last = capsys.readouterr().err.splitlines()
    assert first == "Traceback, of your code alone:"
    assert last == f"dkm: {sentence}"
    names = [line.rpartition(" in ")[2] for line in frames if line.startswith("  File")]
    assert names == functions
    assert not Path("run").exists()


def test_a_fault_of_dkm_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    def fail(*args, **options):
        raise KeyError("a fault")

    monkeypatch.setattr(compress.run, "compress", fail)
    with pytest.raises(KeyError, match="a fault"):
        compress.run_and_show(dict(model="network.py:network", plan="0:2", out="run"), {})
    with pytest.raises(KeyError, match="a fault"):
        call("compress", *flags())


def test_an_image_that_is_too_small_for_the_model(capsys):
    call("compress", *flags(image_size="2", resize="2"), code=2)
    printed = capsys.readouterr().err
    assert printed.startswith("dkm: the model cannot take images of shape 3x2x2: give another --image-size, or a model")
    assert "Kernel size can't be greater than actual input size" in printed
    assert printed.count("\n") == 1
    assert not Path("run").exists()


def test_batches_that_are_too_small_for_batch_norm(capsys):
    call("compress", *flags(image_size="3", resize="3", batch_size="1"), code=2)
    printed = capsys.readouterr().err
    assert printed.startswith("dkm: the batches are too small for batch norm: give a larger --batch-size")
    assert printed.count("\n") == 1
    assert not Path("run").exists()


def test_a_model_that_gives_no_tensor(capsys):
    Path("pair.py").write_text(
        "from torch import nn\n\nclass Pair(nn.Linear):\n    def forward(self, x):\n        return x, x\n\n"
        "def network():\n    return Pair(3, 3)\n"
    )
    call("compress", *flags(model="pair.py:network", weights=None, plan="all:2"), code=2)
    assert (
        "the model must give a tensor, or an object with one as .logits, and gives a tuple" in capsys.readouterr().err
    )


GREY = """
from torch import nn

def network(classes=2):
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))

def matrix(classes=2):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.mark.parametrize("name", ["network", "matrix"])
def test_a_model_of_one_channel(capsys, name: str):
    Path("grey.py").write_text(GREY)
    plan = "0:2, 3:2" if name == "network" else "1:2"
    call("compress", *flags(model=f"grey.py:{name}", weights="none", plan=plan))
    call("eval", "run")
    call("export", "run", "--to", "safetensors")
    assert "images), loss" in capsys.readouterr().out


def test_a_gpu_without_enough_memory_is_not_the_users_code(capsys, monkeypatch: pytest.MonkeyPatch):
    from dkm.app.own_code import load_function

    load_function("own_model.py:network")

    def fail(*args):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("torch.nn.Conv2d.forward", fail)
    call("compress", *flags(model="own_model.py:network", weights=None, data="own_data.py:good", plan="conv:2"), code=2)
    assert "the GPU has too little memory" in capsys.readouterr().err
