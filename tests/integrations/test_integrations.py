"""dkm in other people's training loops: what is logged, what is written, and that a checkpoint resumes exactly."""

import functools
import importlib
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers as hf
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from method_helpers import within
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dkm
from dkm import Clustered
from dkm.integrations.lightning import DKMCallback as LightningCallback
from dkm.integrations.transformers import DKMCallback as TransformersCallback
from dkm.modelling.parameters import clustered_parameters

EXAMPLES = Path(__file__).parents[2] / "examples"


def clusterings(model: nn.Module) -> list[Clustered]:
    return [module for module in model.modules() if isinstance(module, Clustered)]


def steps(model: nn.Module) -> set[int]:
    return {clustered.steps for clustered in clusterings(model)}


class TestTransformers:
    @staticmethod
    def bert() -> nn.Module:
        sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
        return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=40, num_labels=3, **sizes))

    @staticmethod
    def gpt2() -> nn.Module:
        """Its head is its embedding."""
        ends = dict(bos_token_id=0, eos_token_id=0)
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=40, n_positions=8, n_embd=32, n_layer=1, n_head=2, **ends))

    @staticmethod
    def data(model: nn.Module) -> list[dict[str, Tensor]]:
        x = torch.randint(40, (48, 8), generator=torch.Generator().manual_seed(0))
        labels = x if isinstance(model, hf.GPT2LMHeadModel) else x.sum(1) % 3
        return [{"input_ids": i, "labels": label} for i, label in zip(x, labels, strict=True)]

    def trainer(self, build: Callable[[], nn.Module], out: Path, callbacks: list, **options) -> hf.Trainer:
        """6 steps of two batches, a checkpoint after every second."""
        hf.set_seed(0)
        model = build()
        arguments = hf.TrainingArguments(
            str(out),
            **dict(
                num_train_epochs=2,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=2,
                learning_rate=1e-2,
                logging_steps=2,
                save_steps=2,
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            )
            | options,
        )
        return hf.Trainer(
            model, arguments, train_dataset=self.data(model), eval_dataset=self.data(model)[:8], callbacks=callbacks
        )

    def test_trains_logs_and_writes(self, tmp_path: Path):
        plain = None

        def build() -> nn.Module:
            nonlocal plain
            plain = self.bert()
            return plain

        trainer = self.trainer(build, tmp_path, [TransformersCallback("*:3/2, emb:4")])
        before = [c.C.clone() for c in clusterings(plain)]
        optimized = {id(p) for p in plain.parameters()}
        trainer.train()
        assert steps(plain) == {6}
        assert {int(c.step) for c in clusterings(plain)} == {5}
        assert all(not torch.equal(c.C, old) for c, old in zip(clusterings(plain), before, strict=True))
        assert {id(p) for group in trainer.optimizer.param_groups for p in group["params"]} == optimized
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert [entry["step"] for entry in logged] == [2, 4, 6]
        assert all(0 < entry["dkm/gap"] < 1 and entry["dkm/dead"] >= 0 for entry in logged)
        assert "dkm/changed" in logged[-1]
        snapped = dkm.snap_(plain.eval()).state_dict()
        loaded = dkm.load(tmp_path / "model.dkm", into=self.bert()).state_dict()
        assert loaded.keys() == snapped.keys()
        assert all(torch.equal(tensor, snapped[name]) for name, tensor in loaded.items())

    @pytest.mark.parametrize("name", ["bert", "gpt2"])
    def test_resumes_exactly(self, name: str, tmp_path: Path):
        """From a checkpoint in the middle of an epoch, with dropout."""
        build, plan = getattr(self, name), "*:3/2, emb:4"
        self.trainer(build, tmp_path / "whole", [TransformersCallback(plan)]).train()
        shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
        resumed = self.trainer(build, tmp_path / "resumed", [TransformersCallback(plan, init="random")])
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 6
        assert (tmp_path / "resumed" / "model.dkm").read_bytes() == (tmp_path / "whole" / "model.dkm").read_bytes()

    @pytest.mark.parametrize("method", ["atb", "escq", "profit", "soft-sharing", "rps", "meta-quant", "lr-net"])
    def test_methods_get_what_they_need(self, method: str, tmp_path: Path):
        callback = functools.partial(TransformersCallback, within(method, "bert.encoder*:3/2"), method=method)
        self.trainer(self.bert, tmp_path / "whole", [callback()]).train()
        shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
        self.trainer(self.bert, tmp_path / "resumed", [callback()]).train(resume_from_checkpoint=True)
        assert (tmp_path / "resumed" / "model.dkm").read_bytes() == (tmp_path / "whole" / "model.dkm").read_bytes()

    def test_a_term_of_the_loss_counts_once_for_a_step_of_several_batches(self, tmp_path: Path):
        """The optimizer gets the gradient of the term, once; that of the data is nothing to so strong a term."""
        trainer = self.trainer(
            self.bert,
            tmp_path,
            [TransformersCallback("xform:3/2", method="soft-sharing", first=1, strength=1e12)],
            max_steps=1,
            max_grad_norm=0,
        )
        model, got, wanted = trainer.model, {}, {}

        def watch(optimizer: torch.optim.Optimizer, *args) -> None:
            weights = {owned.name: owned.tensor for owned, _ in clustered_parameters(model)}
            got.update({name: weight.grad.clone() for name, weight in weights.items()})
            wanted.update(zip(weights, torch.autograd.grad(dkm.method_loss(model), weights.values()), strict=True))

        trainer.create_optimizer()
        trainer.optimizer.register_step_pre_hook(watch)
        trainer.train()
        for name, gradient in got.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-2, atol=float(wanted[name].abs().max()) * 1e-3)

    def test_the_file_is_of_the_best_model(self, tmp_path: Path):
        scores = iter([1.0, 3.0, 2.0])
        options = dict(eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, metric_for_best_model="score")
        trainer = self.trainer(self.bert, tmp_path, [TransformersCallback("*:3")], **options)
        trainer.compute_metrics = lambda prediction: {"score": next(scores)}
        trainer.train()
        best = self.bert()
        dkm.compress_(best, "*:3", steps=6, init="random")
        best.load_state_dict(hf.trainer.safetensors.torch.load_file(tmp_path / "checkpoint-4" / "model.safetensors"))
        dkm.save(best, tmp_path / "best.dkm")
        assert (tmp_path / "best.dkm").read_bytes() == (tmp_path / "model.dkm").read_bytes()

    def test_model_compressed_before(self, tmp_path: Path):
        def build() -> nn.Module:
            model = self.bert()
            dkm.compress_(model, "*:3", steps=77)
            return model

        trainer = self.trainer(build, tmp_path, [TransformersCallback(None, "own.dkm")], max_steps=2)
        trainer.train()
        assert steps(trainer.model) == {77}
        assert (tmp_path / "own.dkm").exists()

    def test_without_a_plan_and_without_compression(self, tmp_path: Path):
        with pytest.raises(ValueError, match="no clustered tensor"):
            self.trainer(self.bert, tmp_path, [TransformersCallback(None)], max_steps=2).train()

    def test_added_later(self, tmp_path: Path):
        """A callback added after the Trainer was made can train, but can neither resume nor train more parameters."""
        trainer = self.trainer(self.bert, tmp_path, [], max_steps=2)
        trainer.add_callback(TransformersCallback("*:3"))
        trainer.train()
        assert steps(trainer.model) == {2}
        for options in ({}, {"tau": "learn"}, {"method": "meta-quant"}):
            trainer = self.trainer(self.bert, tmp_path, [], max_steps=4)
            trainer.add_callback(TransformersCallback("*:3", **options))
            with pytest.raises(ValueError, match=r"not compressed yet: pass DKMCallback to Trainer\(callbacks="):
                trainer.train(resume_from_checkpoint=not options)

    def test_reporters_see_the_figures_of_a_callback_in_front(self, tmp_path: Path):
        class Reporter(hf.TrainerCallback):
            seen: list[dict] = []  # noqa: RUF012

            def on_log(self, args, state, control, logs, **kwargs):
                self.seen.append(dict(logs))

        ours = TransformersCallback("*:3", None)
        trainer = self.trainer(self.bert, tmp_path, [Reporter(), ours], max_steps=2)
        trainer.callback_handler.callbacks.insert(0, trainer.pop_callback(ours))
        trainer.train()
        assert "dkm/gap" in Reporter.seen[0]
        assert not (tmp_path / "model.dkm").exists()


