"""Language models: a whole run on texts and on the model's own, resumed, measured, and shown."""

import contextlib
import json
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.nn import functional as F

pytest.importorskip("accelerate")
pytest.importorskip("typer")
pytest.importorskip("transformers")
from small_language import language_settings, make_language_model, make_language_place
from small_run import finish, forget_the_last_run, log, start_process
from transformers import AutoModelForCausalLM

import dkm
from dkm.app import cli, report, run
from dkm.app.errors import Problem
from dkm.app.run import sampling
from dkm.app.run.sampling import write_texts
from dkm.app.settings import Settings
from dkm.app.tasks import open_task


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_place(tmp_path_factory.mktemp("language"))


def literal_perplexity(model: torch.nn.Module, texts: list[torch.Tensor]) -> float:
    """exp of the mean negative log likelihood, token by token, in float64."""
    model, nats = model.double().eval(), []
    with torch.no_grad():
        for text in texts:
            for at in range(1, len(text)):
                logits = model(text[None, :at].long()).logits[0, -1]
                nats.append(-float(torch.log(torch.exp(logits)[text[at].long()] / torch.exp(logits).sum())))
    return float(torch.tensor(nats, dtype=torch.float64).mean().exp())


@pytest.mark.parametrize("data", ["self", "text"])
def test_a_whole_run(place: Path, tmp_path: Path, data: str):
    source = "self" if data == "self" else str(place / "train.txt")
    chosen = language_settings(place, tmp_path / "run", data=source, plan="*:2", lr=3e-3, epochs=4)
    result = finish(chosen)
    folder = tmp_path / "run"
    assert json.loads((folder / "result.json").read_text()) == result
    assert result["metric"] == "perplexity"
    assert "accuracy_after" not in result
    assert result["steps"] == (12 if data == "self" else 20)
    # The file is a plain model whose perplexity is the one that was reported.  float32 rounds logits of about 10 to
    # 1e-6, and fewer than a hundred roundings follow one another: the perplexity's logarithm is off by less than 1e-4.
    texts = open_task(chosen).eval.tokens
    before = AutoModelForCausalLM.from_pretrained(place / "model")
    after = dkm.load(folder / "model.dkm", into=AutoModelForCausalLM.from_pretrained(place / "model"))
    assert result["perplexity_before"] == pytest.approx(literal_perplexity(before, texts), rel=1e-4)
    assert result["perplexity_after"] == pytest.approx(literal_perplexity(after, texts), rel=1e-4)
    evals = log(folder, "eval")
    assert [record["metric"] for record in evals] == ["perplexity"] * 5
    assert evals[-1]["snapped"] == pytest.approx(float(torch.tensor(evals[-1]["loss"]).exp()), rel=1e-5)
    losses = [record["loss"] for record in log(folder, "step")]
    assert losses[-1] < losses[0]
    if data == "self":
        tokens = safetensors.torch.load_file(folder / "samples.safetensors")["tokens"]
        assert (tokens.shape, tokens.dtype) == ((24, 16), torch.int32)  # of 27, those that fill batches of 8
        assert (tokens[:, 0] == 1).all()
        assert len(tokens.unique(dim=0)) == 24
    else:
        assert not (folder / "samples.safetensors").exists()


def test_a_tied_embedding_is_clustered_once(place: Path, tmp_path: Path):
    finish(language_settings(place, tmp_path / "tied"))
    rows = {row["name"]: row for row in json.loads((tmp_path / "tied" / "plan.json").read_text())["rows"]}
    assert "lm_head.weight" not in rows
    assert rows["model.embed_tokens.weight"]["bits"] is not None
    loaded = dkm.load(tmp_path / "tied" / "model.dkm", into=AutoModelForCausalLM.from_pretrained(place / "model"))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    make_language_model(tmp_path / "place" / "model", tied=False)
    (tmp_path / "place" / "valid.txt").write_text((place / "valid.txt").read_text())
    finish(language_settings(tmp_path / "place", tmp_path / "own"))
    names = {row["name"] for row in json.loads((tmp_path / "own" / "plan.json").read_text())["rows"] if row["bits"]}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= names


