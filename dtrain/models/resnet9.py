"""The nine-layer residual network that trains fast on CIFAR-10 (Page, "How to train your ResNet", 2018)."""

from __future__ import annotations

from torch import Tensor, nn


class ResNet9(nn.Module):
    """Eight 3x3 convolutions with BatchNorm and ReLU, two of the pairs beside a shortcut, and a linear layer.

    Takes images ``[rows, 3, height, width]`` of any size from 8x8 on, returns logits ``[rows, classes]``, multiplied by 1/8
    as Page does, which keeps the softmax soft. Initialised as ``nn.Conv2d`` and ``nn.Linear`` are.

    Args:
        classes: Number of classes.
        width: Channels of the first convolution; the later ones have twice, four and eight times as many.
    """

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _convolution(3, width),
            _convolution(width, 2 * width, pool=True),
            _Residual(2 * width),
            _convolution(2 * width, 4 * width, pool=True),
            _convolution(4 * width, 8 * width, pool=True),
            _Residual(8 * width),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * width, classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, ``[rows, classes]``."""
        return self.head(self.layers(images)) * 0.125


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(_convolution(width, width), _convolution(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def _convolution(inputs: int, outputs: int, pool: bool = False) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))
