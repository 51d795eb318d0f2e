"""A polynomial of one number: a linear layer over its powers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Polynomial(nn.Module):
    """``bias + sum of weight[0, k] * x ** (k + 1)``. Takes and returns ``[rows, ..., 1]``. Initialised with zeros.

    Args:
        degree: Highest power.
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
