"""Networks for vectors and coordinates: multi-layer perceptron, coordinate network, polynomial."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh, "silu": nn.SiLU}


class MLP(nn.Sequential):
    """Linear layers with an activation between them; ``widths=[10, 20, 1]`` has one hidden layer of 20.

    Takes ``[rows, ..., widths[0]]``, returns ``[rows, ..., widths[-1]]``. Uses the default initialisation of
    ``nn.Linear``.

    Args:
        widths: Number of inputs, of units in each hidden layer, and of outputs.
        activation: ``relu``, ``gelu``, ``tanh`` or ``silu``.

    Raises:
        ValueError: If there are fewer than two widths, or the activation is unknown.

    Example:
        >>> import torch
        >>> from dtrain.models import MLP
        >>> MLP([10, 20, 1])(torch.rand(4, 10)).shape
        torch.Size([4, 1])
    """

    def __init__(self, widths: Sequence[int], activation: str = "relu") -> None:
        if len(widths) < 2 or min(widths) < 1:
            raise ValueError(f"MLP: got widths {list(widths)}, want inputs, hidden units and outputs: [10, 20, 1].")
        if activation not in ACTIVATIONS:
            raise ValueError(f"MLP: got activation {activation!r}, want one of {', '.join(ACTIVATIONS)}.")
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), ACTIVATIONS[activation]()]
        super().__init__(*layers[:-1])

    def forward(self, features: Tensor) -> Tensor:
        """Outputs, ``[rows, ..., widths[-1]]``."""
        return super().forward(features)


class CoordinateNet(nn.Sequential):
    """Maps coordinates of pixels to their values by 1x1 convolutions with BatchNorm and ReLU.

    Takes coordinates ``[rows, 2, height, width]``, returns values ``[rows, channels, height, width]``. Uses the
    default initialisation of ``nn.Conv2d``.

    Args:
        width: Channels of the hidden layers.
        hidden: Number of hidden layers.
        channels: Number of values per pixel.

    Example:
        >>> import torch
        >>> from dtrain.models import CoordinateNet
        >>> CoordinateNet(width=16)(torch.rand(2, 2, 4, 8)).shape
        torch.Size([2, 1, 4, 8])
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


class Polynomial(nn.Module):
    """Polynomial of one variable: ``bias + sum of weight[0, k] * x ** (k + 1)``.

    Takes and returns ``[rows, ..., 1]``. All coefficients are initialised to zero.

    Args:
        degree: Degree of the polynomial.

    Example:
        >>> import torch
        >>> from dtrain.models import Polynomial
        >>> Polynomial(degree=2)(torch.rand(4, 1)).shape
        torch.Size([4, 1])
    """

    def __init__(self, degree: int = 2) -> None:
        super().__init__()
        if degree < 1:
            raise ValueError(f"Polynomial: got degree {degree}, want at least 1.")
        self._degree = degree
        self.powers = nn.Linear(degree, 1)
        nn.init.zeros_(self.powers.weight)
        nn.init.zeros_(self.powers.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Values, ``[rows, ..., 1]``."""
        return self.powers(torch.cat([x**power for power in range(1, self._degree + 1)], dim=-1))
