"""Writing a .dkm file goes wrong: the error says why, and what was there before is still there."""

import errno
import os

import pytest
import torch
from dkm_files import images, net, trained
from torch import nn

import dkm


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
