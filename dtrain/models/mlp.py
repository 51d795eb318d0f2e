"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh, "silu": nn.SiLU}


class MLP(nn.Sequential):
    """Linear layers with an activation between them; ``widths=[10, 20, 1]`` has one hidden layer of 20.

    Takes ``[rows, ..., widths[0]]``, returns ``[rows, ..., widths[-1]]``. Initialised as ``nn.Linear`` is: weights and biases
    uniform within ``1 / sqrt(inputs)``.

    Args:
        widths: Inputs, hidden units of each layer, outputs.
        activation: ``relu``, ``gelu``, ``tanh`` or ``silu``.

    Raises:
        ValueError: If there are fewer than two widths, or the activation is unknown.
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
