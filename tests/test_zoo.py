"""Other people's networks through the whole cycle: plan, compress_, train a step, evaluate, save, load."""

import copy
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torchvision import models as tv

import dkm
from dkm.modelling.parameters import parameters

pytestmark = [
    # torch's own: TransformerEncoder's fast path announces nested tensors, and says why it cannot use them
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]


class Recurrent(nn.Module):
    """Tokens -> embedding -> an LSTM or GRU -> the average over time -> classes."""

    def __init__(self, kind: type[nn.RNNBase], **options):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.rnn = kind(16, 24, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear((self.rnn.proj_size or 24) * (1 + self.rnn.bidirectional), 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(tokens))[0].mean(1))


class Attention(nn.Module):
    """nn.MultiheadAttention with keys and values of other widths: three separate projections."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 2, kdim=16, vdim=12, bias=False, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x[..., :16], x[..., :12])[0].mean(1)


class Shared(nn.Module):
    """One module under two names, and a matrix that is an embedding here and a linear layer there."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.layers = nn.ModuleList([nn.Linear(24, 24)] * 2)
        self.head = nn.Linear(24, 50)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


def without_constants(model: nn.Module) -> nn.Module:
    """Noise for weights that start as constants (a head of zeros, a layer scale), as training would give them."""
    for weight in model.parameters():
        if weight.ndim > 1 and (weight == weight.flatten()[0]).all():
            nn.init.normal_(weight, weight.mean().item(), 0.1)
    return model


def vit() -> nn.Module:
    model = tv.VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=48, mlp_dim=96, num_classes=10)
    return without_constants(model)


def convnext() -> nn.Module:
    blocks = [tv.convnext.CNBlockConfig(*widths, 1) for widths in pairwise((24, 48, 96, 192, None))]
    return without_constants(tv.convnext.ConvNeXt(blocks, layer_scale=0.1, num_classes=10))


def transposed() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (8, 4)),
        nn.ConvTranspose1d(8, 12, 4, stride=2),
        nn.Unflatten(2, (2, 5)),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 12, 3, stride=2, groups=2),
        nn.Unflatten(3, (11, 1)),
        nn.ReLU(),
        nn.ConvTranspose3d(12, 5, (3, 2, 2), bias=False),
        nn.Flatten(2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 7))


def bert() -> nn.Module:
    sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96)
    return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=50, num_labels=3, **sizes))


def distilbert() -> nn.Module:
    config = hf.DistilBertConfig(vocab_size=50, num_labels=3, dim=48, n_layers=2, n_heads=2, hidden_dim=96)
    return hf.DistilBertForSequenceClassification(config)


def albert() -> nn.Module:
    sizes = dict(embedding_size=24, hidden_size=48, num_attention_heads=2, intermediate_size=96, num_hidden_layers=3)
    return hf.AlbertForSequenceClassification(hf.AlbertConfig(vocab_size=50, num_labels=3, **sizes))


def gpt2() -> nn.Module:
    ends = dict(bos_token_id=0, eos_token_id=0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, n_positions=16, n_embd=48, n_layer=2, n_head=2, **ends))


def llama(*, tied: bool) -> nn.Module:
    sizes = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config = hf.LlamaConfig(vocab_size=50, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)
    return hf.LlamaForCausalLM(config)


def images(side: int) -> Tensor:
    return torch.randn(2, 3, side, side)


def tokens() -> Tensor:
    return torch.randint(50, (2, 8))


# name: (build, an input, a plan, how many names too many the tensors have)
ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str, int]] = {
    "resnet18": (tv.resnet18, lambda: images(32), "all:3/2", 0),
    "mobilenet_v2": (tv.mobilenet_v2, lambda: images(32), "all:4", 0),
    "googlenet": (lambda: tv.googlenet(aux_logits=False, init_weights=False), lambda: images(32), "all:4/4", 0),
    "vit": (vit, lambda: images(32), "*:3/2, conv_proj:4", 0),
    "convnext": (convnext, lambda: images(32), "all:4/3, *layer_scale:2", 0),
    "vit_b_16": (lambda: without_constants(tv.vit_b_16(image_size=32)), lambda: images(32), "*:2/4", 0),
    "convnext_tiny": (lambda: without_constants(tv.convnext_tiny()), lambda: images(32), "all:2/4, *layer_scale:2", 0),
    "bert": (bert, tokens, "*:3/2, emb:8", 0),
    "distilbert": (distilbert, tokens, "*:4/2, fc:8/4", 0),
    "albert": (albert, tokens, "*:3/2", 0),
    "gpt2": (gpt2, tokens, "*:3/2", 1),
    "llama-tied": (lambda: llama(tied=True), tokens, "*:4, lm_head:3/2", 1),
    "llama-bfloat16": (lambda: llama(tied=True).bfloat16(), tokens, "*:4", 1),
    "llama-untied": (lambda: llama(tied=False), tokens, "*:3/2, lm_head:4", 0),
    "lstm": (lambda: Recurrent(nn.LSTM, bidirectional=True), tokens, "*:3/2", 0),
    "lstm-projected": (lambda: Recurrent(nn.LSTM, proj_size=16, dropout=0.1), tokens, "*:2", 0),
    "gru": (lambda: Recurrent(nn.GRU, bias=False), tokens, "*:4", 0),
    "transposed": (transposed, lambda: torch.randn(3, 32), "*:2/5", 0),
    "encoder": (encoder, tokens, "*:3/2", 0),
    "attention": (Attention, lambda: torch.randn(3, 5, 24), "*:4", 0),
    "shared": (Shared, tokens, "*:3/7", 3),
}


