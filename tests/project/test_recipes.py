"""The paper's recipes: they parse, say the paper's figures, fit the real networks, and run on tiny data.

In the suite MobileNet-v1 and the four text networks (tiny ones of their kind) train; every other recipe goes as far as
its plan on the full network.  DKM_ALL_RECIPES=1 trains all 55, an epoch of a dozen generated images or texts each:
that takes half an hour.
"""

import functools
import json
import os
import re
from pathlib import Path

import pytest
import torch
import torchvision
import transformers
from torch import nn

import dkm
from dkm.app import cli, models, settings
from dkm.app.mobilenet_v1 import mobilenet_v1
from dkm.app.recipes import RECIPES, describe
from dkm.app.tasks import open_task

ROOT = Path(__file__).parents[2]

# Of each network: uncompressed accuracy, and the accuracy and tau of each configuration; a tau that the paper gives.
NETWORKS = ("resnet18", "resnet50", "mobilenet-v1", "mobilenet-v2")
BASE = (69.8, 76.1, 70.9, 71.9)
FIGURE_4 = {  # plan, top-1, MiB
    "resnet18-5-8": ("cv:5/8, fc:8/4", 65.1, "1.00"),
    "resnet18-6-8": ("cv:6/8, fc:6/10", 65.7, "1.09"),
    "resnet18-4-4": ("cv:4/4, fc:8/4", 66.7, "1.49"),
    "resnet50-6-6": ("cv:6/6, fc:6/4", 74.5, "3.32"),
    "mobilenet-v1-4-4": ("cv:4/4, fc:4/2", 63.9, "0.72"),
    "mobilenet-v2-2-1": ("cv:2/1, fc:4/4", 68.0, "0.84"),
}
TABLE_1 = {  # top-1 of each network, tau of each network; 74.0 is with fewer iterations, and has no tau
    "3/1": ((69.9, 76.2, 69.9, 70.3), (8e-6, 8e-6, 5e-5, 5e-5)),
    "2/1": ((68.9, 75.3, 66.4, 66.2), (2e-5, 2e-5, 1e-4, 1e-4)),
    "1/1": ((65.0, 72.1, 5.9, 50.8), (5e-5, 5e-5, 3e-4, 1.5e-4)),
    "4/4": ((67.0, 73.8, 60.6, 55.0), (5e-5, 4e-5, 1e-4, 1e-4)),
    "8/8": ((67.8, 74.0, 64.3, 62.4), (8e-5, None, 1e-4, 1e-4)),
    "4/8": ((62.1, 70.6, 46.5, 34.0), (5e-5, 5e-5, 1e-4, 1e-4)),
    "8/16": ((65.5, 72.1, 59.8, 58.3), (1.3e-4, 6e-5, 1.2e-4, 1.4e-4)),
}
TABLE_2 = {"4/1": (70.9, 8), "4/2": (70.3, 16), "8/8": (68.5, 32)}  # top-1, compression ratio
TABLE_3 = {  # uncompressed, tau, accuracy at 3/1, 2/1, 1/1, 4/4
    "albert": (90.6, 5e-5, (85.1, 81.7, 79.0, 80.0)),
    "distilbert": (88.2, 8e-5, (88.2, 87.4, 82.8, 84.0)),
    "bert-tiny": (78.9, 1.5e-4, (80.0, 80.0, 77.4, 77.2)),
    "mobilebert": (89.6, 4e-4, (89.0, 83.7, 69.8, 78.3)),
}
TABLE_4 = {"distilbert-mnli-4-2": ("xform:4/2, emb:4", "21.8"), "distilbert-mnli-5-2": ("xform:5/2, emb:3", "21.5")}


