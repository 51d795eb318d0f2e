"""Vision transformer (Dosovitskiy et al. 2021) as simplified by Beyer et al., "Better plain ViT baselines", 2022."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtrain.models.transformer import Block

#: Width, depth and heads of the sizes (Steiner et al. 2021).
SIZES = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12)}


class ViT(nn.Module):
    """Patches as tokens, fixed sine and cosine positions, the mean over tokens, a linear head.

    Takes images ``[rows, 3, image_size, image_size]``, returns logits ``[rows, classes]``. The blocks are initialised as
    ``Block`` says, the patches as ``nn.Conv2d`` is, the head with zeros.

    Args:
        size: ``tiny``, ``small`` or ``base``; or ``[width, depth, heads]``.
        classes: Number of classes.
        image_size: Pixels of a side.
        patch: Pixels of a patch's side; divides ``image_size``.

    Raises:
        ValueError: If the size is unknown, or patches do not fill the image.
    """

    positions: Tensor

    def __init__(
        self, size: str | list[int] = "small", classes: int = 1000, image_size: int = 224, patch: int = 16
    ) -> None:
        super().__init__()
        if isinstance(size, str) and size not in SIZES:
            raise ValueError(f"ViT: got size {size!r}, want one of {', '.join(SIZES)}, or [width, depth, heads].")
        width, depth, heads = SIZES[size] if isinstance(size, str) else size
        if image_size % patch or width % 4:
            raise ValueError(
                f"ViT: got images of {image_size} pixels in patches of {patch} and width {width}, want patches that fill "
                "the image and a width that 4 divides."
            )
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.Sequential(*(Block(width, heads, depth) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("positions", _sines(image_size // patch, width), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, ``[rows, classes]``."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = self.blocks(tokens + self.positions)
        return self.head(self.norm(tokens).mean(dim=1))


def _sines(side: int, width: int) -> Tensor:
    """Positions of the patches of a square, ``[side * side, width]``: a quarter each of sin and cos of x and of y."""
    frequencies = 10_000.0 ** -(torch.arange(width // 4) / max(1, width // 4 - 1))
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    angles = [axis.flatten()[:, None] * frequencies for axis in (x, y)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1)
