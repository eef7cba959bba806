"""Layers that compute from codes: what dense layers give, from a part of the weight at a time."""

import copy

import pytest
import torch
from dkm_files import tensor
from small_language import make_language_model
from torch import nn

import dkm
from dkm.clustering.groups import Group
from dkm.clustering.spec import Spec
from dkm.runtime import layers
from dkm.runtime import packed as module
from dkm.runtime.loading import pack_
from dkm.runtime.packed import PackedWeight

SPECS = [Spec(2), Spec(4, 4), Spec(3, scaled=True), Spec(2, 3, group=Group(4, 8)), Spec(5, 2, group=Group(None, 24))]


def pair(layer: nn.Module, spec: Spec) -> tuple[nn.Module, nn.Module]:
    """The layer with the weight of these codes: dense, and packed."""
    each = tensor("weight", tuple(layer.weight.shape), spec)
    with torch.no_grad():
        layer.weight.copy_(each.values())
    packed = copy.deepcopy(layer)
    assert pack_(packed, [each]) == {}
    return layer, packed


def without_dense(monkeypatch):
    def refused(weight):
        raise AssertionError("the whole weight is decoded")

    monkeypatch.setattr(PackedWeight, "dense", refused)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.label)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_decodes_some_rows_at_a_time(spec, bias, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 64)
    torch.manual_seed(0)
    dense, packed = pair(nn.Linear(12, 37, bias=bias), spec)
    without_dense(monkeypatch)
    for shape in [(12,), (1, 12), (2, 5, 12), (0, 12)]:
        x = torch.randn(shape)
        torch.testing.assert_close(packed(x), dense(x))


def test_few_rows_are_multiplied_by_the_kernel_where_there_is_one(monkeypatch):
    kernel = pytest.importorskip("dkm.runtime.triton.product")
    dense, packed = pair(nn.Linear(12, 37), Spec(3))
    taken = []
    monkeypatch.setattr(layers, "KERNEL_DEVICES", {"cpu"})  # the kernel runs in Triton's interpreter
    monkeypatch.setattr(
        kernel, "product", lambda x, weight, own=kernel.product: taken.append(x.shape) or own(x, weight)
    )
    with torch.no_grad():
        for rows in (1, 64, 65):
            x = torch.randn(rows, 12)
            torch.testing.assert_close(packed(x), dense(x), rtol=1e-5, atol=1e-5)
    assert taken == [(1, 12), (64, 12)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.label)
def test_embeddings_decode_the_rows_that_are_looked_up(spec, monkeypatch):
    dense, packed = pair(nn.Embedding(37, 12), spec)
    bag, packed_bag = pair(nn.EmbeddingBag(37, 12, mode="sum"), spec)
    without_dense(monkeypatch)
    x = torch.tensor([[3, 36, 0], [3, 3, 1]])
    assert torch.equal(packed(x), dense(x))
    assert torch.equal(packed(x.int()), dense(x))
    assert packed(x[:0]).shape == (0, 3, 12)
    torch.testing.assert_close(packed_bag(x), bag(x))
    offsets, shares = torch.tensor([0, 2]), torch.rand(6)
    torch.testing.assert_close(packed_bag(x.view(-1), offsets, shares), bag(x.view(-1), offsets, shares))
    for wrong in (-1, 37):
        with pytest.raises(IndexError, match=f"row {wrong} of a weight that has 37"):
            packed(torch.tensor([1, wrong]))


def test_embeddings_with_a_largest_norm_or_padding():
    x = torch.tensor([[3, 36, 0], [3, 3, 1]])
    dense, packed = pair(nn.Embedding(37, 12, max_norm=0.5), Spec(3))
    torch.testing.assert_close(packed(x), dense(x))
    torch.testing.assert_close(packed(x), dense(x))
    dense, packed = pair(nn.EmbeddingBag(37, 12, padding_idx=3), Spec(3))
    torch.testing.assert_close(packed(x), dense(x))


