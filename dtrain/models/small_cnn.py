"""A small convolution network without BatchNorm and dropout: the same loss for any split into ranks."""

from __future__ import annotations

from torch import Tensor, nn


class SmallCNN(nn.Sequential):
    """Three 3x3 convolutions with GELU, the last two of stride 2, mean over space, a linear layer.

    Takes images ``[rows, 3, height, width]`` of any size from 4x4 on, returns logits ``[rows, classes]``. Initialised as
    ``nn.Conv2d`` and ``nn.Linear`` are.

    Args:
        classes: Number of classes.
        width: Channels of the first convolution; the others have twice and four times as many.
    """

    def __init__(self, classes: int = 10, width: int = 32) -> None:
        super().__init__(
            nn.Conv2d(3, width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits, ``[rows, classes]``."""
        return super().forward(images)
