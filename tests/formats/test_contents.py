"""What `dkm inspect` prints."""

from pathlib import Path

import pytest
import torch
from dkm_files import skewed
from torch import nn

import dkm
from dkm.clustering.spec import Spec
from dkm.formats.contents import describe
from dkm.formats.dkm_file import encode_all


def test_codes_entropy_and_bytes(tmp_path: Path):
    model = nn.Sequential(nn.Linear(40, 10), nn.LayerNorm(10))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([0.0] * 100 + [1.0] * 100 + [2.0] * 200).view(10, 40))
    dkm.compress_(model, "0:2", steps=1)
    size = dkm.save(model, tmp_path / "model.dkm")
    printed = describe(tmp_path / "model.dkm", 80)
    name, shape, spec, k, taken, *sizes, used, entropy, codes = printed.splitlines()[1].split()
    assert (name, shape, spec, k, taken, used) == ("0.weight", "10x40", "2/1", "4", "108", "3/4")
    assert sizes == ["100", "100", "75"]
    assert entropy == "1.50"  # 1/4, 1/4, 1/2
    assert sorted(codes) == ["·", "▅", "▅", "█"]
    assert "codes 100 bytes, centroids 8 bytes\n" in printed
    assert "codes: 100 bytes packed, 100 entropy-coded, 75 at their entropy\n" in printed  # the gain is too small
    assert "3 other tensors, 60 bytes" in printed
    assert f"{size:,} bytes in all" in printed


@pytest.mark.parametrize("coding", ["packed", "entropy"])
def test_both_files_show_what_either_takes(tmp_path: Path, coding: str):
    each = skewed("w", (40, 50), Spec(3))
    size = {way: len(encode_all([each], coding=way)) for way in ("packed", "entropy")}
    path = tmp_path / "model.dkm"
    path.write_bytes(encode_all([each], coding=coding))
    _, shape, _, k, taken, packed, coded, bound, used, entropy, _ = describe(path, 120).splitlines()[1].split()
    assert (shape, k, packed, used) == ("40x50", "8", "750", "8/8")
    assert int(taken) == int({"packed": packed, "entropy": coded}[coding]) + 16
    assert abs(int(packed) - int(coded) - (size["packed"] - size["entropy"])) <= 32  # what the header takes
    assert int(bound) <= int(coded) <= int(bound) + 20
    assert abs(float(entropy) * 2000 / 8 - int(bound)) <= 3
    totals = f"codes: {packed} bytes packed, {coded} entropy-coded, {bound} at their entropy\n"
    assert totals in describe(path)


def test_long_names_fit_the_terminal(tmp_path: Path):
    model = nn.ModuleDict(
        {"a_rather_long_name_for_a_module": nn.ModuleDict({"another_one_just_as_long": nn.Linear(64, 64)})}
    )
    dkm.compress_(model, "all:8", steps=1)
    dkm.save(model, tmp_path / "model.dkm")
    printed = describe(tmp_path / "model.dkm", 80)
    assert max(map(len, printed.splitlines()[:2])) <= 80
    assert ".weight" in printed
