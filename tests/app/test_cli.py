"""The command: what it says, and how it says that something is wrong."""

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import safetensors.torch
import torch

pytest.importorskip("typer")
pytest.importorskip("accelerate")
import accelerate
from command_place import ORDINARY, flags, make_place
from small_bert import WORDS, make_bert

from dkm.app import cli, method_costs, settings, tasks
from dkm.app.own_code import load_function
from dkm.app.run import compression
from dkm.app.run_folder import RunFolder
from dkm.formats.contents import describe
from dkm.modelling.methods import METHODS


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with pictures, a network and its weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    make_place(tmp_path)
    return tmp_path


def call(*arguments: str, code: int = 0) -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    with pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    assert end.value.code == code


def snapshot(folder: Path) -> dict[str, bytes | None]:
    files = {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
    return {str(path): path.read_bytes() if path.is_file() else None for path in files}


def test_compress_prints_the_settings_the_plan_and_the_result(place: Path, capsys):
    call("compress", *flags())
    printed = capsys.readouterr()
    assert not printed.err
    assert max(map(len, printed.out.splitlines())) <= 80
    for part in (
        'plan="0:2, 4:2"',
        "0.weight",
        "to train on",
        "k-means, not trained",
        "times smaller",
        "run/model.dkm",
    ):
        assert part in printed.out
    assert "\x1b" not in printed.out  # no colours and no bars: this is not a terminal
    result = json.loads(Path("run/result.json").read_text())
    assert f"{result['accuracy_before']:.2f} % before, {result['accuracy_after']:.2f} % after" in printed.out
    assert result["after"]["accuracy"] == result["accuracy_after"]
    assert result["before"]["examples"] == result["after"]["examples"] == 2
    error = f"{result['before']['standard_error']:.2f}"
    assert f"before: {result['accuracy_before']:.2f} % right (± {error}, 2 images)" in printed.out
    assert f"measured  on 2 images, standard error {result['after']['standard_error']:.2f} %" in printed.out
    page = Path("run/report.html").read_text()
    assert f"measured on 2 images; the standard error is {result['after']['standard_error']:.2f}" in page


def test_the_command_of_the_result_runs_again(place: Path):
    call("compress", *flags())
    command = json.loads(Path("run/result.json").read_text())["command"]
    words = shlex.split(command.replace("--out run", "--out again"))
    assert words[0] == "dkm"
    call(*words[1:])
    assert Path("run/model.dkm").read_bytes() == Path("again/model.dkm").read_bytes()


@pytest.mark.parametrize("ending", ["toml", "yaml"])
def test_a_config_file_and_a_flag_over_it(place: Path, ending: str):
    mark = " = " if ending == "toml" else ": "
    values = {**ORDINARY, "seed": 3, "autocast": "no", "epochs": 7, "batch_size": 6, "image_size": 8, "resize": 8}
    lines = [f"{k.replace('_', '-')}{mark}{json.dumps(v)}" for k, v in values.items()]
    Path(f"c.{ending}").write_text("\n".join(lines))
    call("compress", "--config", f"c.{ending}", "--epochs", "0")
    saved = tomllib.loads(Path("run/config.toml").read_text())
    assert (saved["seed"], saved["epochs"], saved["plan"]) == (3, 0, "0:2, 4:2")
    assert settings.make(saved) == RunFolder(Path("run")).read_settings()


# --- what goes wrong -----------------------------------------------------------------------------

WRONG = {
    "an unknown flag": (["compress", "--epoch", "3"], "No such option"),
    "no command of that name": (["compres"], "No such command"),
    "a flag without its value": (["compress", "--epochs"], "requires an argument"),
    "epochs": (["compress", *flags(epochs="many")], "Invalid value for '--epochs'"),
    "negative epochs": (["compress", *flags(epochs="-1")], "--epochs must be at least 0, and not -1"),
    "optimizer": (["compress", *flags(optimizer="lion")], "must be one of adamw, adam, sgd, and not 'lion'"),
    "tau": (["compress", *flags(tau="warm")], "tau must be auto, learn, a positive number"),
    "method": (["compress", *flags(method="dkn")], "method must be one of dkm"),
    "a share": (["compress", *flags(label_share="2")], "--label-share is a share, from 0 to 1"),
    "label smoothing": (["compress", *flags(label_smoothing="2")], "--label-smoothing is a share, from 0 to 1"),
    "temperature": (["compress", *flags(teacher="self", temperature="0")], "--temperature must be more than 0"),
    "clip": (["compress", *flags(clip="0")], "--clip must be more than 0"),
    "blocks without a teacher": (["compress", *flags(reconstruct="2")], "--reconstruct is about a teacher: give"),
    "how fast no blocks": (["compress", *flags(reconstruct_lr="0.1")], "is about training block by block: give"),
    "blocks without training": (
        ["compress", *flags(teacher="self", reconstruct="2", epochs=None), "--no-training"],
        "--no-training and --reconstruct contradict each other",
    ),
    "a teacher's setting": (["compress", *flags(label_share="0.5")], "give --teacher self, or leave it out"),
    "seed": (["compress", *flags(seed=str(2**64))], "--seed must be less than 2^63"),
    "a tau past float32": (["compress", *flags(tau="1e-40")], "tau must be auto, learn, a positive number"),
    "a plan of nothing": (["compress", *flags(plan="all:keep")], "clusters nothing: give a layer bits"),
    "no model": (["compress", *flags(model=None)], "which model? give --model"),
    "no data": (["compress", *flags(data=None)], "no data: give --data"),
    "no plan": (["compress", *flags(plan=None)], "how small? give --plan"),
    "no out": (["compress", *flags(out=None)], "where to? give --out"),
    "the plan": (["compress", *flags(plan="cvv:2")], "unknown selector 'cvv'"),
    "the size": (["compress", *flags(target_size="big")], "'big' is not a size"),
    "an impossible size": (["compress", *flags(plan=None, target_size="10B")], "is too small"),
    "an allocator": (["compress", *flags(target_size="9kB", allocator="hak")], "must be one of dkm, hawq, haq, and"),
    "an allocator for a plan": (["compress", *flags(allocator="hawq")], "--allocator is about a size: give --target-"),
    "episodes of another": (["compress", *flags(target_size="9kB", episodes="5")], "--episodes is about haq: give --"),
    "no episodes": (["compress", *flags(allocator="haq", episodes="0")], "--episodes must be at least 1, and not 0"),
    "the model's name": (["compress", *flags(model="resnet81")], "no model 'resnet81': did you mean resnet18?"),
    "no weights": (["compress", *flags(model="resnet18", weights=None)], "--weights FILE, or --weights none"),
    "a missing file of weights": (["compress", *flags(weights="no.pth")], "there is no weights file no.pth"),
    "weights of another model": (["compress", *flags(model="resnet18")], "do not fit the model: the file has no conv1"),
    "weights of other classes": (["compress", *flags(weights="five.pth")], "4.weight is (5, 8) in the file and (2, 8)"),
    "weights cut off": (["compress", *flags(weights="cut.safetensors")], "is not a safetensors file, or is cut off"),
    "weights that hold code": (["compress", *flags(weights="code.pth")], "holds more than tensors"),
    "weights that are text": (["compress", *flags(weights="network.py")], "is not a weights file"),
    "a missing folder": (["compress", *flags(data="nowhere")], "there is no folder or file nowhere"),
    "a folder of files": (["compress", *flags(data="images/a")], "no class folders"),
    "an empty class": (["compress", *flags(data="empty")], "the class 'c' in empty has no images"),
    "an unreadable image": (["compress", *flags(data="broken")], "00.png: it is no image; repair it"),
    "a missing function": (["compress", *flags(model="network.py:net")], "network.py has no function 'net'"),
    "a missing file": (["compress", *flags(model="net.py:network")], "there is no file net.py"),
    "no model from the function": (["compress", *flags(model="network.py:number")], "must return a torch.nn.Module"),
    "data twice": (["compress", *flags(data="network.py:data", eval_data="images")], "leave out --eval-data"),
    "no data from the function": (["compress", *flags(data="network.py:number")], "must return two datasets"),
    "the folder exists": (["compress", *flags(out="images")], "images exists and is not a run of dkm"),
    "the folder is a file": (["compress", *flags(out="network.py")], "network.py exists and is not a run"),
    "the config file": (["compress", "--config", "no.toml"], "cannot read the config file no.toml"),
    "not TOML": (["compress", "--config", "network.py"], "is not TOML"),
    "a wrong key": (["compress", "--config", "wrong.toml"], "no setting 'epoch': did you mean epochs?"),
    "a wrong value": (["compress", "--config", "value.toml"], "--epochs must be a whole number, and not 'ten'"),
    "resize": (["compress", *flags(resize="4")], "--resize 4 is less than --image-size 8"),
    "eval of nothing": (["eval", "images"], "images is not the folder of a run"),
    "inspect of nothing": (["inspect", "no.dkm"], "cannot read no.dkm"),
    "inspect of plain weights": (["inspect", "weights.safetensors"], "is a safetensors file that dkm did not write"),
    "inspect of something else": (["inspect", "network.py"], "is not an intact .dkm file"),
    "resume of nothing": (["compress", "--resume", "--out", "nowhere"], "there is no run in nowhere to go on with"),
    "report of nothing": (["report", "images"], "images is not the folder of a run"),
    "plan of no model": (["plan", "resnet81", "cv:2"], "there is no model 'resnet81'"),
    "NUL in a folder": (["report", "a\0b"], "an argument holds the character NUL"),
    "NUL in a file": (["inspect", "a\0b"], "an argument holds the character NUL"),
    "NUL in data": (["compress", *flags(data="a\0b")], "an argument holds the character NUL"),
    "demo where something is": (["demo", "--out", "images"], "images exists: choose another folder"),
}  # fmt: skip


class Code:
    pass


@pytest.mark.parametrize("case", WRONG)
def test_one_sentence_and_nothing_touched(place: Path, capsys, case: str):
    Path("empty").mkdir()
    for name in "abc":
        Path("empty", name).mkdir()
    for name in "ab":
        Path("broken", name).mkdir(parents=True)
        Path("broken", name, "00.png").write_bytes(b"no picture")
        Path("broken", name, "01.png").write_bytes(Path("images/a/00.png").read_bytes())
    for i, name in enumerate("ab"):
        Path("empty", name, "0.png").write_bytes(Path(f"images/{name}/0{i}.png").read_bytes())
    five = load_function("network.py:network")(5)
    torch.save(five.state_dict(), "five.pth")
    torch.save(Code(), "code.pth")
    Path("cut.safetensors").write_bytes(Path("weights.safetensors").read_bytes()[:300])
    Path("wrong.toml").write_text("epoch = 3")
    Path("value.toml").write_text('epochs = "ten"')
    arguments, sentence = WRONG[case]
    before = snapshot(place)
    call(*arguments, code=2)
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.startswith("dkm: ")
    assert printed.err.count("\n") == 1
    assert snapshot(place) == before


@pytest.mark.parametrize(
    "options",
    [
        dict(method="dkn"),
        dict(tau="warm"),
        dict(gradient="some"),
        dict(method="hard", gradient="implicit"),
        dict(method="hard", tau="learn"),
        dict(max_iter="0"),
        dict(eps="-1"),
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_a_wrong_clustering_is_found_before_data_is_opened(place: Path, capsys, monkeypatch, options: dict):
    def opened(*args):
        raise AssertionError("data was opened")

    monkeypatch.setattr(tasks.KINDS[0], "recognizes", opened)
    call("compress", *flags(**options), code=2)
    assert capsys.readouterr().err.count("\n") == 1


def test_the_file_of_the_model_may_register_a_method(place: Path):
    text = Path("network.py").read_text()
    lines = "from dkm.modelling.methods import register", "from dkm.modelling.methods.hard import Hard", "", ""
    Path("own.py").write_text("\n".join(lines) + '@register("own")\nclass Own(Hard):\n    pass\n' + text)
    try:
        call("compress", *flags(model="own.py:network", method="own"))
    finally:
        METHODS.pop("own", None)
    assert json.loads(Path("run/result.json").read_text())["finished"]


def test_an_option_of_the_method_reaches_it(place: Path, monkeypatch):
    seen = []
    original = compression.compress_
    monkeypatch.setattr(
        compression, "compress_", lambda *args, **options: seen.append(options) or original(*args, **options)
    )
    words = ("--method-option", "p=0.25", "--method-option", "last=1", "--method-option", "init=random")
    call("compress", *flags(method="quant_noise"), *words)
    assert (seen[0]["p"], seen[0]["last"], seen[0]["init"]) == (0.25, 1, "random")
    assert "--method-option p=0.25" in json.loads(Path("run/result.json").read_text())["command"]


@pytest.mark.parametrize("method", ["atb", "escq", "soft-sharing", "rps", "profit", "meta-quant", "lr-net"])
def test_a_method_gets_what_it_needs(place: Path, method: str):
    call("compress", *flags(method=method))
    assert json.loads(Path("run/result.json").read_text())["finished"]


def test_outliers_count(place: Path, capsys):
    call("compress", *flags(method="gobo"), "--method-option", "threshold=0")
    found, plan = (json.loads(Path(f"run/{name}.json").read_text()) for name in ("result", "plan"))
    outliers = sum(size for name, size in found["file"].items() if name.startswith(("positions/", "outliers/")))
    assert outliers > 0
    assert found["bytes_paper"] == plan["bytes"] + outliers
    call("inspect", "run")
    assert " outliers " in capsys.readouterr().out


def test_a_method_that_cannot_have_what_it_needs(place: Path, capsys):
    text = Path("network.py").read_text().replace("nn.Conv2d(3, 8, 3)", "nn.ConvTranspose2d(3, 8, 3)")
    Path("transposed.py").write_text(text)
    call("compress", *flags(model="transposed.py:network", method="atb", weights="none"), code=2)
    assert 'dkm: method="atb" knows what linear layers' in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_run_is_not_overwritten(place: Path, capsys):
    call("compress", *flags())
    before = snapshot(place)
    call("compress", *flags(), code=2)
    assert "run exists: go on with it by --resume, or choose another --out" in capsys.readouterr().err
    assert snapshot(place) == before


# --- the other commands --------------------------------------------------------------------------


def test_eval_says_what_compress_said(place: Path, capsys):
    call("compress", *flags())
    result = json.loads(Path("run/result.json").read_text())
    capsys.readouterr()
    call("eval", "run")
    assert f"{result['accuracy_after']:.2f} % right" in capsys.readouterr().out
    for image in ("a/18.png", "b/19.png"):
        Path("held", image).parent.mkdir(parents=True)
        Path("held", image).write_bytes(Path("images", image).read_bytes())
    held_out = dict(data="held", plan=None, out=None, epochs=None)
    call("eval", *flags(weights="run/model.dkm", **held_out))
    assert f"{result['accuracy_after']:.2f} % right" in capsys.readouterr().out
    call("eval", *flags(**held_out))
    assert f"{result['accuracy_before']:.2f} % right" in capsys.readouterr().out


def test_plan(place: Path, capsys):
    call("plan", "mobilenet_v2", "all:3/1")
    printed = capsys.readouterr().out
    assert "53 of 158 tensors clustered" in printed
    assert "(105 tensors)" in printed
    assert len(printed.splitlines()) == 1 + 53 + 1 + 2
    assert max(map(len, printed.splitlines())) <= 80
    call("plan", "mobilenet_v2", "all:3/1", "--all")
    assert len(capsys.readouterr().out.splitlines()) == 1 + 158 + 2


def test_inspect(place: Path, capsys):
    call("compress", *flags(epochs="0"))
    capsys.readouterr()
    call("inspect", "run/model.dkm")
    assert capsys.readouterr().out.strip() == describe("run/model.dkm", 80)


def test_methods(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["methods"])
    assert end.value.code == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = rows[: rows.index([])]
    assert [row[0] for row in table if row[0] in METHODS] == list(METHODS)
    (bwn,) = (row for row in rows if row and row[0] == "bwn")
    assert bwn[1:6] == ["Rastegari", "2016", "1", "1", "-"]
    with pytest.raises(SystemExit):
        cli.main(["methods", "quant_noise"])
    shown = capsys.readouterr().out
    assert shown.startswith("quant_noise, Fan 2021\n\nA random fraction of the vectors is snapped")
    assert "p_end    1.0" in shown
    with pytest.raises(SystemExit):
        cli.main(["methods", "lr-net"])
    assert "at most 2 bits, dim 1 only, in Linear, Conv1d, Conv2d, Conv3d only" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        cli.main(["methods", "quantnoise"])
    assert end.value.code == 2
    assert "there is no method 'quantnoise': did you mean quant_noise?" in capsys.readouterr().err


def test_methods_are_measured(capsys, monkeypatch):
    monkeypatch.setattr(method_costs, "WIDTH", 24)
    monkeypatch.setattr(method_costs, "EXAMPLES", 8)
    monkeypatch.setattr(method_costs, "ROUNDS", 1)
    with pytest.raises(SystemExit) as end:
        cli.main(["methods", "--measure"])
    assert end.value.code == 0
    title, *lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    at = title.index("ms a step")
    times = {line.split()[0]: float(line[at : at + 9]) for line in lines if line.split()[0] in METHODS}
    assert list(times) == list(METHODS)
    assert all(milliseconds > 0 for milliseconds in times.values())
    with pytest.raises(SystemExit) as end:
        cli.main(["methods", "hard", "--measure"])
    assert end.value.code == 2
    assert "leave out NAME, or --measure" in capsys.readouterr().err


def test_report_is_written_again(place: Path, capsys):
    call("compress", *flags())
    before = Path("run/report.html").read_bytes()
    Path("run/report.html").unlink()
    capsys.readouterr()
    call("report", "run")
    assert capsys.readouterr().out.split() == ["run/report.html"]
    assert Path("run/report.html").read_bytes() == before


def test_demo(place: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    from dkm.app import demo

    draw = demo.make_images
    monkeypatch.setattr(  # all of it, but faster
        demo, "make_images", lambda folder, count, seed=0: draw(folder, count // 5, seed)
    )
    monkeypatch.setattr(demo.train, "__defaults__", (1, 0))
    for given, folder in ((["--out", "demo"], "demo"), ([], "dkm-demo-output"), ([], "dkm-demo-2-output")):
        call("demo", *given)
        assert len(list(Path(folder, "images").rglob("*.png"))) == 120
        assert {path.name for path in Path(folder, "run").iterdir()} >= {"model.dkm", "report.html", "result.json"}
        assert f"dkm compress --model {folder}/network.py:network" in capsys.readouterr().out


def test_data_of_your_own(place: Path):
    call("compress", *flags(data="network.py:data"))
    assert json.loads(Path("run/result.json").read_text())["steps"] == 2


@pytest.fixture
def bert(place: Path) -> None:
    """A small transformer in a folder, and tables for it."""
    pytest.importorskip("transformers")
    make_bert(Path("bert"))
    rows = [f"{a} {b}\t{'yes' if a == 'good' else 'no'}" for a in ("good", "bad") for b in WORDS[7:] * 4]
    Path("train.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
    Path("dev.tsv").write_text("\n".join(["sentence\tlabel", *rows[::3]]))


TEXTS = dict(model="bert", weights=None, data="train.tsv", eval_data="dev.tsv", plan="bert.encoder.*:3/2, emb:2")


@pytest.mark.usefixtures("bert")
def test_texts(capsys):
    call("compress", *flags(**TEXTS, epochs="15", lr="0.01"))
    result = json.loads(Path("run/result.json").read_text())
    assert result["accuracy_after"] == 100
    capsys.readouterr()
    call("eval", "run")
    assert "100.00 % right (± 9.05, 8 texts), F1 100.00, Matthews 100.00, loss" in capsys.readouterr().out
    assert (result["after"]["f1"], result["after"]["matthews"], result["after"]["examples"]) == (100, 100, 8)


@pytest.mark.usefixtures("place")
def test_an_older_result_is_read(capsys):
    """Of a run from before there was a standard error in it."""
    call("compress", *flags(epochs="0"))
    path = Path("run/result.json")
    result = json.loads(path.read_text())
    path.write_text(
        json.dumps({key: result[key] for key in result if key not in ("before", "after", "unit", "metric")})
    )
    capsys.readouterr()
    call("compress", "--resume", "--out", "run")
    call("report", "run")
    printed = capsys.readouterr().out
    assert f"{result['accuracy_after']:.2f} % after" in printed
    assert "measured" not in printed


@pytest.mark.usefixtures("place")
def test_top5_of_many_classes(capsys):
    call("compress", *flags(model="network.py:network", weights=None, classes="100", epochs="0"))
    result = json.loads(Path("run/result.json").read_text())
    assert 0 <= result["after"]["accuracy"] <= result["after"]["top5"] <= 100
    assert f"top-5     {result['before']['top5']:.2f} % before, " in capsys.readouterr().out


@pytest.mark.usefixtures("bert")
def test_a_folder_with_one_table_is_split(capsys):
    """There is nothing else to evaluate on: a tenth of the rows of each label is held out."""
    Path("only").mkdir()
    Path("train.tsv").rename("only/train.tsv")
    call("compress", *flags(**TEXTS | dict(data="only", eval_data=None), epochs="0"))
    assert "22 texts to train on, 2 to measure with" in capsys.readouterr().out


@pytest.mark.usefixtures("bert")
def test_texts_of_other_classes_than_the_model(capsys):
    Path("train.tsv").write_text("sentence\tlabel\ngood\t0\nbad\t1\nvery\t2\n")
    Path("dev.tsv").write_text("sentence\tlabel\ngood\t0\n")
    call("compress", *flags(**TEXTS), code=2)
    printed = capsys.readouterr().err
    assert "the weights in bert do not fit: classifier.weight is (2, 16) there and (3, 16) in a model of 3" in printed
    assert not Path("run").exists()


@pytest.mark.usefixtures("bert")
def test_a_head_that_is_not_in_the_folder_is_said(capsys):
    state = safetensors.torch.load_file("bert/model.safetensors")
    for name in ("classifier.weight", "classifier.bias"):
        del state[name]
    safetensors.torch.save_file(state, "bert/model.safetensors", metadata={"format": "pt"})
    call("compress", *flags(**TEXTS, epochs="0"))
    assert "not in bert, starts from random: classifier.bias, classifier.weight" in capsys.readouterr().out


def test_without_the_extra_it_says_what_to_install():
    program = "import sys; sys.modules['typer'] = None; import dkm.app.cli"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.strip() == 'dkm: the command needs more than the library: pip install "torch-dkm[cli]"'
