"""A run means the same in every working directory, and its report says nothing of the machine."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("accelerate")
from command_place import call, flags, make_place

from dkm.app.places import located, without_places
from dkm.app.settings import make


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, seen from another folder than the one that it was started in."""
    (tmp_path / "home").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    make_place(tmp_path / "home")
    call("compress", *flags())
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "home" / "run"


def test_eval_of_a_run_from_anywhere(run: Path, capsys):
    wanted = f"{json.loads((run / 'result.json').read_text())['accuracy_after']:.2f} % right"
    for source in ("../home/run", "../home/run/model.dkm"):
        capsys.readouterr()
        call("eval", source)
        assert wanted in capsys.readouterr().out


def test_resume_from_anywhere(run: Path, capsys):
    whole = (run / "model.dkm").read_bytes()
    for name in ("model.dkm", "result.json"):
        (run / name).unlink()
    call("compress", "--resume", "--out", "../home/run", "--data", "../home/images")
    assert (run / "model.dkm").read_bytes() == whole


def test_the_stored_settings_repeat_the_run_from_anywhere(run: Path):
    assert tomllib.loads((run / "config.toml").read_text())["data"] == [str(run.parent / "images")]
    call("compress", "--config", "../home/run/config.toml", "--out", "again")
    assert Path("again/model.dkm").read_bytes() == (run / "model.dkm").read_bytes()


def test_inspect_of_a_run(run: Path, capsys):
    call("inspect", "../home/run/model.dkm")
    of_file = capsys.readouterr().out
    call("inspect", "../home/run")
    assert capsys.readouterr().out == of_file


def test_a_file_that_was_taken_out_of_its_run(run: Path, capsys):
    shutil.copy(run / "model.dkm", "alone.dkm")
    call("eval", "alone.dkm", code=2)
    sentence = "dkm: alone.dkm is in no run's folder, so it needs --model NAME and --data FOLDER as well\n"
    assert capsys.readouterr().err == sentence
    home = {name: f"../home/{value}" for name, value in [("model", "network.py:network"), ("data", "images")]}
    call("eval", "alone.dkm", *flags(**home, weights=None, plan=None, out=None, epochs=None))
    alone = capsys.readouterr().out.splitlines()[-1]
    call("eval", "../home/run", "--data", "../home/images")
    assert capsys.readouterr().out.splitlines()[-1] == alone


@pytest.mark.parametrize("command", ["eval", "inspect"])
def test_an_unfinished_run(run: Path, capsys, command: str):
    (run / "model.dkm").unlink()
    call(command, "../home/run", code=2)
    message = "../home/run has no model.dkm yet: finish it with dkm compress --resume --out ../home/run"
    assert capsys.readouterr().err == f"dkm: {message}\n"


def test_eval_of_nothing(run: Path, capsys):
    call("eval", "nowhere", code=2)
    assert capsys.readouterr().err == "dkm: there is no run folder or file nowhere\n"


def test_the_report_names_no_place(run: Path):
    text = (run / "report.html").read_text()
    assert str(run.parent) not in text
    assert "--data images" in text


def test_names_are_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    given = dict(model="resnet18", weights="none", data=["self", "a.tar"], eval_data="b")
    settings = located(make(given))
    assert (settings.model, settings.weights) == ("resnet18", "none")
    assert settings.data == ("self", f"{tmp_path}/a.tar")
    assert settings.eval_data == (f"{tmp_path}/b",)
    assert located(make({"model": "folder"})).model == f"{tmp_path}/folder"
    assert located(make({"model": "no.py:f"})).model == f"{tmp_path}/no.py:f"
    assert located(settings) == settings


def test_a_place_with_quotation_marks():
    name = "/home/o'\"n/images"
    text = f"""data = [{json.dumps(name)}]\n--data '/home/o'"'"'"n/images'"""
    assert "home" not in without_places(text, {"data": [name]})


def test_the_folder_of_the_run_is_no_place_to_show():
    assert without_places("dkm compress --out /home/me/run", {"out": "/home/me/run"}) == "dkm compress --out run"
