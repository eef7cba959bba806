"""`dkm.save`, `dkm.load` and `dkm.size`: what comes back, in which precision, and what the file holds."""

import copy
import json
import os
from functools import cache

import pytest
import safetensors.torch
import torch
from dkm_files import header, images, net, trained
from torch import nn

import dkm
from dkm.formats.codec import packed_size


@cache
def trained_once(text: str) -> nn.Module:
    return trained(text)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.output = nn.Linear(6, 20, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, index):
        return self.output(self.embedding(index))


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


PLANS = [
    f"0:{b}/{d}, 3:{b}/{e}, 6:{b}/{f}"
    for b, d, e, f in zip(range(1, 13), [1, 2, 3] * 4, [5, 1, 4, 7] * 3, [8] * 12, strict=True)
]


@pytest.mark.parametrize("text", PLANS)
def test_in_float32_it_is_the_evaluation_mode(text, path):
    model = trained_once(text)
    with torch.no_grad():
        expected = model(images())
    dkm.save(model, path, dtype=torch.float32)
    plain = dkm.load(path, into=net()).eval()
    assert all(torch.equal(plain[i].weight, model[i].weight) for i in (0, 3, 6))
    with torch.no_grad():
        torch.testing.assert_close(plain(images()), expected)


@pytest.mark.parametrize("text", PLANS)
def test_by_default_it_is_snap(text, path):
    model = trained_once(text)
    dkm.save(model, path)
    assert equal(dkm.load(path), dkm.snap_(copy.deepcopy(model)).state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_it_is_snap_in_any_dtype(dtype, path):
    model = trained()
    dkm.save(model, path, dtype=dtype)
    assert equal(dkm.load(path), dkm.snap_(model, dtype=dtype).state_dict())


def test_alone_or_into_a_model(path):
    dkm.save(trained(), path)
    assert equal(dkm.load(path), dkm.load(path, into=net()).state_dict())


def test_into_returns_that_model(path):
    dkm.save(trained(), path)
    model = net()
    weight = model[0].weight
    assert dkm.load(path, into=model) is model
    assert model[0].weight is weight


@pytest.mark.parametrize("kind", [str, os.fspath, lambda path: path], ids=["str", "fspath", "Path"])
def test_any_kind_of_path(kind, path):
    dkm.save(trained(), kind(path))
    assert dkm.load(kind(path)).keys() == net().state_dict().keys()


def test_a_frozen_or_partly_kept_model(path):
    model = net()
    model.requires_grad_(False)
    dkm.compress_(model, "cv:2, 3:keep", steps=1)
    dkm.save(model, path)
    assert equal(dkm.load(path), dkm.snap_(model).state_dict())


def test_training_mode_saves_the_same(path):
    model = trained()
    dkm.save(model, path)
    first = dkm.load(path)
    dkm.save(model.train(), path)
    assert equal(dkm.load(path), first)


def test_saving_leaves_the_model_alone(path):
    model = trained()
    before = copied(model)
    dkm.save(model, path)
    assert equal(copied(model), before)


def test_equal_models_give_equal_bytes(path):
    model, files = trained(), [path.with_name(f"{i}.dkm") for i in range(5)]
    for file in files:
        dkm.save(model, file)
    assert len({file.read_bytes() for file in files}) == 1


def test_running_statistics_keep_32_bit(path):
    model = trained()
    dkm.save(model, path)
    state = dkm.load(path)
    assert state["1.running_var"].dtype == torch.float32
    assert torch.equal(state["1.running_var"], model[1].running_var)
    assert torch.equal(state["1.num_batches_tracked"], model[1].num_batches_tracked)
    assert header(path.read_bytes())["dense/1.running_var"]["dtype"] == "F32"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_models_dtype_is_kept(dtype, path):
    model = trained(dtype=dtype)
    dkm.save(model, path)
    plain = dkm.load(path, into=net(dtype)).eval()
    assert plain[0].weight.dtype == dtype
    assert plain[0].bias.dtype == dtype
    assert torch.equal(plain[0].weight, model[0].weight)
    assert dkm.load(path)["6.bias"].dtype == dtype


def test_a_file_of_bfloat16_loads_into_float32(path):
    model = trained(dtype=torch.bfloat16)
    dkm.save(model, path)
    assert torch.equal(dkm.load(path, into=net())[0].weight, model[0].weight.float())


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F16")]
)
def test_what_takes_16_bit(dtype, stored, path):
    dkm.save(trained(dtype=dtype), path)
    entries = header(path.read_bytes())
    assert entries["centroids/0.weight"]["dtype"] == stored
    assert entries["dense/0.bias"]["dtype"] == stored


