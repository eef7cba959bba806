"""Labels that are numbers with a fraction, as STS-B's: a run with them, its figures, its report; what is refused."""

import json
import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from command_place import call, flags
from small_bert import WORDS, make_bert

from dkm.app.settings import Settings
from dkm.app.tasks import open_task

TEXTS = dict(model="bert", weights=None, data="train.tsv", eval_data="dev.tsv", plan="bert.encoder.*:4/2, emb:4")


def rows(count: int, seed: int) -> list[str]:
    """Texts whose label says how many of the words are good: from 0 to 5 in steps of 0.5."""
    rng = random.Random(seed)
    texts = [rng.choices(("good", "bad"), k=5) + rng.choices(WORDS[7:], k=1) for _ in range(count)]
    return [f"{' '.join(words)}\t{words.count('good') + 0.5 * ('good' in words[:1])}" for words in texts]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_bert(Path("bert"), outputs=1)
    for name, count, seed in (("train", 120, 1), ("dev", 30, 2)):
        Path(f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows(count, seed)]))
    return tmp_path


@pytest.mark.usefixtures("place")
def test_a_run(capsys):
    stats = pytest.importorskip("scipy.stats")
    call("compress", *flags(**TEXTS, epochs="10", lr="0.01", batch_size="24"))
    printed = capsys.readouterr().out
    assert "the labels are numbers to be predicted: regression, by a model of one output" in printed
    result = json.loads(Path("run/result.json").read_text())
    assert result["metric"] == "pearson"
    assert result["pearson_after"] > 50 > result["pearson_before"]  # it has learned the task
    assert set(result["after"]) == {"pearson", "standard_error", "examples", "loss", "spearman"}
    assert f"Pearson   {result['pearson_before']:.2f} before, {result['pearson_after']:.2f} after\n" in printed
    assert f"Spearman  {result['before']['spearman']:.2f} before, {result['after']['spearman']:.2f} after\n" in printed
    assert "accuracy" not in printed
    page = Path("run/report.html").read_text()
    assert "Pearson of the network’s answers on the evaluation examples is" in page
    assert "ccuracy" not in page
    assert "ower is better" not in page

    call("eval", "run")
    assert f"Pearson {result['pearson_after']:.2f} (± {result['after']['standard_error']:.2f}, 30 texts), Spearman" in (
        capsys.readouterr().out
    )
    # and by hand, without the command
    import transformers

    import dkm

    model = transformers.AutoModelForSequenceClassification.from_pretrained("bert").eval()
    dkm.load("run/model.dkm", into=model)
    tokenizer = transformers.AutoTokenizer.from_pretrained("bert")
    texts, labels = zip(*(row.split("\t") for row in rows(30, 2)), strict=True)
    with torch.no_grad():
        answers = model(**tokenizer(list(texts), padding=True, return_tensors="pt")).logits[:, 0]
    wanted = [float(label) for label in labels]
    # The same model in batches of other sizes: float32 rounds at 1e-7, and a correlation amplifies that by little.
    assert result["pearson_after"] == pytest.approx(100 * stats.pearsonr(answers, wanted).statistic, abs=1e-2)
    assert result["after"]["loss"] == pytest.approx(float((answers - torch.tensor(wanted)).square().mean()), rel=1e-4)


@pytest.mark.usefixtures("place")
def test_a_teacher_and_a_comparison(capsys):
    """Learning from the model as it was brings its answers back: the labels are not looked at."""
    call("compress", *flags(**TEXTS, epochs="6", lr="0.01", batch_size="24", teacher="self", out="taught"))
    call("compress", *flags(**TEXTS, epochs="0", out="untrained"))
    losses = [json.loads(line) for line in Path("taught/log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in losses if record["kind"] == "step"]
    assert min(losses) < 0.5 * losses[0]
    capsys.readouterr()
    call("compare", "taught", "untrained")
    assert "Pearson" in capsys.readouterr().out
    page = Path("comparison.html").read_text()
    assert "Pearson, higher is better" in page
    assert "ower is better" not in page


def test_a_tenth_of_the_rows_is_held_out_whatever_their_labels(place: Path):
    task = open_task(Settings(model="bert", data=("train.tsv",)))
    assert (task.train_count, task.eval_count, task.classes) == (108, 12, 1)


def test_whole_numbers_and_one_output(place: Path):
    """Where the model's folder or the user says one output, whole numbers are no classes."""
    Path("whole.tsv").write_text("\n".join(["sentence\tlabel", "good\t5", "bad\t0", "soup\t3"]))
    data = ("whole.tsv",)
    assert open_task(Settings(model="bert", data=data, eval_data=data)).measure.name == "pearson"
    make_bert(Path("two"))
    assert open_task(Settings(model="two", data=data, eval_data=data)).measure.name == "accuracy"
    assert open_task(Settings(model="two", data=data, eval_data=data, classes=1)).measure.name == "pearson"


@pytest.mark.usefixtures("place")
def test_a_function_with_one_output(capsys):
    Path("own.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def network(classes):\n    return nn.Linear(3, classes)\n\n"
        "def data():\n    x = torch.randn(40, 3)\n"
        "    both = torch.utils.data.TensorDataset(x, x.sum(1))\n    return both, both\n"
    )
    own = dict(model="own.py:network", weights="none", data="own.py:data", plan="all:2")
    call("compress", *flags(**own, classes="1", epochs="0"))
    assert json.loads(Path("run/result.json").read_text())["metric"] == "pearson"
    call("compress", *flags(**own, classes="2", out="other"), code=2)
    assert "the labels are numbers with a fraction" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(classes="6"), "which is none of 6 classes: leave out --classes to predict such numbers (regression)"),
        (dict(label_smoothing="0.1"), "--label-smoothing is for classes, and this is regression"),
        (dict(teacher="self", temperature="2"), "--temperature is for classes, and this is regression"),
        (dict(plan=None, target_size="10kB"), "--target-size is for classes, and this is regression"),
        (dict(model="two"), "the weights in two do not fit: classifier.weight is (2, 16) there and (1, 16)"),
        (dict(eval_data="names.tsv"), "names.tsv has the label 'yes', and regression needs numbers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused(capsys, options: dict, sentence: str):
    make_bert(Path("two"))
    Path("names.tsv").write_text("sentence\tlabel\ngood\tyes\n")
    call("compress", *flags(**TEXTS | options), code=2)
    assert sentence in capsys.readouterr().err
    assert not Path("run").exists()
