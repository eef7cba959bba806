"""Folders with packed codes: transformers reads what dkm writes, with the weights of the .dkm file bit for bit."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from small_language import make_language_model
from torch import nn

import dkm
from dkm.integrations.transformers import save_pretrained
from dkm.modelling.packed_tensor import packed_tensors

PLAN = (
    "*.q_proj:8/8, *.k_proj:8/8 scaled, *.v_proj:2/2, *.o_proj:3/1 per 8x16, *.up_proj:4/4 per 16 rows e4m3, "
    "*.gate_proj:5/8 scaled per 96, *.down_proj:keep, *.embed_tokens:6/4"
)
hf.logging.disable_progress_bar()


def compressed(place: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> nn.Module:
    make_language_model(place / "model", tied=tied)
    model = hf.AutoModelForCausalLM.from_pretrained(place / "model", dtype=dtype)
    dkm.compress_(model, PLAN, tau=1.0)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_those_of_the_file(tmp_path: Path, tied: bool, dtype: torch.dtype):
    model = compressed(tmp_path, tied=tied, dtype=dtype)
    dkm.save(model, tmp_path / "model.dkm")
    expected = dkm.load(tmp_path / "model.dkm")
    save_pretrained(model, tmp_path / "out")
    for asked in (dtype, torch.float16):
        loaded, info = hf.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=asked, output_loading_info=True, local_files_only=True
        )
        assert not any(info.values()), info
        assert {names[0] for names, _ in packed_tensors(loaded)} == {
            name for name in expected if name.endswith("_proj.weight") or name == "model.embed_tokens.weight"
        } - {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)}
        state = loaded.dequantize().state_dict()
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(state[name], value.to(asked)), name
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        assert not loaded.training
    assert hf.AutoConfig.from_pretrained(tmp_path / "out").dtype == dtype


def test_it_writes_texts(tmp_path: Path):
    """From its codes as from dense weights."""
    save_pretrained(compressed(tmp_path), tmp_path / "out")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    x = torch.tensor([[1, 5, 7]])
    with torch.no_grad():
        logits = model(x).logits
    written = model.generate(x, max_new_tokens=5, do_sample=False)
    assert written.shape[1] > 3
    assert packed_tensors(model)
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("word3").input_ids == [6]
    plain = model.dequantize()
    with torch.no_grad():
        torch.testing.assert_close(plain(x).logits, logits)


def test_a_model_with_dense_weights_is_a_plain_one(tmp_path: Path):
    save_pretrained(compressed(tmp_path), tmp_path / "out")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dequantize()
    assert not packed_tensors(model)
    assert type(model.lm_head) is nn.Linear
    model.save_pretrained(tmp_path / "dense")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.weight)
    x = torch.tensor([[1, 5, 7]])
    model.train()(x, labels=x).loss.backward()
    assert model.lm_head.weight.grad is not None
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.half().dtype == torch.float16


def test_a_packed_model_is_saved_packed(tmp_path: Path):
    save_pretrained(compressed(tmp_path), tmp_path / "out")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert len(list((tmp_path / "again").glob("model-*.safetensors"))) > 1
    base = hf.AutoModel.from_pretrained(tmp_path / "out")
    base.save_pretrained(tmp_path / "base")
    dense = model.dequantize().state_dict()
    for name in ("again", "base"):
        again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert len(packed_tensors(again)) == 13
        assert all(torch.equal(value, dense[key]) for key, value in again.dequantize().state_dict().items())


def test_a_folder_from_a_file(tmp_path: Path):
    dkm.save(compressed(tmp_path), tmp_path / "model.dkm")
    plain = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    report = dkm.export(tmp_path / "model.dkm", tmp_path / "out", to="transformers", model=plain)
    assert not report.dense
    dkm.load(tmp_path / "model.dkm", into=plain)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    x = torch.tensor([[1, 5, 7]])
    torch.testing.assert_close(loaded(x).logits, plain(x).logits)


def test_outliers(tmp_path: Path):
    make_language_model(tmp_path / "model")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    dkm.compress_(model, "*.q_proj:3, *.k_proj:2 scaled, *.embed_tokens:4", method="gobo", threshold=-0.5)
    sizes = dkm.size(model)
    assert all("outlier" in row.reason for row in sizes.clustered)
    dkm.save(model, tmp_path / "model.dkm")
    expected = dkm.load(tmp_path / "model.dkm")
    save_pretrained(model, tmp_path / "out")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(packed_tensors(loaded)) == len(sizes.clustered)
    loaded.save_pretrained(tmp_path / "again")
    for found in (loaded, hf.AutoModelForCausalLM.from_pretrained(tmp_path / "again")):
        state = found.dequantize().state_dict()
        assert all(torch.equal(state[name], value.to(state[name].dtype)) for name, value in expected.items())


def test_shards(tmp_path: Path):
    model = compressed(tmp_path)
    save_pretrained(model, tmp_path / "one")
    save_pretrained(model, tmp_path / "out", max_shard_size="10KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    one, several = (hf.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "out"))
    one, several = one.dequantize().state_dict(), several.dequantize().state_dict()
    assert all(torch.equal(one[name], several[name]) for name in one)


def test_the_files_are_as_small_as_the_dkm_file(tmp_path: Path):
    """Apart from names: 200 bytes for each stored tensor."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=256, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=512, **sizes, tie_word_embeddings=True))
    dkm.compress_(model, "all:2", tau=1.0)
    packed = dkm.save(model, tmp_path / "model.dkm")
    save_pretrained(model, tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    assert (tmp_path / "out/model.safetensors").stat().st_size < packed + 200 * len(stored)


def test_a_model_without_its_head(tmp_path: Path):
    """Its parameters have names without the prefix that they have in the folder."""
    model = compressed(tmp_path)
    save_pretrained(model, tmp_path / "out")
    loaded = hf.AutoModel.from_pretrained(tmp_path / "out").dequantize()
    dkm.snap_(model)
    found = dict(loaded.named_parameters())
    assert torch.equal(found["embed_tokens.weight"], model.model.embed_tokens.weight)
    assert torch.equal(found["layers.1.mlp.up_proj.weight"], model.model.layers[1].mlp.up_proj.weight)
    loaded.save_pretrained(tmp_path / "base")
    dkm.compress_(loaded, "*.q_proj:4/2", tau=1.0)
    save_pretrained(loaded, tmp_path / "without")
    with_head = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "without").dequantize()
    expected = dkm.snap_(loaded).layers[0].self_attn.q_proj.weight
    assert torch.equal(with_head.model.layers[0].self_attn.q_proj.weight, expected)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_other_models(tmp_path: Path, kind: str):
    """Linear layers as Conv1D, heads with biases, and several names of one embedding."""
    torch.manual_seed(0)
    small = dict(vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = {
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_positions=16, n_embd=32, n_layer=1, n_head=2, **small)),
        "bert": lambda: hf.BertForMaskedLM(
            hf.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, **small)
        ),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0, **small)
        ),
    }[kind]()
    names = {"gpt2": "transformer.wte", "bert": "bert.embeddings.word_embeddings", "t5": "shared"}
    dkm.compress_(model, f"{names[kind]}:6/4, all:4/2", tau=1.0)
    dkm.save(model, tmp_path / "model.dkm")
    expected = dkm.load(tmp_path / "model.dkm")
    save_pretrained(model, tmp_path / "out")
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    state = loaded.dequantize().state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    original = {id(each) for each in model.parameters()}
    assert len(list(loaded.parameters())) == len(original)


