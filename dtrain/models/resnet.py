"""Residual networks (He et al., "Deep residual learning for image recognition", 2016)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

# Blocks of each stage, and whether they are bottlenecks.
_DEPTHS: dict[int, tuple[tuple[int, ...], bool]] = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
}
STEMS = ("imagenet", "cifar")


class ResNet(nn.Module):
    """ResNet-18, -34, -50 or -101; the stride of a bottleneck is in its 3x3 convolution (Goyal et al., v1.5).

    Takes images ``[rows, 3, height, width]``, returns logits ``[rows, classes]``. Convolutions are initialised as He et
    al. (2015) have it, normal over the outputs; the last BatchNorm of each block begins at zero, so that blocks begin as
    the identity (Goyal et al. 2017).

    Args:
        depth: 18, 34, 50 or 101.
        classes: Number of classes.
        stem: ``imagenet``: 7x7 of stride 2 and a pooling, for 224 pixels; ``cifar``: 3x3 of stride 1, for 32.
        width: Channels of the first stage; each one after it has twice as many.

    Raises:
        ValueError: If the depth or the stem is unknown.
    """

    def __init__(self, depth: int = 50, classes: int = 1000, stem: str = "imagenet", width: int = 64) -> None:
        super().__init__()
        if depth not in _DEPTHS or stem not in STEMS:
            raise ValueError(
                f"ResNet: got depth {depth} and stem {stem!r}, want a depth of {', '.join(map(str, _DEPTHS))} and one of "
                f"the stems {', '.join(STEMS)}."
            )
        stages, bottleneck = _DEPTHS[depth]
        large = stem == "imagenet"
        self.stem = _convolution(3, width, 7 if large else 3, 2 if large else 1)
        self.pool = nn.MaxPool2d(3, 2, padding=1) if large else nn.Identity()
        blocks: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(stages):
            middle = width << stage
            outputs = 4 * middle if bottleneck else middle
            for number in range(count):
                stride = 2 if stage and not number else 1
                blocks.append(_Residual(inputs, middle, outputs, stride, bottleneck))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, ``[rows, classes]``."""
        features = self.blocks(self.pool(F.relu(self.stem(images))))
        return self.head(features.mean(dim=(2, 3)))


class _Residual(nn.Module):
    """``relu(x + branch(x))``; a 1x1 convolution in place of ``x`` where shapes differ."""

    def __init__(self, inputs: int, middle: int, outputs: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            layers = [
                _convolution(inputs, middle, 1),
                nn.ReLU(),
                _convolution(middle, middle, 3, stride),
                nn.ReLU(),
                _convolution(middle, outputs, 1),
            ]
        else:
            layers = [_convolution(inputs, middle, 3, stride), nn.ReLU(), _convolution(middle, outputs, 3)]
        self.branch = nn.Sequential(*layers)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.branch(x))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, _Residual):
            nn.init.zeros_(module.branch[-1][1].weight)  # type: ignore[index]
