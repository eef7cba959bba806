"""Weights from files as people save them."""

import argparse
import types
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

pytest.importorskip("typer")
pytest.importorskip("accelerate")
from command_place import call, flags, make_place

from dkm.app.checkpoint_files import load_weights
from dkm.app.errors import Problem


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


STATE = {name: torch.randn_like(value) for name, value in network().state_dict().items()}


def with_prefix(prefix: str, state: dict[str, Tensor] = STATE, scale: float = 1.0) -> dict[str, Tensor]:
    return {prefix + name: scale * value for name, value in state.items()}


def read(path: Path, key: str | None = None, scale: float = 1.0) -> list[str]:
    """Load it into a new network, which must then have the weights; returns the notes."""
    model = network()
    notes = load_weights(model, str(path), key=key)
    assert all(torch.equal(value, scale * STATE[name]) for name, value in model.state_dict().items())
    return notes


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"epoch": 3, "state_dict": state},
        lambda state: {"state_dict": {"model": state}},
        lambda state: {"net": state, "acc": 93.1, "optimizer": {"state": {0: {"step": torch.ones(())}}}},
        lambda state: {"model": state, "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99))},
    ],
    ids=["alone", "state_dict", "twice", "net", "namespace"],
)
@pytest.mark.parametrize(
    "prefix", ["", "module.", "model.", "_orig_mod.", "module._orig_mod.", "model._orig_mod.module."]
)
def test_as_people_save_them(tmp_path: Path, wrap, prefix: str):
    torch.save(wrap(with_prefix(prefix)), tmp_path / "w.pth")
    assert read(tmp_path / "w.pth") == []


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "model._orig_mod."])
def test_prefixes_in_safetensors(tmp_path: Path, prefix: str):
    safetensors.torch.save_file(with_prefix(prefix), tmp_path / "w.safetensors")
    assert read(tmp_path / "w.safetensors") == []


def test_a_part_of_the_model_was_wrapped(tmp_path: Path):
    """As in torchvision's first weights of VGG, whose features were trained in parallel."""
    torch.save({name.replace("0.", "0.module._orig_mod."): value for name, value in STATE.items()}, tmp_path / "w.pth")
    assert read(tmp_path / "w.pth") == []


def test_names_that_are_the_models_own_stay(tmp_path: Path):
    """A model may itself have a part that is called `model` or `module`."""
    for inside in ("model", "module"):
        model = nn.ModuleDict({inside: nn.Linear(2, 3)})
        wanted = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
        for prefix in ("", "model.", "_orig_mod.", "model._orig_mod."):
            torch.save(with_prefix(prefix, wanted), tmp_path / "w.pth")
            load_weights(model, str(tmp_path / "w.pth"))
            assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
            model.load_state_dict({name: torch.zeros_like(value) for name, value in wanted.items()})


def test_what_lies_beside_a_lightning_model_is_said(tmp_path: Path):
    torch.save({"state_dict": {"loss.weight": torch.ones(3)} | with_prefix("model.")}, tmp_path / "w.ckpt")
    assert read(tmp_path / "w.ckpt") == [
        f"{tmp_path / 'w.ckpt'} has tensors beside those of the model, which were left out: loss.weight"
    ]