def expected() -> dict[str, tuple[str, float | None, tuple[str, ...]]]:
    """Recipe -> its plan, its tau where the paper gives it, and the figures that its opening must say."""
    found: dict[str, tuple[str, float | None, tuple[str, ...]]] = {}
    for name, (plan, top, megabytes) in FIGURE_4.items():
        base = BASE[NETWORKS.index(name.rsplit("-", 2)[0])]
        found[name] = plan, None, (f"top-1 {top} %", f"{megabytes} MiB", f"uncompressed {base} %")
    for spec, (tops, taus) in TABLE_1.items():
        for network, top, tau, base in zip(NETWORKS, tops, taus, BASE, strict=True):
            name = f"{network}-table1-{spec.replace('/', '-')}"
            found[name] = f"cv:{spec}, first:keep", tau, (f"{top} %", f"uncompressed {base} %")
    for spec, (top, ratio) in TABLE_2.items():
        figures = f"top-1 {top} %", f"ratio {ratio};", "uncompressed 69.8 %"
        found[f"googlenet-{spec.replace('/', '-')}"] = f"cv:{spec}", None, figures
    for network, (base, tau, accuracies) in TABLE_3.items():
        for spec, accuracy in zip(("3/1", "2/1", "1/1", "4/4"), accuracies, strict=True):
            figures = f"accuracy {accuracy} %", f"uncompressed {base} %"
            found[f"{network}-qnli-{spec.replace('/', '-')}"] = f"xform:{spec}", tau, figures
    for name, (plan, megabytes) in TABLE_4.items():
        found[name] = plan, 8e-5, ("accuracy 81.3 %", f"{megabytes} MiB", "uncompressed 82.4 %, 255.4 MiB")
    return found


EXPECTED = expected()


def chosen(name: str) -> settings.Settings:
    return settings.make(settings.read(RECIPES[name]))


def is_text(name: str) -> bool:
    return "qnli" in name or "mnli" in name


def test_each_configuration_of_the_paper_has_its_recipe():
    assert set(RECIPES) == set(EXPECTED)


def test_the_documentation_has_them_all():
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    links = {
        name: accuracy for accuracy, name in re.findall(r"\[([\d.]+)\]\(\.\./dkm/app/recipes/([\w-]+)\.toml\)", page)
    }
    accuracies = {name: re.search(r"[\d.]+(?= %)", figures[0])[0] for name, (_, _, figures) in EXPECTED.items()}
    assert links == accuracies


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_says_what_the_paper_says(name: str):
    plan, tau, figures = EXPECTED[name]
    recipe = chosen(name)
    opening = RECIPES[name].read_text(encoding="utf-8").partition("\n\n")[0]
    assert recipe.plan == plan
    assert tau is None or float(recipe.tau) == tau
    for figure in figures:
        assert figure in opening
    assert (recipe.eps, recipe.max_iter) == (1e-4, 5)
    if is_text(name):
        assert (recipe.batch_size, recipe.lr, recipe.max_length) == (64, 1e-4, 128)
    else:
        assert (recipe.batch_size, recipe.epochs, recipe.lr) == (128, 200, 0.008)
        assert (recipe.optimizer, recipe.momentum, recipe.schedule) == ("sgd", 0.9, "constant")
        assert (recipe.image_size, recipe.resize, recipe.augment) == (224, 256, "imagenet")


def test_the_command_lists_them(capsys: pytest.CaptureFixture):
    """Every recipe is a line with the paper's figures; a part of a name lists those, a name prints its file."""
    for words in (["recipes"], ["recipes", "mobilenet-v1"]):
        with pytest.raises(SystemExit):
            cli.main(words)
        printed = capsys.readouterr().out
        lines = {line.split()[0]: line for line in printed.splitlines() if line.split()[:1] and "-" in line.split()[0]}
        listed = {name: line for name, line in lines.items() if name in RECIPES}
        assert set(listed) == {name for name in RECIPES if words[-1] in ("recipes", name[: len("mobilenet-v1")])}
        assert max(map(len, printed.splitlines())) <= 88
        for name, line in listed.items():
            plan, _, figures = EXPECTED[name]
            accuracy, size = re.search(r"[\d.]+ %", figures[0])[0], re.search(r"[\d.]+ MB|ratio (\d+)", figures[1])
            assert plan in line
            assert accuracy in line
            assert size is None or (f"{size[1]}x smaller" if size[1] else size[0]) in line
            assert f"uncompressed {describe(name).uncompressed}" in RECIPES[name].read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        cli.main(["recipes", "resnet50-6-6"])
    assert capsys.readouterr().out == RECIPES["resnet50-6-6"].read_text(encoding="utf-8")


