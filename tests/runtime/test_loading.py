"""`dkm.load(path, into=model, packed=True)`: the model of the file, of which codes and centroids are in memory."""

import copy
import io
import pickle

import pytest
import safetensors.torch
import torch
from packed_models import Layers, weights, words, write_layers
from torch import nn

import dkm
from dkm.formats.described import Described
from dkm.modelling.packed_tensor import packed_tensors
from dkm.runtime.packed import PackedWeight


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_layers(tmp_path_factory.mktemp("packed") / "layers.dkm")


def plain(file):
    return dkm.load(file, into=Layers()).eval()


def packed(file, model=None):
    return dkm.load(file, into=Layers() if model is None else model, packed=True)


def memory(model):
    """The bytes of all parameters and buffers, shared ones once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(storage.nbytes() for storage in {t.data_ptr(): t.untyped_storage() for t in tensors}.values())


def clustered(file):
    return [name for tensor in packed_tensors(packed(file)) for name in tensor.names]


def assert_same_model(model, file):
    dense = plain(file)
    expected, found = weights(dense), weights(model)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    torch.testing.assert_close(model(words()), dense(words()))


def test_it_is_the_dense_model(file):
    model = packed(file)
    assert len(clustered(file)) == 13  # an alias is one of them
    assert_same_model(model, file)
    assert isinstance(model.head, nn.Linear)
    assert isinstance(model.lstm, nn.LSTM)
    assert not model.training


def test_tied_layers_share_the_codes(file):
    model = packed(file)
    assert model.head.packed_weight is model.emb.packed_weight


def test_a_model_on_meta_gets_memory_for_what_the_file_holds_only(file, monkeypatch):
    with torch.device("meta"):
        model = Layers()
    monkeypatch.setattr(Described, "values", lambda each: each.content.to(each.dtype))  # no codes are decoded
    packed(file, model)
    monkeypatch.undo()
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    held = sum(tensor.nbytes for _, tensor in packed_tensors(model))
    others = sum(tensor.nbytes for tensor in model.state_dict().values()) - held
    assert memory(model) < 2 * file.stat().st_size
    assert others > 0
    assert_same_model(model, file)


def test_buffers_on_meta_that_no_file_holds_are_refused(file):
    with torch.device("meta"):
        model = Layers()
        model.norm.register_buffer("table", torch.zeros(3), persistent=False)
    with pytest.raises(dkm.FileError, match=r"norm\.table is a buffer that no file holds"):
        packed(file, model)
    assert type(model.conv) is nn.Conv1d


def test_the_dtype_of_the_model_is_kept(file):
    model = packed(file, Layers().double())
    assert model.conv.weight.dtype == torch.float64
    assert torch.equal(model.conv.weight.float(), plain(file).conv.weight)
    assert_same_model(model.float(), file)


def test_half_and_back(file):
    model = packed(file).half()
    expected = plain(file).half()
    assert torch.equal(model.conv.weight, expected.conv.weight)
    assert torch.equal(model.lstm.weight_hh_l0, expected.lstm.weight_hh_l0)
    assert torch.equal(model.float().conv.weight, plain(file).conv.weight)  # the codes are as they were


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy(file, copied):
    model = packed(file)
    again = copied(model)
    assert again.head.packed_weight is again.emb.packed_weight
    assert again.conv.packed_weight is not model.conv.packed_weight
    with torch.no_grad():
        again.conv.packed_weight.centroids.zero_()
    assert_same_model(model, file)
    assert not again.conv.weight.any()


def test_torch_save_and_load(file):
    stream = io.BytesIO()
    torch.save(packed(file), stream)
    stream.seek(0)
    assert_same_model(torch.load(stream, weights_only=False), file)


def test_a_state_dict_goes_into_an_equal_model(file, tmp_path):
    model, other = packed(file), packed(file)
    for _, tensor in packed_tensors(other):
        tensor.codes.zero_()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "state.safetensors")
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "state.safetensors"))
    assert_same_model(other, file)


def test_save_writes_the_same_file_and_size_counts_it(file, tmp_path):
    dkm.save(packed(file), tmp_path / "again.dkm")
    assert (tmp_path / "again.dkm").read_bytes() == file.read_bytes()
    size = dkm.size(packed(file))
    assert size.file_bytes == file.stat().st_size
    assert len(size.clustered) == 12


def test_what_needs_dense_weights_is_refused(file):
    model = packed(file)
    with pytest.raises(dkm.DKMError, match="for evaluation"):
        model.train()
    with pytest.raises(dkm.DKMError, match=r"dkm\.compress_ needs dense weights, and emb\.weight"):
        dkm.compress_(model, "all:2", tau=1.0)
    with pytest.raises(dkm.DKMError, match=r"dkm\.snap_ needs dense weights"):
        dkm.snap_(model)
    with pytest.raises(dkm.FileError, match="packed model: load into a plain model"):
        dkm.load(file, into=model)
    with pytest.raises(dkm.DKMError, match="weight of a PackedConv1d is packed and cannot be set"):
        model.conv.weight = torch.zeros(3)
    with pytest.raises(ValueError, match="into=model"):
        dkm.load(file, packed=True)


def test_a_file_of_another_model_changes_nothing(file):
    model = Layers()
    model.conv = nn.Conv1d(48, 31, 3)
    with pytest.raises(dkm.FileError, match=r"conv\.weight is"):
        packed(file, model)
    assert type(model.emb) is nn.Embedding
    assert model.training


def test_ties_that_the_file_does_not_have(tmp_path):
    def pair(tied):
        model = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
        if tied:
            model[1].weight = model[0].weight
        return model

    torch.manual_seed(0)
    model = pair(False)
    dkm.compress_(model, "all:2", tau=1.0)
    dkm.save(model, tmp_path / "different.dkm")
    target = pair(True)
    with pytest.raises(dkm.FileError, match=r"ties 1\.weight to 0\.weight and the file has different values"):
        packed(tmp_path / "different.dkm", target)
    assert type(target[0]) is nn.Linear

    model = pair(False)
    with torch.no_grad():
        model[1].weight.copy_(model[0].weight)
    dkm.compress_(model, "all:2", tau=1.0)
    dkm.save(model, tmp_path / "equal.dkm")
    target = packed(tmp_path / "equal.dkm", pair(True))
    assert target[0].packed_weight is target[1].packed_weight

    model = pair(True)
    dkm.compress_(model, "all:2", tau=1.0)
    dkm.save(model, tmp_path / "tied.dkm")
    target = packed(tmp_path / "tied.dkm", pair(False))
    assert target[0].packed_weight is target[1].packed_weight


class Shifted(nn.Sequential):
    """A container with a parameter of its own."""

    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.Linear(8, 6))
        self.shift = nn.Parameter(torch.randn(8, 6))

    def forward(self, x):
        return super().forward(x) + self.shift


def test_what_cannot_stay_packed_is_said(tmp_path):
    torch.manual_seed(0)
    model = Shifted()
    dkm.compress_(model, "all:2, shift:3", tau=1.0)
    dkm.save(model, tmp_path / "shifted.dkm")
    with pytest.warns(
        UserWarning, match="shift is clustered, and takes the memory of a dense weight: it belongs to a S"
    ):
        found = packed(tmp_path / "shifted.dkm", Shifted())
    assert isinstance(found.shift, nn.Parameter)
    assert isinstance(found[0].packed_weight, PackedWeight)
    x = torch.randn(8, 6)
    torch.testing.assert_close(found(x), dkm.load(tmp_path / "shifted.dkm", into=Shifted())(x))