ADVICE = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's, about workers, folders and the like


@ADVICE
class TestLightning:
    class Module(LightningModule):
        def __init__(self, evaluating: bool = False):
            super().__init__()
            torch.manual_seed(0)
            layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
            self.model = nn.Sequential(*layers).train(not evaluating)
            self.teacher = nn.Linear(64, 4).requires_grad_(False)

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
            self.log("values", float(len(self.model[4].weight.unique())))

        test_step = validation_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.model.parameters(), 1e-2)

    @staticmethod
    def loader() -> DataLoader:
        x = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, torch.arange(40) % 4), 8)

    @staticmethod
    def trainer(out: Path, *callbacks, **options) -> Trainer:
        """2 epochs of 3 steps each, of which the last has a smaller batch, unless the options say otherwise."""
        quiet = dict(enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
        options = dict(max_epochs=2, accumulate_grad_batches=2, log_every_n_steps=1, **quiet) | options
        saved = ModelCheckpoint(out, filename="{epoch}", save_top_k=-1)
        return Trainer(default_root_dir=out, callbacks=[*callbacks, saved], logger=CSVLogger(out), **options)

    def test_trains_logs_and_writes(self, tmp_path: Path):
        module = self.Module()
        trainer = self.trainer(tmp_path, LightningCallback("4:3/2", module="model", recalibrate=2))
        trainer.fit(module, self.loader())
        assert steps(module) == {6}
        assert {int(c.step) for c in clusterings(module)} == {5}
        assert 0 < trainer.callback_metrics["dkm/gap"] < 1
        assert module.model[1].num_batches_tracked == 2  # re-estimated on two batches
        assert module.model[1].momentum == 0.1
        loaded = dkm.load(tmp_path / "model.dkm", into=self.Module().model)
        assert torch.equal(loaded.eval()[4].weight, module.model.eval()[4].weight)

    def test_resumes_exactly(self, tmp_path: Path):
        def fit(out: Path, ckpt_path: Path | None = None) -> bytes:
            callback = LightningCallback("4:3/2", module="model")
            self.trainer(out, callback).fit(self.Module(), self.loader(), ckpt_path=ckpt_path)
            return (out / "model.dkm").read_bytes()

        whole = fit(tmp_path / "whole")
        assert fit(tmp_path / "resumed", tmp_path / "whole" / "epoch=0.ckpt") == whole

    @pytest.mark.parametrize("method", ["atb", "escq", "profit", "soft-sharing", "rps", "meta-quant", "lr-net"])
    def test_methods_get_what_they_need(self, method: str, tmp_path: Path):
        def fit(out: Path, ckpt_path: Path | None = None) -> bytes:
            callback = LightningCallback(within(method, "0:3/3, 4:3/2"), module="model", method=method)
            self.trainer(out, callback).fit(self.Module(), self.loader(), ckpt_path=ckpt_path)
            return (out / "model.dkm").read_bytes()

        whole = fit(tmp_path / "whole")
        assert fit(tmp_path / "resumed", tmp_path / "whole" / "epoch=0.ckpt") == whole

    def test_a_plain_model_can_be_validated_before(self, tmp_path: Path):
        module = self.Module()
        trainer = self.trainer(tmp_path, LightningCallback("model.4:3"))
        assert trainer.validate(module, self.loader(), verbose=False)[0]["values"] == 4 * 288
        trainer.fit(module, self.loader())
        assert trainer.validate(module, self.loader(), verbose=False)[0]["values"] == 8

    def test_fitting_twice_goes_on(self, tmp_path: Path):
        module = self.Module()
        trainer = self.trainer(tmp_path, LightningCallback("model.4:3"))
        trainer.fit(module, self.loader())
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, self.loader())
        assert steps(module) == {12}
        assert {int(c.step) for c in clusterings(module)} == {11}

    def test_a_model_left_in_evaluation_mode_is_trained(self, tmp_path: Path):
        module = self.Module(evaluating=True)
        self.trainer(tmp_path, LightningCallback("model.4:3")).fit(module, self.loader())
        assert {int(c.step) for c in clusterings(module)} == {5}

    def test_an_unknown_length_needs_steps(self, tmp_path: Path):
        class Endless(IterableDataset):
            def __iter__(self):
                return iter(TestLightning.loader().dataset)

        loader = DataLoader(Endless(), 8)
        with pytest.raises(ValueError, match=r"how long it will train .* steps=<optimizer steps>"):
            self.trainer(tmp_path, LightningCallback("model.4:3")).fit(self.Module(), loader)
        for options in ({"steps": 50}, {"tau": 1e-3}):
            module = self.Module()
            self.trainer(tmp_path, LightningCallback("model.4:3", **options)).fit(module, loader)
            assert {int(c.step) for c in clusterings(module)} == {5}


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module(name)