@pytest.mark.parametrize("words", [["recipes", "resnet50-66"], ["compress", "--recipe", "resnet50-66"]])
def test_a_recipe_that_does_not_exist(words: list[str], capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "dkm: there is no recipe 'resnet50-66': did you mean resnet50-6-6?\n"


@pytest.mark.parametrize("name", RECIPES)
def test_the_launch_line_is_one(name: str):
    """The line names its own file and flags that exist; with the recipe they are all that a run needs."""
    text = RECIPES[name].read_text(encoding="utf-8")
    (line,) = re.findall(r"^#   dkm compress (.*)$", text, re.MULTILINE)
    words = line.split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given.pop("--recipe") == name
    needed = {"model", "data", "out"} if is_text(name) else {"data", "weights", "out"}
    assert {flag.removeprefix("--").replace("-", "_") for flag in given} - {"eval_data"} == needed
    settings.make({flag.removeprefix("--"): value for flag, value in given.items()})


@functools.cache
def network(name: str) -> nn.Module:
    """The paper's network for texts, without values, from its published configuration."""
    family = name.partition("-qnli")[0].partition("-mnli")[0]
    labels = 3 if "mnli" in name else 2
    with torch.device("meta"):
        if family == "bert-tiny":
            sizes = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
            return transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=labels, **sizes))
        if family == "albert":  # base, version 2
            sizes = dict(hidden_size=768, num_attention_heads=12, intermediate_size=3072)
            return transformers.AlbertForSequenceClassification(transformers.AlbertConfig(num_labels=labels, **sizes))
        if family == "distilbert":
            config = transformers.DistilBertConfig(num_labels=labels)
            return transformers.DistilBertForSequenceClassification(config)
        config = transformers.MobileBertConfig(num_labels=labels)
        return transformers.MobileBertForSequenceClassification(config)


@functools.cache
def image_network(model: str) -> nn.Module:
    with torch.device("meta"):
        return models.model_without_values(model, None)


def plan_of(name: str) -> dkm.Plan:
    recipe = chosen(name)
    model = network(name) if is_text(name) else image_network(recipe.model)
    return dkm.plan(model, recipe.plan)


def test_the_names_mean_the_papers_networks():
    for model, build in (("resnet50", torchvision.models.resnet50), (chosen("mobilenet-v1-4-4").model, mobilenet_v1)):
        with torch.device("meta"):
            wanted = {key: value.shape for key, value in build().state_dict().items()}
        assert {key: value.shape for key, value in image_network(model).state_dict().items()} == wanted


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_fits_the_network(name: str):
    """The plan clusters what the paper clusters and, where the paper gives a size, has that size."""
    plan = plan_of(name)
    (megabytes,) = [figure for figure in EXPECTED[name][2] if re.fullmatch(r"[\d.]+ MiB", figure)] or [None]
    if megabytes is not None:
        digits = len(megabytes.removesuffix(" MiB").partition(".")[2])
        assert f"{plan.bytes / 2**20:.{digits}f} MiB" == megabytes
    clustered = [row for row in plan.rows if row.bits is not None]
    weights = [row for row in plan.rows if row.kind in ("cv", "lin", "emb")]
    if "table1" in name:  # "we did not compress the first and last layers"
        assert [row for row in weights if row.bits is None] == [weights[0], weights[-1]]
    elif "qnli" in name:  # "the embedding layers were excluded"
        assert [row for row in weights if row.bits is None] == [row for row in weights if row.kind == "emb"]
    elif (
        "googlenet" in name
    ):  # "only convolution layers are compressed"; its ratio is that of their codes, without tables
        assert clustered == [row for row in weights if row.kind == "cv"]
        codes = sum(row.bits * -(-row.parameters // row.dim) for row in clustered)
        ratio = 32 * sum(row.parameters for row in clustered) / codes
        assert ratio == pytest.approx(TABLE_2[chosen(name).plan.partition(":")[2]][1], rel=0.06)
    else:
        assert clustered == weights


# --- whole runs ----------------------------------------------------------------------------------

QUICK = {"mobilenet-v1-4-4", "albert-qnli-4-4", "distilbert-mnli-5-2", "bert-tiny-qnli-2-1", "mobilebert-qnli-3-1"}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dozen images of noise, in two classes, in ImageNet's layout."""
    folder = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 4), ("val", 2)):
        for label in ("n01440764", "n01443537"):
            (folder / part / label).mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(256, (3, 40, 48), generator=generator, dtype=torch.uint8)
                torchvision.io.write_png(pixels, str(folder / part / label / f"{i}.png"))
    return folder


