"""Models by their names, weights from files."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

import dkm
from dkm.app import models
from dkm.app.own_code import load_function


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "timm/resnet10t"])
def test_a_name_and_weights(tmp_path: Path, name: str):
    if name.startswith("timm/"):
        pytest.importorskip("timm")
    model, _ = models.build(name, "none", 5)
    file = tmp_path / "w.safetensors"
    safetensors.torch.save_file(model.state_dict(), file)
    again, _ = models.build(name, str(file), 5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert again.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 5)
    assert [p.shape for p in models.model_without_values(name, 5).parameters()] == [p.shape for p in model.parameters()]


def test_second_outputs_in_a_file_are_left_out(tmp_path: Path):
    """As in torchvision's own weights of googlenet, which normalise the input another way, too."""
    model, _ = models.build("googlenet", "none", 5)
    torch.save(model.state_dict() | {"aux1.fc1.weight": torch.zeros(3)}, tmp_path / "w.pth")
    assert not model.transform_input
    assert models.build("googlenet", str(tmp_path / "w.pth"), 5)[0].transform_input


def test_a_function_gets_the_number_of_classes(tmp_path: Path):
    (tmp_path / "some.py").write_text(
        "from torch import nn\n"
        "def by_name(num_classes):\n    return nn.Linear(2, num_classes)\n"
        "def fixed():\n    return nn.Linear(2, 7)\n"
    )
    assert models.build(f"{tmp_path}/some.py:by_name", None, 4)[0].out_features == 4
    assert models.build(f"{tmp_path}/some.py:fixed", None, 4)[0].out_features == 7


def test_two_files_of_one_name_are_two(tmp_path: Path):
    for folder, width in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"def width():\n    return {width}\n")
    assert [load_function(f"{tmp_path / folder}/same.py:width")() for folder in "ab"] == [1, 2]


def test_timm_models_have_their_own_normalisation():
    pytest.importorskip("timm")
    assert models.pixels("timm/vit_base_patch16_224").mean == (0.5, 0.5, 0.5)
    assert models.pixels("resnet18") == models.Pixels()


def test_a_folder_with_packed_codes_is_a_model_with_dense_weights(tmp_path: Path):
    from small_language import make_language_model

    from dkm.integrations.transformers import save_pretrained

    plain = models.build(str(make_language_model(tmp_path / "model")), None, None).model
    dkm.compress_(plain, "*_proj:4/2", tau=1.0)
    save_pretrained(plain, tmp_path / "packed")
    dkm.save(plain, tmp_path / "model.dkm")
    expected = dkm.load(tmp_path / "model.dkm")
    for weights in (None, str(tmp_path / "model.dkm")):
        model = models.build(str(tmp_path / "packed"), weights, None).model
        state = model.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        assert getattr(model.config, "quantization_config", None) is None
