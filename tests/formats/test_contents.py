"""What `dkm inspect` prints."""

from pathlib import Path

import torch
from torch import nn

import dkm
from dkm.formats.contents import describe


def test_codes_entropy_and_bytes(tmp_path: Path):
    model = nn.Sequential(nn.Linear(40, 10), nn.LayerNorm(10))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([0.0] * 100 + [1.0] * 100 + [2.0] * 200).view(10, 40))
    dkm.compress_(model, "0:2", steps=1)
    size = dkm.save(model, tmp_path / "model.dkm")
    printed = describe(tmp_path / "model.dkm", 80)
    name, shape, spec, k, taken, used, entropy, codes = printed.splitlines()[1].split()
    assert (name, shape, spec, k, taken, used) == ("0.weight", "10x40", "2/1", "4", "108", "3/4")
    assert entropy == "1.50"  # 1/4, 1/4, 1/2
    assert sorted(codes) == ["·", "▅", "▅", "█"]
    assert "codes 100 bytes, 75 at their entropy; centroids 8 bytes\n" in printed
    assert "3 other tensors, 60 bytes" in printed
    assert f"{size:,} bytes in all" in printed


def test_long_names_fit_the_terminal(tmp_path: Path):
    model = nn.ModuleDict(
        {"a_rather_long_name_for_a_module": nn.ModuleDict({"another_one_just_as_long": nn.Linear(64, 64)})}
    )
    dkm.compress_(model, "all:8", steps=1)
    dkm.save(model, tmp_path / "model.dkm")
    printed = describe(tmp_path / "model.dkm", 80)
    assert max(map(len, printed.splitlines()[:2])) <= 80
    assert ".weight" in printed
