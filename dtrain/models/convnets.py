"""Convolutional image classifiers: ResNet, ResNet-9 and a small network without normalisation layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

# Number of blocks per stage, and whether the blocks are bottlenecks.
_DEPTHS: dict[int, tuple[tuple[int, ...], bool]] = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
}
STEMS = ("imagenet", "cifar")


class ResNet(nn.Module):
    """ResNet-18, -34, -50 or -101 (He et al., "Deep residual learning for image recognition", 2016).

    The stride of a bottleneck block is in its 3x3 convolution (version 1.5, Goyal et al. 2017).

    Takes images, a floating dtype, ``[rows, 3, height, width]``, and returns logits ``[rows, classes]``. Convolutions use He
    initialisation (normal, fan-out). The last BatchNorm weight of each block is initialised to zero, so that each block
    initially computes the identity (Goyal et al. 2017).

    Args:
        depth: 18, 34, 50 or 101.
        classes: Number of classes.
        stem: ``imagenet``: 7x7 convolution of stride 2 and max pooling, for images of 224 pixels; ``cifar``: 3x3 convolution
            of stride 1, for images of 32 pixels.
        width: Channels of the first stage; each later stage has twice as many as the one before.

    Raises:
        ValueError: If the depth or the stem is unknown.

    Example:
        >>> import torch
        >>> from dtrain.models import ResNet
        >>> ResNet(18, classes=10, stem="cifar", width=8)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
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
    """``relu(shortcut(x) + branch(x))``; the shortcut is a 1x1 convolution where the shapes differ."""

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


class ResNet9(nn.Module):
    """ResNet-9, which trains fast on CIFAR-10 (Page, "How to train your ResNet", 2018).

    Eight 3x3 convolutions with BatchNorm and ReLU, of which two pairs have a residual connection, and a linear layer.

    Takes images ``[rows, 3, height, width]`` of at least 8x8 pixels, returns logits ``[rows, classes]``. The
    logits are multiplied by 1/8, as in the original. Uses the default initialisation of ``nn.Conv2d`` and ``nn.Linear``.

    Args:
        classes: Number of classes.
        width: Channels of the first convolution; the later convolutions have two, four and eight times as many.

    Example:
        >>> import torch
        >>> from dtrain.models import ResNet9
        >>> ResNet9(width=8)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _pooled_convolution(3, width),
            _pooled_convolution(width, 2 * width, pool=True),
            _ResNet9Block(2 * width),
            _pooled_convolution(2 * width, 4 * width, pool=True),
            _pooled_convolution(4 * width, 8 * width, pool=True),
            _ResNet9Block(8 * width),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * width, classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, ``[rows, classes]``."""
        return self.head(self.layers(images)) * 0.125


class _ResNet9Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(_pooled_convolution(width, width), _pooled_convolution(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def _pooled_convolution(inputs: int, outputs: int, pool: bool = False) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class SmallCNN(nn.Sequential):
    """Three 3x3 convolutions with GELU, the last two of stride 2, global average pooling and a linear layer.

    Without BatchNorm and dropout, the loss does not depend on how a batch is split over ranks.

    Takes images ``[rows, 3, height, width]`` of any height and width, returns logits ``[rows, classes]``. Uses the default
    initialisation of ``nn.Conv2d`` and ``nn.Linear``.

    Args:
        classes: Number of classes.
        width: Channels of the first convolution; the second and third have two and four times as many.

    Example:
        >>> import torch
        >>> from dtrain.models import SmallCNN
        >>> SmallCNN()(torch.rand(2, 3, 8, 8)).shape
        torch.Size([2, 10])
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
