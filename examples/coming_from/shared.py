"""Shared by the programs in this folder: a network, and, for the other frameworks, the digits as a PyTorch dataset."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dtrain.data.digits import arrays


class Net(nn.Sequential):
    """Three convolutions and a linear layer: images ``[rows, 3, 8, 8]`` to logits ``[rows, 10]``."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            *(nn.Conv2d(3, width, 3, padding=1), nn.GELU()),
            *(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GELU()),
            *(nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1), nn.GELU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)),
        )


def digits(split: str) -> TensorDataset:
    """Images in [-1, 1], fp32 ``[3, 8, 8]``, and labels, int64; ``split`` is ``train`` or ``test``."""
    stored = arrays(split)
    images = torch.from_numpy(stored["image"]).permute(0, 3, 1, 2).float() / 127.5 - 1
    return TensorDataset(images, torch.from_numpy(stored["label"]))


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Accuracy on the test digits."""
    images, labels = digits("test").tensors
    return float((model.eval()(images).argmax(dim=1) == labels).float().mean())
