"""Layers that were packed and get their dense weights back."""

from pathlib import Path

import torch
from packed_models import Layers, words, write_layers
from torch import nn

import dkm
from dkm.modelling.packed_tensor import packed_tensors
from dkm.runtime.layers import release


def test_every_kind_of_layer_is_what_it_was(tmp_path: Path):
    file = write_layers(tmp_path / "model.dkm")
    dense, packed = dkm.load(file, into=Layers()).eval(), dkm.load(file, into=Layers(), packed=True)
    for names, weight in packed_tensors(packed):
        parameter = nn.Parameter(weight.dense())
        for name in names:
            path, _, attribute = name.rpartition(".")
            release(packed.get_submodule(path), attribute, parameter)
    assert [type(module) for module in packed.modules()] == [type(module) for module in dense.modules()]
    state, expected = packed.state_dict(), dense.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert packed.head.weight is packed.emb.weight
    torch.testing.assert_close(packed(words()), dense(words()))
    packed.train()(words()).sum().backward()
    assert packed.lstm.weight_ih_l0.grad is not None