def evaluated_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the model computes with, by name."""
    return {
        name: getattr(*owner)
        for owned in parameters(model)
        for name, owner in zip(owned.names, owned.owners * len(owned.names), strict=False)
    }


@pytest.mark.parametrize("name", ZOO)
def test_cycle(name: str, tmp_path: Path):
    build, make_input, text, spare_names = ZOO[name]
    x, model = make_input(), build()
    names, types = tensor_names(model), [type(module) for module in model.modules()]
    assert sum(map(len, names)) == len(names) + spare_names

    plan = dkm.plan(model, text)
    assert sorted([row.name, *row.aliases] for row in plan.rows) == names
    assert all(row.bits for row in plan.rows if len(row.shape) > 1)  # these texts leave biases and norms only
    assert dkm.compress_(model, text, steps=10) == plan

    train_a_step(model, x)
    clustered = [owned for owned in parameters(model) if owned.clustered is not None]
    assert len(clustered) == sum(row.bits is not None for row in plan.rows)
    for owned in clustered:
        assert owned.tensor.grad is not None, owned.names
        assert owned.tensor.grad.isfinite().all(), owned.names
        assert owned.tensor.grad.any(), owned.names

    expected = logits(model.eval(), x)
    assert expected.isfinite().all()
    for dtype in (torch.float32, torch.float16):
        path = tmp_path / f"{dtype}.dkm"
        written = dkm.save(model, path, dtype=dtype)
        assert dkm.size(model, dtype=dtype).file_bytes == written == os.path.getsize(path)
        snapped = dkm.snap_(copy.deepcopy(model), dtype=dtype)
        loaded = dkm.load(path, into=build()).eval()
        state = loaded.state_dict()
        if dtype == torch.float32:
            # Bit-equal weights.  Their outputs agree to rounding only: PyTorch computes a parametrized recurrent or
            # attention layer by other operations than a plain one.
            for name_of, used in evaluated_weights(model).items():
                assert torch.equal(state[name_of], used), name_of
            torch.testing.assert_close(logits(loaded, x), expected)
        for dense in (loaded, snapped):
            assert tensor_names(dense) == names
            assert [type(module) for module in dense.modules()] == types
        assert {key for key, value in snapped.state_dict().items() if torch.equal(value, state[key])} == set(state)
    assert torch.equal(logits(model, x), expected)  # neither save nor the snapped copies changed it


@pytest.mark.parametrize("name", ["lstm", "lstm-projected", "gru"])
def test_recurrent_layer_computes_with_clustered_weights(name: str):
    """nn.RNNBase keeps a list of its weights: it must not be stale, nor keep the module from being copied."""
    build, make_input, text, _ = ZOO[name]
    x, model = make_input(), build()
    model.rnn.dropout = 0.0
    plain = copy.deepcopy(model)
    dkm.compress_(model, text, steps=10)
    for _ in range(2):
        train_a_step(model, x)
        for trained in (model, copy.deepcopy(model)):
            clustered = {owned.names[0]: getattr(*owned.owners[0]) for owned in parameters(trained)}
            underneath = {owned.names[0]: owned.tensor for owned in parameters(trained)}
            output = trained(x)
            with_clustered, with_underneath = (
                torch.func.functional_call(plain, weights, x) for weights in (clustered, underneath)
            )
            torch.testing.assert_close(output, with_clustered)
            assert (output - with_underneath).abs().max() > 1e-3  # far beyond rounding


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_recurrent_layer_can_be_moved_and_copied(name: str):
    """`.to()` makes nn.RNNBase read all its weights."""
    build, make_input, text, _ = ZOO[name]
    x, model = make_input(), build()
    dkm.compress_(model, text, steps=10)
    train_a_step(model, x)
    train_a_step(copy.deepcopy(copy.deepcopy(model).double()), x)
    expected = logits(model.eval(), x)
    torch.testing.assert_close(logits(copy.deepcopy(model.double()), x).float(), expected)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_snapping_a_recurrent_layer_in_training_mode_equals_the_file(name: str, tmp_path: Path):
    """Taking the first clustering off makes nn.RNNBase read, and so advance, the others."""
    build, make_input, text, _ = ZOO[name]
    model = build()
    dkm.compress_(model, text, steps=10)
    train_a_step(model, make_input())
    dkm.save(model, tmp_path / "rnn.dkm")
    state = dkm.load(tmp_path / "rnn.dkm")
    for key, value in dkm.snap_(model.train()).state_dict().items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_recurrent_layer_runs_twice_with_cached_weights(name: str):
    """`parametrize.cached()` makes one clustering serve all runs of a layer within a step."""
    build, make_input, text, _ = ZOO[name]
    x, model = make_input(), build()
    dkm.compress_(model, text, steps=10)
    with parametrize.cached():
        assert torch.equal(model(x), model(x))


def train_a_step(model: nn.Module, x: Tensor) -> None:
    """Forward, a finite loss, backward, and an optimizer's step; the gradients stay."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    output = output_of(model, x).flatten(0, -2)
    loss = F.cross_entropy(output, torch.arange(len(output)) % output.shape[1])
    assert loss.isfinite()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def logits(model: nn.Module, x: Tensor) -> Tensor:
    assert not model.training
    return output_of(model, x)


def output_of(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return output if isinstance(output, Tensor) else output.logits


def tensor_names(model: nn.Module) -> list[list[str]]:
    """The plain names of every distinct parameter: tied ones are in one list."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(names.values())