@pytest.mark.parametrize(
    ("stored", "key"),
    [
        ({"state_dict": STATE, "state_dict_ema": with_prefix("module.", scale=2)}, "state_dict_ema"),
        ({"model": STATE, "ema": {"module": with_prefix("", scale=2), "decay": 0.99}}, "ema.module"),
        ({"model": STATE, "model_ema": with_prefix("", scale=2)}, "model_ema"),
        ({"state_dict": with_prefix("model.") | with_prefix("ema_model.", scale=2)}, "ema_model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_averages_are_taken_only_when_asked_for(tmp_path: Path, stored: dict, key: str):
    torch.save(stored, tmp_path / "w.pth")
    assert read(tmp_path / "w.pth") == [
        f"{tmp_path / 'w.pth'} has averaged (EMA) weights too, which were not taken; to take them: --weights-key {key}"
    ]
    assert read(tmp_path / "w.pth", key=key, scale=2) == []
    assert read(tmp_path / "w.pth", key=key.partition(".")[0], scale=2) == []


def test_only_averages(tmp_path: Path):
    torch.save({"ema": STATE, "epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(Problem, match=r"which weights of .*\? it has weights under ema \(4 tensors\): .*--weights-key"):
        read(tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("stored", "key", "sentence"),
    [
        (
            {"a": STATE, "b": STATE},
            None,
            r"which weights of .*\? it has weights under a \(4 tensors\), b \(4",
        ),
        ({"a": STATE, "b": STATE}, "c", r"no weights under 'c': it has weights under a \(4 tensors\), b"),
        ({"state_dict": STATE}, "state_dict.inner", "no weights under 'state_dict.inner'"),
        (STATE, "ema", r"no weights under 'ema': it has 0\.weight, 0\.bias, 1\.weight and 1 more"),
        ({"epoch": 3, "lr": 0.1}, None, "does not hold a state_dict, names and tensors: it has epoch, lr"),
        ([1, 2], None, "does not hold a state_dict, names and tensors: it holds a list"),
        ({}, None, "does not hold a state_dict, names and tensors: it is empty"),
        (
            {"conv.weight": torch.ones(1), "conv.bias": torch.ones(1)},
            None,
            r"the file has no 0\.weight, 0\.bias, 1\.weight and 1 more; the model has no conv\.weight, conv\.bias, "
            "which the file has",
        ),
        (STATE | {"2.weight": torch.ones(1)}, None, r"do not fit the model: the model has no 2\.weight, which the"),
        (
            STATE | {"1.bias": torch.zeros(4), "1.weight": torch.zeros(4, 3)},
            None,
            r"1\.weight is \(4, 3\) in the file and \(1, 3\) in the model, and 1 more",
        ),
    ],
)
def test_the_message_names_what_the_file_has(tmp_path: Path, stored, key: str | None, sentence: str):
    torch.save(stored, tmp_path / "w.pth")
    with pytest.raises(Problem, match=sentence):
        load_weights(network(), str(tmp_path / "w.pth"), key=key)


def test_weights_that_do_not_fit_leave_the_model_as_it_was(tmp_path: Path):
    model = nn.Linear(2, 3)
    before = model.weight.detach().clone()
    torch.save({"weight": torch.zeros(3, 2), "bias": torch.zeros(4)}, tmp_path / "w.pth")
    with pytest.raises(Problem, match=r"bias is \(4,\) in the file and \(3,\) in the model of 3 classes"):
        load_weights(model, str(tmp_path / "w.pth"), 3)
    assert torch.equal(model.weight, before)


class Runs:
    """What a file must not make us do."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return Path.write_text, (self.trace, "executed")


@pytest.mark.parametrize(
    "hide",
    [
        lambda thing: {"args": thing},
        lambda thing: {"state_dict": STATE, "args": argparse.Namespace(inner=thing)},
        lambda thing: types.SimpleNamespace(thing=thing),
    ],
)
def test_nothing_is_executed(tmp_path: Path, hide):
    torch.save(hide(Runs(tmp_path / "trace")), tmp_path / "w.pth")
    with pytest.raises(Problem, match=r"cannot be read safely \(it holds objects of .*\): save the state_dict alone"):
        load_weights(network(), str(tmp_path / "w.pth"))
    assert not (tmp_path / "trace").exists()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """A file of Lightning with averages, as a user gives it; a resumed or measured run takes the same."""
    monkeypatch.chdir(tmp_path)
    make_place(tmp_path)
    state = safetensors.torch.load_file("weights.safetensors")
    zero = {name: torch.zeros_like(value) for name, value in state.items()}
    holds = {"state_dict": with_prefix("model._orig_mod.", zero), "state_dict_ema": with_prefix("module.", state)}
    torch.save(holds | {"hyper_parameters": argparse.Namespace(lr=0.1)}, "last.ckpt")
    given = dict(plan=None, out=None, epochs=None)
    call("eval", *flags(**given))
    wanted = capsys.readouterr().out.splitlines()[-1]
    call("eval", *flags(**given | dict(weights="last.ckpt")))
    note, _, zeros = capsys.readouterr().out.splitlines()
    assert note.endswith("weights too, which were not taken; to take them: --weights-key state_dict_ema")
    assert "50.00 % right" in zeros
    assert "loss 0.6931" in zeros  # of a network that answers nothing
    call("eval", *flags(**given | dict(weights="last.ckpt", weights_key="state_dict_ema")))
    assert capsys.readouterr().out.splitlines()[-1] == wanted
    call("compress", *flags(weights="last.ckpt", weights_key="state_dict_ema", epochs="0"))
    call("eval", "run")
    call("compress", *flags(weights="none", weights_key="ema", out="other"), code=2)
    assert "--weights-key is about a file of weights: give --weights FILE" in capsys.readouterr().err