class TestAccelerate:
    """There is no code of ours: the example is the integration."""

    def test_resumes_exactly(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        module = example("accelerate_digits", monkeypatch)
        data = module.load_data()

        def fit() -> bytes:
            torch.manual_seed(0)
            module.fit(module.network(), data, tmp_path, 2, "conv3:4/4, hidden:3")
            return (tmp_path / "model.dkm").read_bytes()

        whole = fit()
        shutil.rmtree(tmp_path / "checkpoints" / "checkpoint_1")
        torch.manual_seed(5)
        assert fit() == whole

    def test_tied_weights_resume(self, tmp_path: Path):
        """Accelerate writes safetensors, which hold a tensor once."""
        from accelerate import Accelerator

        def build() -> nn.Module:
            torch.manual_seed(0)
            model = TestTransformers.gpt2()
            dkm.compress_(model, "*:3/2, emb:4", steps=4)
            return model

        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(build())
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
        x = torch.randint(40, (4, 8))
        for _ in range(2):
            accelerator.backward(model(x, labels=x).loss)
            optimizer.step()
        accelerator.save_state(str(tmp_path))
        wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model(x, labels=x).loss.backward()
        optimizer.step()
        accelerator.load_state(str(tmp_path))
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, wanted[name]), name


@ADVICE
@pytest.mark.parametrize("name", ["transformers_text", "lightning_digits", "accelerate_digits"])
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    options = {"count": 256} if name == "transformers_text" else {}
    accuracies = example(name, monkeypatch).run(tmp_path, epochs=1, **options)
    assert all(math.isfinite(accuracy) for accuracy in accuracies)
    # The file: biases are rounded, which may move a few examples over the border between two classes.
    assert accuracies[1] == pytest.approx(accuracies[2], abs=2)
    assert (tmp_path / "compressed" / "model.dkm").exists()
    assert "x smaller than float32" in capsys.readouterr().out


def test_a_library_is_imported_only_where_it_is_used():
    code = "import dkm, dkm.integrations, sys; print({'transformers', 'lightning', 'accelerate'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
