"""A model with a hand-written softmax that overflows in fp16, which ``dtrain doctor numerics`` finds.

    dtrain doctor numerics experiment=digits precision=fp16 steps=3 \\
        'model={_target_: examples.lessons.naive_softmax.CosineClassifier}'
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class CosineClassifier(nn.Module):
    """Compares features of an image with one prototype per class, as contrastive models do. Returns log-probabilities.

    Args:
        temperature: The cosines are divided by it: 1 / 0.02 = 50, but the largest fp16 number is exp(11.09).
        stable: Computes the same with ``log_softmax``.
    """

    def __init__(self, temperature: float = 0.02, stable: bool = False) -> None:
        super().__init__()
        self.temperature = temperature
        self.stable = stable
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.prototypes = nn.Parameter(torch.randn(10, 16))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``[n, 3, 8, 8]`` -> ``[n, 10]``."""
        cosines = F.normalize(self.features(images), dim=1) @ F.normalize(self.prototypes, dim=1).T
        logits = cosines / self.temperature
        if self.stable:
            return logits.log_softmax(dim=1)
        exponentials = logits.exp()
        return (exponentials / exponentials.sum(dim=1, keepdim=True)).log()
