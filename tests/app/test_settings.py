"""Settings from flags and files, and back."""

import dataclasses
import shlex
import tomllib
from pathlib import Path

import pytest

from dkm.app.errors import Problem
from dkm.app.settings import FIELDS, Settings, as_command, as_toml, make, read
from dkm.clustering.options import DKMOptions

OTHERS = dict(
    model="a b.py:f",
    data=("x", 'quo"ted'),
    plan="cv:4/4, fc:8/4",
    lr=1e-5,
    epochs=3,
    classes=7,
    autocast="bf16",
    tau="geometric:2:0.1",
    method="gumbel",
    method_option=("init=random",),
    out="päth",
)


@pytest.mark.parametrize("given", [{}, OTHERS], ids=["defaults", "others"])
def test_toml_and_back(given: dict):
    settings = make(given)
    assert make(tomllib.loads(as_toml(settings))) == settings


def test_the_command_names_what_is_not_default():
    words = shlex.split(as_command(make(OTHERS)))
    assert words[:2] == ["dkm", "compress"]
    given: dict = {}
    for name, value in zip(words[2::2], words[3::2], strict=True):
        given.setdefault(name, []).append(value)
    assert given["--data"] == ["x", 'quo"ted']
    assert {name.removeprefix("--").replace("-", "_") for name in given} == set(OTHERS)


def test_later_layers_win():
    assert make({"epochs": 3, "batch-size": 8}, {"epochs": 4}) == Settings(epochs=4, batch_size=8)


def test_yaml(tmp_path: Path):
    pytest.importorskip("yaml")
    (tmp_path / "c.yaml").write_text("epochs: 3\nautocast: no\nweights: none\nlr: 1e-3\ndata: [a, b]\ntau: 1.0e-4\n")
    wanted = Settings(epochs=3, autocast="no", weights="none", lr=1e-3, data=("a", "b"), tau="0.0001")
    assert make(read(tmp_path / "c.yaml")) == wanted


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("c.yaml", BOMB + "data: *i\n", r"c\.yaml has an alias \(\*name\)"),
        ("c.yaml", "1: 2\n", "must hold a key for each setting"),
        ("c.yaml", "lr: 2020-13-45\n", r"c\.yaml is not YAML"),
        ("c.yaml", "data: " + "[" * 50_000, r"c\.yaml is not YAML"),
        ("c.toml", "data = " + "[" * 50_000, r"c\.toml is not TOML"),
        ("c.toml", "epochs = " + "9" * 5_000, r"c\.toml is not TOML"),
        ("c.toml", "#" * 1_000_001, r"c\.toml is too long for a config file"),
        ("c.toml", 'data = "a\\u0000b"', "--data holds the character NUL"),
        ("c.toml", 'data = ["a\\u0000b"]', "--data holds the character NUL"),
        ("c.toml", 'out = "a\\u0000b"', "--out holds the character NUL"),
    ],
    ids=lambda text: text[:12],
)
def test_hostile_config_files(tmp_path: Path, name: str, text: str, sentence: str):
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    with pytest.raises(Problem, match=sentence) as problem:
        make(read(tmp_path / name))
    assert len(str(problem.value)) < 1000


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"epoch": 3}, "there is no setting 'epoch': did you mean epochs?"),
        ({"epochs": 2.5}, "--epochs must be a whole number, and not 2.5"),
        ({"epochs": True}, "--epochs must be a whole number, and not True"),
        ({"lr": float("nan")}, "--lr must be a number, and not nan"),
        ({"data": [1]}, "--data must be text, or a list of texts"),
        ({"schedule": "step"}, "--schedule must be one of cosine, linear, constant, and not 'step'"),
        ({"batch-size": 0}, "--batch-size must be at least 1, and not 0"),
        ({"warmup": 1.5}, "--warmup is a share, from 0 to 1"),
        ({"method": "dkn"}, "got 'dkn'; did you mean 'dkm'?"),
        ({"method": "dc", "method-option": "gradient_scale"}, "is NAME=VALUE, such as p=0.2, and not 'gradient_scale'"),
        ({"method": "dc", "method-option": "gradient-scale=max"}, "gradient_scale must be one of mean, sum, got 'max'"),
        ({"method": "quant_noise", "method-option": ["p=0.2", "p=0.3"]}, "--method-option gives p twice"),
        ({"method": "quant_noise", "method-option": "eps=1"}, "is for options without a flag, and not for eps: give"),
        ({"method": "hard", "method-option": "steps=1"}, "and not for steps: the run knows the steps"),
        ({"method": "hard", "method-option": "p=0.2"}, 'method="hard" takes no p'),
        ({"tau": "warm"}, "tau must be auto, learn, a positive number"),
        ({"tau": "geometric:2"}, "tau must be auto, learn, a positive number"),
        ({"gradient": "some"}, "--gradient must be one of unrolled, last, implicit, and not 'some'"),
        ({"method": "hard", "gradient": "last"}, 'method="hard" takes no gradient, it would change nothing'),
        ({"method": "hard", "tau": "learn"}, 'method="hard" takes no tau, it has no temperature'),
        ({"max-iter": 0}, "--max-iter must be at least 1, and not 0"),
        ({"eps": -1}, "--eps must be at least 0, and not -1"),
    ],
)
def test_wrong_values(given: dict, sentence: str):
    with pytest.raises(Problem) as problem:
        make(given)
    assert sentence in str(problem.value)


def test_the_clustering_options_are_those_of_the_library():
    for option in dataclasses.fields(DKMOptions):
        if option.name in FIELDS and option.name not in ("steps", "seed"):
            declared = FIELDS[option.name]
            assert declared.default == option.default
            assert all(declared.metadata[rule] == option.metadata[rule] for rule in ("choices", "least"))