def test_a_parameter_beyond_float16_keeps_its_own_precision(path):
    model = trained()
    with torch.no_grad():
        model[0].bias[0] = 1e6
    dkm.save(model, path)
    assert torch.equal(dkm.load(path)["0.bias"], model[0].bias)


def test_the_arrays_are_those_and_no_others(path):
    dkm.save(trained(), path)
    entries = header(path.read_bytes())
    clustered = {"0.weight": (3, 2), "3.weight": (2, 1), "6.weight": (4, 3)}
    expected = {f"dense/{name}" for name in net().state_dict() if name not in clustered}
    expected |= {f"{part}/{name}" for name in clustered for part in ("codes", "centroids")}
    assert entries.keys() - {"__metadata__"} == expected
    for name, (bits, dim) in clustered.items():
        n = net().state_dict()[name].numel()
        assert entries[f"codes/{name}"]["shape"] == [packed_size(-(-n // dim), bits)]
        assert entries[f"centroids/{name}"]["shape"] == [2**bits, dim]


def test_a_reader_of_ten_lines(path):
    """The description of the format is enough to read a weight without dkm."""
    model = trained()
    dkm.save(model, path)
    arrays = safetensors.torch.load_file(path)
    entry = json.loads(header(path.read_bytes())["__metadata__"]["tensors"])["6.weight"]
    number = int.from_bytes(bytes(arrays["codes/6.weight"].numpy()), "little")
    count = -(-11 * 40 // entry["dim"])
    codes = [number >> (i * entry["bits"]) & (2 ** entry["bits"] - 1) for i in range(count)]
    weight = arrays["centroids/6.weight"][codes].flatten()[: 11 * 40].view(entry["shape"]).float()
    assert torch.equal(weight, model[6].weight)


def test_size_is_the_files(path):
    model = trained()
    written = dkm.save(model, path)
    assert written == dkm.size(model).file_bytes == path.stat().st_size
    assert f"{written:,} bytes" in str(dkm.size(model))


def test_size_in_another_dtype(path):
    model = trained()
    assert dkm.save(model, path, dtype=torch.float32) == dkm.size(model, dtype=torch.float32).file_bytes


def test_size_counts_as_the_plan_does():
    model = net()
    plan = dkm.compress_(model, "0:3/2, 6:4/3", steps=1)
    assert dkm.size(model).megabytes == plan.megabytes
    bits = [{row.name: (row.bits, row.dim, row.shape) for row in rows} for rows in (plan.rows, dkm.size(model).rows)]
    assert bits[0] == bits[1]


def compressed_ties() -> Tied:
    model = Tied()
    dkm.compress_(model, "embedding.weight:2", steps=1)
    return model


def test_tied_weights_are_stored_once(path):
    dkm.save(compressed_ties(), path)
    entries = header(path.read_bytes())
    assert entries.keys() == {"__metadata__", "codes/embedding.weight", "centroids/embedding.weight"}
    assert json.loads(entries["__metadata__"]["ties"]) == {"output.weight": "embedding.weight"}


def test_tied_weights_come_back_tied(path):
    model = compressed_ties()
    dkm.save(model, path)
    plain = dkm.load(path, into=Tied())
    assert plain.output.weight is plain.embedding.weight
    assert equal(plain.state_dict(), dkm.snap_(model).state_dict())
    state = dkm.load(path)
    assert state["output.weight"] is state["embedding.weight"]


def test_tied_weights_come_back_tied_on_a_model_without_values(path):
    dkm.save(compressed_ties(), path)
    with torch.device("meta"):
        empty = Tied()
    plain = dkm.load(path, into=empty)
    assert plain.output.weight is plain.embedding.weight


def test_ties_that_are_kept(path):
    model = nn.ModuleDict({"tied": Tied(), "other": nn.Linear(4, 4)})
    dkm.compress_(model, "other:2", steps=1)
    dkm.save(model, path)
    assert equal(dkm.load(path), dkm.snap_(model).state_dict())
    assert "dense/tied.output.weight" not in header(path.read_bytes())


def test_a_module_used_twice(path):
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    dkm.compress_(model, "all:2", steps=1)
    dkm.save(model, path)
    assert equal(dkm.load(path), dkm.snap_(model).state_dict())


def test_different_values_do_not_load_into_a_tied_model(path):
    apart = Tied()
    apart.output.weight = nn.Parameter(torch.randn(20, 6))
    dkm.compress_(apart, "all:2", steps=1)
    dkm.save(apart, path)
    model = Tied()
    before = copied(model)
    with pytest.raises(dkm.FileError, match=r"output\.weight.*embedding\.weight|embedding\.weight.*output\.weight"):
        dkm.load(path, into=model)
    assert equal(copied(model), before)


@pytest.mark.parametrize("side", ["embedding", "output"])
def test_a_tie_that_is_clustered_on_one_side_only(side, path):
    """The file would give both names the snapped values: another model than the one that was trained."""
    model = Tied()
    dkm.cluster_weight(getattr(model, side), bits=2, steps=1)
    with pytest.raises(ValueError, match=r"embedding\.weight.*output\.weight"):
        dkm.save(model, path)
    assert not path.exists()


def test_loads_into_a_model_without_values(path):
    model = trained()
    dkm.save(model, path)
    with torch.device("meta"):
        empty = net()
    plain = dkm.load(path, into=empty).eval()
    assert equal(plain.state_dict(), dkm.load(path))
    assert all(parameter.requires_grad for parameter in plain.parameters())
    assert plain(images()).isfinite().all()


def test_buffers_on_meta_that_no_file_holds_are_refused(path):
    dkm.save(trained(), path)
    with torch.device("meta"):
        empty = net()
        empty.register_buffer("table", torch.zeros(3), persistent=False)
    with pytest.raises(dkm.FileError, match="table is a buffer that no file holds"):
        dkm.load(path, into=empty)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.register_buffer("table", torch.zeros(3), persistent=False)
    assert equal(dkm.load(path, into=empty).state_dict(), dkm.load(path))


def test_no_such_file(path):
    with pytest.raises(dkm.FileError, match=r"cannot read .*model\.dkm: No such file"):
        dkm.load(path)


def test_a_folder(tmp_path):
    with pytest.raises(dkm.FileError, match=f"cannot read {tmp_path}"):
        dkm.load(tmp_path)


def test_arguments_the_wrong_way_round(tmp_path):
    model, target = trained(), tmp_path / "model.dkm"
    with pytest.raises(TypeError, match=r"dkm.save\(model, path\): the path must be .*, got Sequential"):
        dkm.save(target, model)
    with pytest.raises(TypeError, match=r"dkm.load\(path, model\): the path must be .*, got Sequential"):
        dkm.load(model, target)


def with_extra() -> nn.Module:
    model = net()
    model.register_buffer("extra", torch.zeros(2))
    return model


def other_shape() -> nn.Module:
    model = net()
    model[6] = nn.Linear(40, 12)
    return model


WRONG = {
    "missing": (lambda: net()[:6], r"the model has no 6\.weight"),
    "extra": (with_extra, "the file has no extra"),
    "shape": (other_shape, r"6\.weight is \(11, 40\) in the file and \(12, 40\) in the model"),
    "another": (lambda: nn.Linear(3, 3), "and 14 more differences"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_wrong_model_is_refused_and_untouched(case, good, path):
    make, words = WRONG[case]
    path.write_bytes(good)
    model = make()
    before = copied(model)
    with pytest.raises(dkm.FileError, match=f"{path} does not fit this model: .*{words}"):
        dkm.load(path, into=model)
    assert equal(copied(model), before)


def test_a_compressed_model_is_refused_and_untouched(good, path):
    path.write_bytes(good)
    model = trained()
    before = copied(model)
    with pytest.raises(dkm.FileError, match="the model is compressed: load into a plain model"):
        dkm.load(path, into=model)
    assert equal(copied(model), before)


def test_it_replaces_what_was_there(path):
    path.write_bytes(b"the old file")
    dkm.save(trained(), path)
    assert dkm.load(path)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "wrap",
    [lambda m: torch.compile(m, backend="aot_eager"), torch.optim.swa_utils.AveragedModel],
    ids=["compile", "ema"],
)
def test_names_are_those_of_the_model_inside(tmp_path, wrap):
    plain = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    inside, model = copy.deepcopy(plain), wrap(plain)
    dkm.compress_(model, "0.weight:3/2", tau=1e-3)
    assert {row.name for row in dkm.size(model).rows} == {name for name, _ in inside.named_parameters()}
    dkm.save(model, tmp_path / "m.dkm")
    dkm.load(tmp_path / "m.dkm", into=inside)
    other = wrap(copy.deepcopy(inside))
    assert dkm.load(tmp_path / "m.dkm", into=other) is other
    assert set(dkm.load(tmp_path / "m.dkm")) == set(inside.state_dict())
