"""The paper's size figures, from the architectures alone."""

from collections.abc import Callable

import pytest
import torch
import torchvision
import transformers
from torch import nn

import dkm
from dkm.app.mobilenet_v1 import mobilenet_v1


def distilbert() -> nn.Module:
    """DistilBERT as fine-tuned on MNLI: three classes."""
    return transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(num_labels=3))


@pytest.mark.parametrize(
    ("build", "text", "megabytes"),
    [
        (torchvision.models.resnet18, "cv:5/8, fc:8/4", "1.00"),
        (torchvision.models.resnet18, "cv:6/8, fc:6/10", "1.09"),
        (torchvision.models.resnet18, "cv:4/4, fc:8/4", "1.49"),
        (torchvision.models.resnet50, "cv:6/6, fc:6/4", "3.32"),
        (mobilenet_v1, "cv:4/4, fc:4/2", "0.72"),
        (torchvision.models.mobilenet_v2, "cv:2/1, fc:4/4", "0.84"),
        (distilbert, "xform:4/2, emb:4", "21.8"),
        (distilbert, "xform:5/2, emb:3", "21.5"),
    ],
)
def test_size_is_the_papers(build: Callable[[], nn.Module], text: str, megabytes: str):
    with torch.device("meta"):  # shapes are all that a plan needs
        model = build()
    digits = len(megabytes.partition(".")[2])
    assert f"{dkm.plan(model, text).bytes / 2**20:.{digits}f}" == megabytes


def test_mobilenet_v1_is_howards():
    """4.2 million parameters, and 569 million multiplications for an image of 224 x 224: table 8."""
    multiplications = 0

    def count(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal multiplications
        multiplications += module.weight[0].numel() * output[0].numel()

    with torch.device("meta"):
        model = mobilenet_v1()
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.register_forward_hook(count)
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 4_231_976
    assert round(multiplications / 1e6) == 569
