"""The blocks of a model: from its module tree and one forward pass, or by names."""

import pytest
import torch
from torch import Tensor, nn

import dkm
from dkm.training.blocks import Block, find_blocks


def blocks_of(model: nn.Module, batch, plan: str = "all:1", names=None) -> tuple[list[Block], list[str]]:
    teacher = dkm.teacher(model.eval())
    dkm.compress_(model, plan, steps=2)

    @torch.no_grad()
    def run(network: nn.Module):
        return network(**batch) if isinstance(batch, dict) else network(batch)

    return find_blocks(model, teacher, run, names)


def modules_of(found: tuple[list[Block], list[str]]) -> list[str]:
    assert not found[1]
    return ["+".join(block.modules) for block in found[0]]


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())


class Network(nn.Module):
    """A stem, three residual blocks in a list, a layer that is called twice, and a head."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.stem, self.norm = nn.Linear(5, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(Residual(width) for _ in range(3))
        self.twice = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.twice(self.twice(x)))


def test_a_stem_with_its_norm_the_blocks_of_a_list_and_what_is_in_none():
    blocks, left = blocks_of(Network(), torch.randn(3, 5))
    assert ["+".join(block.modules) for block in blocks] == ["stem+norm", "layers.0", "layers.1", "layers.2", "head"]
    assert set(blocks[1].tensors) == {"layers.0.first.weight", "layers.0.second.weight"}
    assert left == ["twice.weight"]  # a block is called once


def test_plain_lists_of_layers():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten())
    model.extend([nn.Linear(36, 8), nn.Dropout(), nn.Linear(8, 2)])
    assert modules_of(blocks_of(model, torch.randn(2, 3, 8, 8))) == ["0+1+2", "5+6", "7"]


def test_what_changes_the_output_on_the_way_does_not_follow():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x):
            return self.norm(self.b(self.a(x)).mul_(2))

    assert modules_of(blocks_of(Changing(), torch.randn(2, 4))) == ["a", "b"]


def test_resnet18():
    torchvision = pytest.importorskip("torchvision")
    found = modules_of(blocks_of(torchvision.models.resnet18(), torch.randn(1, 3, 64, 64)))
    residual = [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    assert found == ["conv1+bn1+relu", *residual, "fc"]


def test_mobilenet_v2():
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.mobilenet_v2(width_mult=0.25)
    names = {row.name for row in dkm.plan(model, "all:1").rows if row.bits is not None}
    blocks, left = blocks_of(model, torch.randn(1, 3, 32, 32))
    assert [block.name for block in blocks] == [f"features.{i}" for i in range(19)] + ["classifier"]
    assert {name for block in blocks for name in block.tensors} == names
    assert not left


def test_a_small_vision_transformer():
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 32)
    layers = [f"encoder.layers.encoder_layer_{i}" for i in (0, 1)]
    found = modules_of(blocks_of(model, torch.randn(1, 3, 16, 16)))
    assert found == ["conv_proj", layers[0], f"{layers[1]}+encoder.ln", "heads"]


def test_bert_and_a_tied_language_model():
    transformers = pytest.importorskip("transformers")
    size = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    tokens = torch.randint(50, (2, 7))
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**size))
    batch = dict(input_ids=tokens, attention_mask=torch.ones(2, 7, dtype=torch.long))
    found = modules_of(blocks_of(bert, batch, "all:1, emb:1"))
    layers = ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert found == ["bert.embeddings", *layers, "bert.pooler+dropout", "classifier"]
    config = transformers.LlamaConfig(**size, tie_word_embeddings=True, use_cache=False)
    blocks, left = blocks_of(transformers.LlamaForCausalLM(config), dict(input_ids=tokens), "all:1, emb:1")
    assert [block.name for block in blocks] == ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    assert blocks[0].tensors == ("model.embed_tokens.weight",)  # the head is the same tensor, and is not trained again
    assert not left


def test_frozen_weights_are_in_no_block():
    model = Network()
    model.stem.weight.requires_grad_(False)
    blocks, left = blocks_of(model, torch.randn(3, 5))
    assert blocks[0].name == "layers.0"
    assert left == ["stem.weight", "twice.weight"]


def test_names_are_taken_in_the_order_of_the_calls():
    blocks, left = blocks_of(Network(), torch.randn(3, 5), names=["layers.2", "stem"])
    assert [block.modules for block in blocks] == [("stem",), ("layers.2",)]
    assert "head.weight" in left


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["layer.1"], "no module 'layer.1' to be a block: did you mean layers.1"),
        (["twice"], "'twice' is called 2 times"),
        (["layers"], "'layers' is called 0 times"),
        (["norm"], "'norm' has no clustered weight that trains"),
        (["layers.0", "layers.0.first"], "overlap: 'layers.0' and 'layers.0.first'"),
        (["stem", "stem"], "overlap: 'stem' and 'stem'"),
    ],
)
def test_bad_names(names: list[str], said: str):
    with pytest.raises(ValueError, match=said):
        blocks_of(Network(), torch.randn(3, 5), names=names)


def test_one_name_is_not_a_list_of_names():
    with pytest.raises(TypeError, match=r"write \['stem'\]"):
        blocks_of(Network(), torch.randn(3, 5), names="stem")


def test_what_a_call_may_change_cannot_be_kept():
    class Cache:
        pass

    class Layer(nn.Linear):
        def forward(self, x, cache):
            return super().forward(x)

    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer(3, 3)

        def forward(self, x):
            return self.layer(x, Cache())

    with pytest.raises(ValueError, match=r"'layer' is called with a Cache.*use_cache=False"):
        blocks_of(Caching(), torch.randn(2, 3))
