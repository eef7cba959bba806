"""MobileNet-v1 (Howard et al., 2017, arXiv:1704.04861), the only network of the paper that torchvision lacks."""

from typing import Any

from torch import Tensor, nn

# (output channels, stride) of the 13 depthwise-separable blocks: table 1
BLOCKS = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]


class MobileNetV1(nn.Module):
    """Images `(n, 3, height, width)` -> logits `(n, num_classes)`."""

    def __init__(self, num_classes: int = 1000, width: float = 1.0):
        super().__init__()
        channels = round(32 * width)
        layers = [_conv_bn_relu(3, channels, 3, stride=2, padding=1)]
        for out, stride in ((round(out * width), stride) for out, stride in BLOCKS):
            layers += [
                _conv_bn_relu(channels, channels, 3, stride=stride, padding=1, groups=channels),
                _conv_bn_relu(channels, out, 1),
            ]
            channels = out
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.features(x)).flatten(1))


def mobilenet_v1(num_classes: int = 1000, width: float = 1.0) -> MobileNetV1:
    """MobileNet-v1, randomly initialised; `width` multiplies the channels of every layer."""
    return MobileNetV1(num_classes, width)


def _conv_bn_relu(channels: int, out: int, kernel: int, **options: Any) -> nn.Sequential:
    conv = nn.Conv2d(channels, out, kernel, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU(inplace=True))