def test_a_tie_that_transformers_does_not_know(tmp_path: Path):
    model = compressed(tmp_path)
    dkm.snap_(model)
    first, second = (layer.self_attn.q_proj for layer in model.model.layers)
    second.weight = first.weight
    dkm.compress_(model, "*.q_proj:8/8", tau=1.0)
    save_pretrained(model, tmp_path / "out")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(packed_tensors(loaded)) == 1
    loaded.dequantize()
    first, second = (layer.self_attn.q_proj for layer in loaded.model.layers)
    assert second.weight is first.weight
    assert torch.equal(first.weight, dkm.snap_(model).model.layers[1].self_attn.q_proj.weight)


def test_without_dkm_transformers_refuses_the_folder(tmp_path: Path):
    save_pretrained(compressed(tmp_path), tmp_path / "out")
    code = f"""
import transformers
for name in ("AutoModelForCausalLM", "LlamaForCausalLM", "AutoModel"):
    try:
        getattr(transformers, name).from_pretrained({str(tmp_path / "out")!r})
    except (RuntimeError, ValueError) as error:
        print(error)
    else:
        print("loaded")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "loaded" not in done.stdout
    assert done.stdout.count("thus raising an error") == 3
    assert "Unknown quantization type, got dkm" in done.stderr
    assert "embed_tokens.weight" in done.stderr


def test_the_card(tmp_path: Path):
    """What it tells to do works, and its figures are those of the folder."""
    report = save_pretrained(compressed(tmp_path), tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    script = f"{code}\nprint(type(model).__name__, model.config.vocab_size)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["LlamaForCausalLM", "64"], done.stderr
    assert "| 4/4 per 16 rows e4m3 | 2 | 4,096 | 1,024 |" in card
    assert f"{sum(row.bytes for row in report.rows):,} bytes" in card


def changed(folder: Path, change) -> None:
    """Change an entry of the configuration."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))


