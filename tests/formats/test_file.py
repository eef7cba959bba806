"""file.py: save, load, size and the format."""

import copy
import errno
import hashlib
import json
import os
import struct
from functools import cache

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import dkm
from dkm.formats import dkm_file as file
from dkm.formats.codec import packed_size

BLANK = "0" * 64


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 7, 3),
        nn.BatchNorm2d(7),
        nn.ReLU(),
        nn.Conv2d(7, 5, (1, 3), bias=False),
        nn.BatchNorm2d(5),
        nn.Flatten(),
        nn.Linear(40, 11),
    ).to(dtype)


def images(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(6, 3, 6, 6, generator=torch.Generator().manual_seed(7)).to(dtype)


def trained(text: str = "0:3/2, 3:2, 6:4/3", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Compressed and trained for two steps, so that no weight is at its centroid; in evaluation mode."""
    model = net(dtype)
    dkm.compress_(model, text, steps=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(2):
        model(torch.randn(6, 3, 6, 6).to(dtype)).float().square().mean().backward()
        optimizer.step()
    return model.eval()


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


def header(data: bytes) -> dict:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.dkm"


# --- there and back ------------------------------------------------------------------------------

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
    with torch.no_grad():
        assert torch.equal(plain(images()), expected)


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


def test_equal_models_give_equal_bytes():
    model = trained()
    assert len({file.encode(model) for _ in range(5)}) == 1


# --- precisions ----------------------------------------------------------------------------------


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


# --- the format, as its docstring tells it -------------------------------------------------------


def test_metadata(path):
    dkm.save(trained(), path)
    metadata = header(path.read_bytes())["__metadata__"]
    assert metadata.keys() == {"format", "version", "tensors", "ties", "checksum"}
    assert (metadata["format"], metadata["version"]) == ("dkm", "1")
    tensors = json.loads(metadata["tensors"])
    assert tensors.keys() == net().state_dict().keys()
    assert tensors["0.weight"] == {"shape": [7, 3, 3, 3], "dtype": "float32", "bits": 3, "dim": 2}
    assert tensors["1.running_mean"] == {"shape": [7], "dtype": "float32"}
    assert json.loads(metadata["ties"]) == {}


def test_the_checksum_is_of_the_file_with_the_checksum_blank(path):
    dkm.save(trained(), path)
    data = path.read_bytes()
    checksum = header(data)["__metadata__"]["checksum"]
    assert hashlib.sha256(data.replace(checksum.encode(), BLANK.encode())).hexdigest() == checksum


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
    """What the docstring says is enough to read a weight: no dkm."""
    model = trained()
    dkm.save(model, path)
    arrays = safetensors.torch.load_file(path)
    entry = json.loads(header(path.read_bytes())["__metadata__"]["tensors"])["6.weight"]
    number = int.from_bytes(bytes(arrays["codes/6.weight"].numpy()), "little")
    count = -(-11 * 40 // entry["dim"])
    codes = [number >> (i * entry["bits"]) & (2 ** entry["bits"] - 1) for i in range(count)]
    weight = arrays["centroids/6.weight"][codes].flatten()[: 11 * 40].view(entry["shape"]).float()
    assert torch.equal(weight, model[6].weight)


def test_nothing_in_the_file_is_executable(path):
    """Header and arrays fill the file to the last byte: no room for a pickle."""
    dkm.save(trained(), path)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = {name: entry for name, entry in header(data).items() if name != "__metadata__"}
    spans = sorted(entry["data_offsets"] for entry in entries.values())
    assert [a for a, _ in spans] == [0, *(b for _, b in spans[:-1])]
    assert spans[-1][1] == len(data) - 8 - length
    assert {entry["dtype"] for entry in entries.values()} <= {"U8", "F16", "F32", "I64"}


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


# --- ties ----------------------------------------------------------------------------------------


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


# --- a model without values ----------------------------------------------------------------------


def test_loads_into_a_model_without_values(path):
    model = trained()
    dkm.save(model, path)
    with torch.device("meta"):
        empty = net()
    plain = dkm.load(path, into=empty).eval()
    assert equal(plain.state_dict(), dkm.load(path))
    assert all(parameter.requires_grad for parameter in plain.parameters())
    assert plain(images()).isfinite().all()


# --- harmed and foreign files --------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "model.dkm"
    dkm.save(trained(), path)
    return path.read_bytes()


def refused(path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(dkm.FileError) as caught:
        dkm.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_every_changed_byte_is_noticed(good, path):
    rng = np.random.default_rng(0)
    in_header = rng.integers(0, 8 + struct.unpack("<Q", good[:8])[0], 100)
    anywhere = rng.integers(0, len(good), 100)
    for at in [*range(8), *in_header.tolist(), *anywhere.tolist()]:
        data = bytearray(good)
        data[at] ^= int(rng.integers(1, 256))
        refused(path, bytes(data))


def test_every_changed_bit_of_the_checksum_is_noticed(good, path):
    checksum = header(good)["__metadata__"]["checksum"].encode()
    for i in range(64):
        changed = checksum[:i] + (b"0" if checksum[i : i + 1] != b"0" else b"1") + checksum[i + 1 :]
        refused(path, good.replace(checksum, changed))


def test_a_checksum_in_capitals_is_another_one(good, path):
    checksum = header(good)["__metadata__"]["checksum"]
    refused(path, good.replace(checksum.encode(), checksum.upper().encode()))


def test_every_truncation_is_noticed(good, path):
    rng = np.random.default_rng(0)
    for length in [*range(10), len(good) - 1, *rng.integers(0, len(good), 200).tolist()]:
        refused(path, good[:length])


@pytest.mark.parametrize(
    "extra", [b"\0", b" ", b"\0" * 8, b"PK\x03\x04", b"x" * 1000], ids=lambda extra: repr(extra[:8])
)
def test_appended_bytes_are_noticed(extra, good, path):
    refused(path, good + extra)


def test_a_newer_version_says_upgrade(path, monkeypatch):
    model = trained()
    with monkeypatch.context() as patch:
        patch.setattr(file, "VERSION", 2)
        dkm.save(model, path)
    with pytest.raises(dkm.FileError, match="version 2, this dkm reads up to 1: upgrade torch-dkm") as caught:
        dkm.load(path)
    assert str(path) in str(caught.value)


def foreign() -> dict[str, bytes]:
    def container(metadata):
        return safetensors.torch.save({"a": torch.zeros(3)}, metadata)

    def json_only(value) -> bytes:
        text = json.dumps(value).encode()
        return struct.pack("<Q", len(text)) + text

    return {
        "nothing": b"",
        "random": np.random.default_rng(0).bytes(5000),
        "text": b"# a readme\n" * 100,
        "zeros": bytes(1000),
        "safetensors": container(None),
        "safetensors with metadata": container({"format": "pt"}),
        "another format": container({"format": "other", "version": "1", "checksum": BLANK}),
        "no checksum": container({"format": "dkm", "version": "1"}),
        "a short checksum": container({"format": "dkm", "version": "1", "checksum": "0"}),
        "no number": container({"format": "dkm", "version": "one", "checksum": BLANK}),
        "a list": json_only([1]),
        "a number": json_only({"__metadata__": 3}),
        "null": json_only({"__metadata__": None}),
        "numbers": json_only({"__metadata__": {"format": "dkm", "version": 1, "checksum": 0}}),
        "deep": struct.pack("<Q", 200_000) + b"[" * 200_000,
    }


@pytest.mark.parametrize("case", foreign())
def test_a_foreign_file(case, path):
    assert "not an intact .dkm file" in refused(path, foreign()[case])


def sealed(arrays: dict[str, torch.Tensor], **metadata: str) -> bytes:
    """A file with a correct checksum, whatever is in it."""
    metadata = {"format": "dkm", "version": "1", "ties": "{}", "checksum": BLANK} | metadata
    data = safetensors.torch.save(arrays, metadata)
    return data.replace(BLANK.encode(), hashlib.sha256(data).hexdigest().encode())


CODES = {"codes/w": torch.zeros(2, dtype=torch.uint8), "centroids/w": torch.zeros(4, 1).half()}
ENTRY = {"shape": [2, 4], "dtype": "float32", "bits": 2, "dim": 1}
INCONSISTENT = {
    "no tensors": ({}, None, {}),
    "tensors that are no JSON": ({}, "{", {}),
    "a list of tensors": ({}, "[]", {}),
    "an array is missing": ({}, {"w": ENTRY}, {}),
    "too few codes": (CODES, {"w": ENTRY | {"shape": [2, 5]}}, {}),
    "a dtype that does not exist": (CODES, {"w": ENTRY | {"dtype": "float33"}}, {}),
    "a dtype that is something else": (CODES, {"w": ENTRY | {"dtype": "nn"}}, {}),
    "a dim that does not fit": (CODES, {"w": ENTRY | {"dim": 2}}, {}),
    "dim 0": (CODES, {"w": ENTRY | {"dim": 0}}, {}),
    "bits as text": (CODES, {"w": ENTRY | {"bits": "2"}}, {}),
    "a negative shape": (CODES, {"w": ENTRY | {"shape": [-2, -4]}}, {}),
    "codes beyond the centroids": (
        {"codes/w": torch.full((2,), 255, dtype=torch.uint8), "centroids/w": torch.zeros(3, 1).half()},
        {"w": ENTRY},
        {},
    ),
    "a dense tensor of another shape": ({"dense/w": torch.zeros(3)}, {"w": {"shape": [4], "dtype": "float32"}}, {}),
    "a tie to nothing": (CODES, {"w": ENTRY}, {"v": "u"}),
}


def test_a_sealed_file_loads(path):
    path.write_bytes(sealed(CODES, tensors=json.dumps({"w": ENTRY}), ties=json.dumps({"v": "w"})))
    assert dkm.load(path)["v"].shape == (2, 4)


@pytest.mark.parametrize("case", INCONSISTENT)
def test_an_inconsistent_file(case, path):
    arrays, tensors, ties = INCONSISTENT[case]
    text = {} if tensors is None else {"tensors": tensors if isinstance(tensors, str) else json.dumps(tensors)}
    refused(path, sealed(arrays, **text, ties=json.dumps(ties)))


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


# --- the wrong model -----------------------------------------------------------------------------


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


# --- writing goes wrong --------------------------------------------------------------------------


def test_no_such_folder(tmp_path):
    target = tmp_path / "nowhere" / "model.dkm"
    with pytest.raises(dkm.FileError, match=f"cannot write {target}: No such file or directory"):
        dkm.save(trained(), target)
    assert list(tmp_path.iterdir()) == []


def test_a_file_for_a_folder(tmp_path):
    (tmp_path / "file").write_text("here")
    target = tmp_path / "file" / "model.dkm"
    with pytest.raises(dkm.FileError, match=f"cannot write {target}: Not a directory"):
        dkm.save(trained(), target)
    assert (tmp_path / "file").read_text() == "here"


def test_a_folder_for_a_file(tmp_path):
    target = tmp_path / "model.dkm"
    target.mkdir()
    with pytest.raises(dkm.FileError, match=f"cannot write {target}"):
        dkm.save(trained(), target)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("target", ["", ".", "/"])
def test_no_name(target):
    with pytest.raises(dkm.FileError, match="cannot write"):
        dkm.save(trained(), target)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(dkm.FileError, match=f"cannot write {tmp_path}.*Permission denied"):
        dkm.save(trained(), tmp_path / "model.dkm")
    tmp_path.chmod(0o700)
    assert list(tmp_path.iterdir()) == []


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize("existing", [True, False])
def test_a_full_disk_leaves_what_was_there(call, existing, path, monkeypatch):
    if existing:
        path.write_bytes(b"the old file")
    model = trained()
    monkeypatch.setattr(os, call, full)
    with pytest.raises(dkm.FileError, match=f"cannot write {path}: No space left on device"):
        dkm.save(model, path)
    assert [p.read_bytes() for p in path.parent.iterdir()] == [b"the old file"] * existing


def test_a_write_that_stops_halfway_leaves_what_was_there(path):
    resource = pytest.importorskip("resource")
    path.write_bytes(b"the old file")
    model = trained()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # bytes a file may have
    try:
        with pytest.raises(dkm.FileError, match=f"cannot write {path}: File too large"):
            dkm.save(model, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.read_bytes() for p in path.parent.iterdir()] == [b"the old file"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e5], ids=str)
@pytest.mark.parametrize("text", ["6:2", "6:2/4"])
def test_weights_that_diverged_are_refused(value, text, path):
    path.write_bytes(b"the old file")
    model = net()
    dkm.compress_(model, text, steps=2)
    with torch.no_grad():
        model[6].parametrizations.weight.original.fill_(value)
    model(images())  # the centroids follow
    with pytest.raises(dkm.FileError, match=r"6\.weight holds NaN, infinite or too large values"):
        dkm.save(model, path)
    assert [p.read_bytes() for p in path.parent.iterdir()] == [b"the old file"]


def test_a_plain_model_is_refused(path):
    with pytest.raises(dkm.FileError, match=r"no clustered tensor: call dkm\.compress_"):
        dkm.save(net(), path)
    assert not path.exists()


def test_state_that_is_no_tensor_is_refused(path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    model = nn.Sequential(Extra(4, 4))
    dkm.compress_(model, "all:2", steps=1)
    with pytest.raises(dkm.FileError, match=r"0\._extra_state in the model's state is a dict"):
        dkm.save(model, path)


def test_a_buffer_that_safetensors_cannot_hold_is_refused(path):
    model = net()
    model.register_buffer("wave", torch.zeros(2, dtype=torch.complex128))
    dkm.compress_(model, "all:2", steps=1)
    with pytest.raises(dkm.FileError, match="wave"):
        dkm.save(model, path)


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