def text_model(name: str, folder: Path) -> None:
    """A small network of the recipe's kind and a tokenizer of a few words, as save_pretrained writes them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {
        word: i for i, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "why", "who", "it", "is", "was", "he"))
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    inputs = ["input_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_input_names=inputs
    ).save_pretrained(folder)
    sizes = dict(vocab_size=64, hidden_size=48, num_attention_heads=2, intermediate_size=96, num_hidden_layers=2)
    family = name.partition("-qnli")[0].partition("-mnli")[0]
    config = {
        "albert": lambda: transformers.AlbertConfig(embedding_size=24, **sizes),
        "distilbert": lambda: transformers.DistilBertConfig(
            vocab_size=64, dim=48, n_layers=2, n_heads=2, hidden_dim=96
        ),
        "bert-tiny": lambda: transformers.BertConfig(**sizes),
        "mobilebert": lambda: transformers.MobileBertConfig(
            embedding_size=24, intra_bottleneck_size=24, true_hidden_size=24, **sizes
        ),
    }[family]()
    config.num_labels = 3 if "mnli" in name else 2
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def text_tables(name: str, folder: Path) -> None:
    """train.tsv and dev.tsv, with the columns that the recipe names."""
    columns = (chosen(name).text_columns or "").split(",")
    labels = ("entailment", "neutral", "contradiction") if "mnli" in name else ("entailment", "not_entailment")
    folder.mkdir()
    for part, count in (("train", 12), ("dev", 6)):
        rows = ["\t".join((*columns, "label"))]
        rows += [f"why is it {'who ' * (i % 3)}?\tit was he\t{labels[i % len(labels)]}" for i in range(count)]
        (folder / f"{part}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in RECIPES if name in QUICK or os.environ.get("DKM_ALL_RECIPES")])
def test_the_recipe_runs(
    name: str, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    words = ["compress", "--recipe", name, "--out", str(tmp_path / "run")]
    words += ["--epochs", "1", "--batch-size", "4", "--workers", "0", "--device", "cpu"]
    if is_text(name):
        text_model(name, tmp_path / "model")
        text_tables(name, tmp_path / "data")
        words += ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "data")]
    else:
        words += ["--weights", "none", "--data", str(images), "--image-size", "32", "--resize", "36"]
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert not ended.value.code, capsys.readouterr().err

    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert result["finished"]
    assert result["steps"] == (3 if is_text(name) else 2)
    assert result["bytes_file"] == (tmp_path / "run" / "model.dkm").stat().st_size
    assert chosen(name).plan in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["resnet18-6-8", "googlenet-8-8"])
def test_the_recipe_opens_its_data(name: str, images: Path):
    """Recipes that are not trained here give their images the paper's size, 224 pixels."""
    data = open_task(settings.make(settings.read(RECIPES[name]), {"data": [str(images)]}))
    assert (len(data.train), len(data.eval), data.classes) == (8, 4, 2)
    assert data.train[0][0].shape == data.eval[0][0].shape == (3, 224, 224)