NAME = "model.layers.0.self_attn.k_proj.weight"
LIES = {
    "a version": (lambda q: q.update(version=9), "has version 9, this dkm reads 1: upgrade"),
    "tensors": (lambda q: q.update(tensors=[1]), "are not objects"),
    "an entry": (lambda q: q["tensors"].update({NAME: 3}), "is not that of a clustered tensor"),
    "bits": (lambda q: q["tensors"][NAME].update(bits=13), "bits of .* are not an integer from 1 to 12"),
    "a shape": (lambda q: q["tensors"][NAME].update(shape=[32, 64]), r"is \(32, 64\) in the folder and \(32, 32\)"),
    "no shape": (lambda q: q["tensors"][NAME].update(shape="x"), "is not a list of integers"),
    "a huge dim": (lambda q: q["tensors"][NAME].update(dim=2**59), "is too large"),
    "a dtype": (lambda q: q["tensors"][NAME].update(centroids="float12"), "unknown dtype"),
    "another dtype": (lambda q: q["tensors"][NAME].update(centroids="float32"), "mismatch|are 4096 bytes"),
    "a key": (lambda q: q["tensors"][NAME].update(coding="ans"), "is not that of a clustered tensor"),
    "a group": (lambda q: q["tensors"][NAME].update(group=[0, 1]), "group of .* is not two integers"),
    "checksums": (lambda q: q.update(dense=["model.norm.weight"]), "are not objects"),
    "a checksum": (lambda q: q["dense"].update({"model.norm.weight": 1}), "norm.weight.* has a wrong checksum"),
    "a tensor more": (lambda q: q["dense"].update(another="0" * 64), "another.* is not in its files"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_configuration_that_lies(tmp_path: Path, case: str):
    save_pretrained(compressed(tmp_path), tmp_path / "out")
    change, message = LIES[case]
    changed(tmp_path / "out", change)
    error = (RuntimeError, dkm.FileError) if "mismatch" in message else dkm.FileError  # transformers may see it first
    with pytest.raises(error, match=message):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("part", ["", "_centroids", "_scales"])
def test_bytes_that_were_changed(tmp_path: Path, part: str):
    save_pretrained(compressed(tmp_path), tmp_path / "out")
    state = load_file(tmp_path / "out/model.safetensors")
    state[NAME + part].view(-1)[3] ^= 1
    save_file(state, tmp_path / "out/model.safetensors", {"format": "pt"})
    with pytest.raises(dkm.FileError, match="has a wrong checksum"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("saved", ["exported", "again"])
@pytest.mark.parametrize("what", ["a bit", "the tensor"])
def test_what_is_not_clustered_was_changed(tmp_path: Path, tied: bool, saved: str, what: str):
    """In any shard, and also where it is read as another dtype or by a model that has no such tensor."""
    save_pretrained(compressed(tmp_path, tied=tied), tmp_path / "exported", max_shard_size="10KB")
    for dtype in (torch.float32, torch.bfloat16):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=dtype).save_pretrained(tmp_path / "again")
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float16)
    folder, name = tmp_path / saved, "model.norm.weight" if tied else "lm_head.weight"
    file = next(file for file in sorted(folder.glob("*.safetensors")) if name in load_file(file))
    state = load_file(file)
    if what == "a bit":
        state[name].view(-1).view(torch.uint8)[0] ^= 1
    else:
        del state[name]
    save_file(state, file, {"format": "pt"})
    message = "has a wrong checksum" if what == "a bit" else "is not in its files"
    with pytest.raises(dkm.FileError, match=f"{name}.* {message}"):
        hf.AutoModel.from_pretrained(folder, dtype=torch.bfloat16)


def test_a_folder_without_checksums_of_what_is_not_clustered(tmp_path: Path):
    """As they were written before there were any."""
    save_pretrained(compressed(tmp_path), tmp_path / "out")
    expected = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dequantize().state_dict()
    changed(tmp_path / "out", lambda q: q.pop("dense"))
    found = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dequantize().state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("part", ["", "_centroids", "_scales"])
def test_bytes_that_were_lost(tmp_path: Path, part: str):
    """Memory that transformers has not written to may hold what was lost, by chance; anything else is an error."""
    save_pretrained(compressed(tmp_path), tmp_path / "out")
    expected = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dequantize().state_dict()
    state = load_file(tmp_path / "out/model.safetensors")
    del state[NAME + part]
    save_file(state, tmp_path / "out/model.safetensors", {"format": "pt"})
    with contextlib.suppress(dkm.FileError):
        loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dequantize()
        assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_it_compresses_nothing_by_itself(tmp_path: Path):
    from dkm.integrations.quantizer import DKMConfig

    make_language_model(tmp_path / "model")
    with pytest.raises(ValueError, match="pre-quantized"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=DKMConfig())
