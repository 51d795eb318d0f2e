"""A network from coordinates to the value of a picture there."""

from __future__ import annotations

from torch import Tensor, nn


class CoordinateNet(nn.Sequential):
    """1x1 convolutions with BatchNorm and ReLU, so that every pixel is computed from its own coordinates alone.

    Takes coordinates ``[rows, 2, height, width]``, returns values ``[rows, channels, height, width]``. Initialised as
    ``nn.Conv2d`` is: weights and biases uniform within ``1 / sqrt(inputs)``.

    Args:
        width: Channels of the hidden layers.
        hidden: Number of hidden layers.
        channels: Values of a pixel.
    """

    def __init__(self, width: int = 256, hidden: int = 3, channels: int = 1) -> None:
        if hidden < 1:
            raise ValueError(f"CoordinateNet: got {hidden} hidden layers, want at least 1.")
        layers: list[nn.Module] = []
        for inputs in (2, *[width] * (hidden - 1)):
            layers += [nn.Conv2d(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU()]
        super().__init__(*layers, nn.Conv2d(width, channels, 1))

    def forward(self, coordinates: Tensor) -> Tensor:
        """Values, ``[rows, channels, height, width]``."""
        return super().forward(coordinates)
