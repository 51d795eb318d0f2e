"""A model for pairs: one network for images and one for captions, as in CLIP."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class TwoTowers(nn.Module):
    """Embeds images and captions in the same space.

    Args:
        width: Channels of the first layers.
        channels: Size of an embedding.
        vocabulary: Number of different tokens: 256 bytes and an end-of-text token.
    """

    def __init__(self, width: int = 32, channels: int = 64, vocabulary: int = 257) -> None:
        super().__init__()
        self.image = nn.Sequential(
            *(nn.Conv2d(3, width, 3, stride=2, padding=1), nn.GELU()),
            *(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GELU()),
            *(nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1), nn.GELU(), nn.Flatten()),
            nn.Linear(2 * width * 16, channels),  # 4 x 4 places of an image of 32 x 32 pixels
        )
        self.token = nn.Embedding(vocabulary, 2 * width)
        self.text = nn.Sequential(
            *(nn.Conv1d(2 * width, 4 * width, 5, padding=2), nn.GELU()),
            *(nn.Conv1d(4 * width, 4 * width, 5, padding=2), nn.GELU(), nn.AdaptiveMaxPool1d(1), nn.Flatten()),
            nn.Linear(4 * width, channels),
        )
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # CLIP's initial value

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Two embeddings, ``[rows, channels]``, and the scale of their similarities: what ``dtrain.tasks.Contrastive`` takes.

        Args:
            images: ``[rows, 3, 32, 32]``.
            tokens: Captions as bytes, int64 ``[rows, length]``.
        """
        return self.image(images), self.text(self.token(tokens).transpose(1, 2)), self.log_scale.exp()