def test_samples_come_from_the_models_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Even where the folder says to write greedily, to stop at an end, or to avoid repetitions."""
    folder = make_language_model(tmp_path / "model")
    written = dict(do_sample=False, top_k=2, repetition_penalty=9.0, bos_token_id=1, eos_token_id=list(range(64)))
    (folder / "generation_config.json").write_text(json.dumps(written))
    (tmp_path / "valid.txt").write_text("word1 word2\n")
    chosen = language_settings(tmp_path, tmp_path / "run", max_length=3, samples=4096)
    forget_the_last_run()
    stage, model = run.open_stage(chosen, run.Listener())
    monkeypatch.setitem(sampling.AT_ONCE, "cpu", 1024)
    tokens = write_texts(stage, model, stage.task.own, 4096, run.Listener())
    expected = model(torch.tensor([[1]])).logits[0, -1].softmax(-1)
    found = tokens[:, 1].bincount(minlength=64) / 4096
    # Each share has a standard deviation of at most sqrt(p / 4096); 6 of them happen once in 1e9 draws.
    assert ((found - expected).abs() <= 6 * (expected / 4096).sqrt() + 1e-3).all()
    assert len(tokens.unique(dim=0)) > 1000
    assert torch.equal(tokens, write_texts(stage, model, stage.task.own, 4096, run.Listener()))
    assert not torch.equal(tokens[:1024], tokens[1024:2048])
    assert model.generation_config.top_k == 2  # as it was


def test_samples_in_a_small_memory(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    forget_the_last_run()
    stage, model = run.open_stage(language_settings(place, tmp_path / "run"), run.Listener())
    generate, sizes = model.generate, []

    def generate_few(begun: torch.Tensor, **options) -> torch.Tensor:
        sizes.append(len(begun))
        if len(begun) > 6:
            raise torch.OutOfMemoryError
        return generate(begun, **options)

    monkeypatch.setattr(model, "generate", generate_few)
    tokens = write_texts(stage, model, stage.task.own, 16, run.Listener())
    assert sizes == [16, 8, 4, 4, 4, 4]
    assert len(tokens.unique(dim=0)) == 16


def test_filling_up_changes_neither_the_loss_nor_the_perplexity(place: Path, tmp_path: Path):
    """A batch of texts of several lengths gives the mean over all their tokens, as if each were alone."""
    chosen = language_settings(place, tmp_path / "run", data=str(place / "train.txt"))
    task = open_task(chosen)
    model = AutoModelForCausalLM.from_pretrained(place / "model").eval()
    texts = [task.train[i] for i in range(6)]
    assert len({len(tokens) for tokens, _ in texts}) > 1
    ids, labels = task.collate(texts)
    logits, wanted, text = task.compared(model(ids), labels)
    assert text.bincount().tolist() == [len(tokens) - 1 for tokens, _ in texts]
    alone = [F.cross_entropy(model(x[None]).logits[0, :-1], x[1:], reduction="none") for x, _ in texts]
    torch.testing.assert_close(F.cross_entropy(logits, wanted), torch.cat(alone).mean())
    same = task.collate([texts[0], texts[0]])
    both = [task.compared(model(same[0]), same[1], may_be_filled_up=flag).logits for flag in (True, False)]
    assert torch.equal(*both)


def test_killed_and_resumed(place: Path, tmp_path: Path):
    options = dict(epochs=4, checkpoint_every=0)
    finish(language_settings(place, tmp_path / "whole", **options))
    chosen, folder = language_settings(place, tmp_path / "killed", **options), tmp_path / "killed"
    for lines in (3, 30):
        process = start_process(chosen, die_at=(lines, 100))
        process.join()
        assert process.exitcode == -signal.SIGKILL
    samples = (folder / "samples.safetensors").read_bytes()
    assert not (folder / "result.json").exists()
    report.write(folder)
    assert "perplexity" in (folder / "report.html").read_text()
    finish(chosen)
    assert (folder / "samples.safetensors").read_bytes() == samples
    for name in ("model.dkm", "samples.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_resumed_run_trains_on_the_samples_in_its_folder(place: Path, tmp_path: Path):
    chosen, folder = language_settings(place, tmp_path / "run", checkpoint_every=0), tmp_path / "run"
    process = start_process(chosen, die_at=(3, 100))
    process.join()
    whole = (folder / "samples.safetensors").read_bytes()
    (folder / "samples.safetensors").write_bytes(whole[:100])
    with pytest.raises(Problem, match=r"samples\.safetensors does not hold the texts of a run, or is cut off"):
        finish(chosen)
    (folder / "samples.safetensors").unlink()
    with pytest.raises(Problem, match=r"cannot read .*samples\.safetensors"):
        finish(chosen)
    (folder / "samples.safetensors").write_bytes(whole)
    finish(chosen)


@pytest.mark.parametrize(
    "options",
    [
        dict(epochs=0),
        dict(target_size="20kB", plan=None),
        dict(target_size="20kB", plan=None, epochs=0),
        dict(teacher="none"),
        dict(label_share=0.5, temperature=2.0, autocast="bf16"),
        dict(samples=3),
        dict(workers=1),
    ],
)
def test_settings_that_go_with_it(place: Path, tmp_path: Path, options: dict):
    result = finish(language_settings(place, tmp_path / "run", **options))
    assert result["perplexity_after"] > 1
    if options.get("epochs") == 0:
        count = len(safetensors.torch.load_file(tmp_path / "run" / "samples.safetensors")["tokens"])
        assert count == (8 if "target_size" in options else 0)


def test_what_is_shown(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "run"

    def command(*words: str) -> str:
        forget_the_last_run()
        with contextlib.suppress(SystemExit):
            cli.main(list(words))
        printed = capsys.readouterr()
        assert not printed.err
        return printed.out

    shown = command(
        *("compress", "--model", str(place / "model"), "--data", "self", "--eval-data", str(place / "valid.txt")),
        *("--plan", "all:3", "--samples", "24", "--epochs", "1", "--max-length", "16", "--device", "cpu"),
        *("--teacher", "self", "--out", str(folder)),
    )
    result = json.loads((folder / "result.json").read_text())
    before, after = (f"{result[f'perplexity_{when}']:.2f}" for when in ("before", "after"))
    assert f"before: perplexity {before} (± {result['before']['standard_error']:.2f}, " in shown
    assert "the model has written 24 of 24 texts to train on\n" in shown
    assert "(perplexity)\n" in shown
    assert f"perplexity  {before} before, {after} after\n" in shown
    texts, error = (result["after"][name] for name in ("examples", "standard_error"))
    assert f"measured    on {texts} texts, standard error {error:.2f}\n" in shown
    assert "%" not in shown
    assert "accuracy" not in shown
    assert f"perplexity {after} (± {error:.2f}, {texts} texts), loss " in command("eval", str(folder))
    summary = report.summary(folder)
    assert f"  perplexity  {after}" in summary
    assert f"was {before}" in summary
    page = (folder / "report.html").read_text()
    assert f"perplexity on the evaluation texts is {after}, where lower is better" in page
    assert f"was {before}</p><p>lower is better" in page
    assert "Perplexity, lower is better" in page
    assert "accuracy" not in page.lower().split("<h2>training</h2>")[0]
    assert "Accuracy" not in page


def test_the_model_needs_no_more_names_than_the_file_has(place: Path, tmp_path: Path):
    """transformers writes a tied weight once."""
    chosen = language_settings(place, tmp_path, weights=str(place / "model" / "model.safetensors"))
    forget_the_last_run()
    _, model = run.open_stage(chosen, run.Listener())
    plain = AutoModelForCausalLM.from_pretrained(place / "model")
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_a_broken_model_is_refused(place: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    safetensors.torch.save_model(model, tmp_path / "nan.safetensors")
    chosen = language_settings(place, tmp_path / "run", weights=str(tmp_path / "nan.safetensors"))
    with pytest.raises(Problem, match="the perplexity of the uncompressed model is nan"):
        finish(chosen)
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_write(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "can_generate", lambda self: False)
    with pytest.raises(Problem, match="a LlamaForCausalLM cannot write texts: give text files"):
        finish(language_settings(place, tmp_path / "run"))


def test_a_plan_shows_the_language_model(place: Path, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        cli.main(["plan", str(place / "model"), "all:3"])
    shown = capsys.readouterr().out
    assert "embed_tokens" in shown
    assert "score" not in shown
    assert Settings().max_length is None