class Scaled(nn.Embedding):
    def forward(self, x):
        return super().forward(x) * 3


class Twice(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight * 2, self.bias)


def test_a_forward_pass_of_its_own_is_kept(monkeypatch):
    x = torch.randn(2, 12)
    dense, packed = pair(Twice(12, 7), Spec(2))
    torch.testing.assert_close(packed(x), dense(x))
    dense, packed = pair(Scaled(37, 12), Spec(2))
    without_dense(monkeypatch)  # what it calls is ours
    assert torch.equal(packed(torch.tensor([1, 5])), dense(torch.tensor([1, 5])))


CONVOLUTIONS = [
    (nn.Conv1d(6, 8, 3, groups=2), (2, 6, 9)),
    (nn.Conv2d(6, 8, (3, 1), padding=1, padding_mode="circular"), (2, 6, 7, 7)),
    (nn.Conv3d(2, 8, 3, stride=2), (2, 2, 5, 5, 5)),
    (nn.ConvTranspose2d(6, 8, 3, stride=2), (2, 6, 4, 4)),
    (nn.RNNCell(6, 5), (3, 6)),
]


@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS, ids=lambda value: type(value).__name__)
def test_other_layers_read_their_weight(layer, shape):
    names = [name for name, each in layer.named_parameters() if each.ndim > 1]
    tensors = [tensor(name, tuple(getattr(layer, name).shape), Spec(3, 2)) for name in names]
    x = torch.randn(shape)
    with torch.no_grad():
        for each in tensors:
            getattr(layer, each.name).copy_(each.values())
        expected = layer(x)
        pack_(layer, tensors)
    assert not set(names) & {name for name, _ in layer.named_parameters()}
    torch.testing.assert_close(layer(x), expected)


def test_the_gradient_of_the_input_is_that_of_the_dense_layer(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 64)
    dense, packed = pair(nn.Linear(12, 37), Spec(3))
    gradients = []
    for layer in (dense, packed):
        x = torch.linspace(-1, 1, 12).requires_grad_()
        layer(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
    assert not packed.weight.requires_grad


def test_compiled_without_a_break():
    dense, packed = pair(nn.Linear(12, 37), Spec(2, 3, scaled=True))
    embedding = pair(nn.Embedding(20, 12), Spec(4, group=Group(4, 8)))
    compiled = torch.compile(nn.Sequential(embedding[1], packed), backend="aot_eager", fullgraph=True)
    x = torch.tensor([[0, 19, 3]])
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), dense(embedding[0](x)))


def test_autocast_casts_what_it_reads():
    dense, packed = pair(nn.Linear(12, 37), Spec(2))
    x = torch.randn(3, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert packed(x).dtype == torch.bfloat16
        torch.testing.assert_close(packed(x), dense(x))


def test_equal_layers_have_one_class():
    one, other = (pair(nn.Linear(3, size), Spec(2))[1] for size in (4, 5))
    assert type(one) is type(other)


def test_a_language_model_of_transformers_writes(tmp_path):
    transformers = pytest.importorskip("transformers")
    make_language_model(tmp_path / "model")

    def build():
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    model = build()
    dkm.compress_(model, "all:4/2", tau=1.0)
    dkm.save(model, tmp_path / "model.dkm")
    dense = dkm.load(tmp_path / "model.dkm", into=build()).eval()
    packed = dkm.load(tmp_path / "model.dkm", into=build(), packed=True)
    assert packed.lm_head.packed_weight is packed.model.embed_tokens.packed_weight
    text = packed.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=9, do_sample=False)
    assert text.shape[1] > 3
    torch.testing.assert_close(packed(text).logits, dense(text).logits)


def test_conv1d_of_transformers():
    layers = pytest.importorskip("transformers.pytorch_utils")
    dense, packed = pair(layers.Conv1D(9, 12), Spec(3, group=Group(4, 8)))
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(packed(x), dense(x))
