"""Random changes of an image's colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from dtrain.data.augment import image_of

# From red, green and blue to luma and the two axes of colour (NTSC's YIQ), and back.
_YIQ = np.array([[0.299, 0.587, 0.114], [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
_RGB = np.linalg.inv(_YIQ)

Range = float | Sequence[float]


@dataclass(frozen=True)
class ColorJitter:
    """Changes brightness, contrast, saturation and hue, in this order, each by a random amount.

    The augmentation of Howard ("Some improvements on deep convolutional neural network based image classification", 2013)
    with the arguments of torchvision's class of this name. As in NVIDIA DALI's ``ColorTwist`` the four are one affine map of
    the colours, which takes an eighth of the time: nothing is clipped in between, and hue is turned at constant luma, in YIQ
    instead of HSV.

    Args:
        brightness: The factor is drawn from ``[max(0, 1 - x), 1 + x]``, or from the two numbers given.
        contrast: The same, about the image's mean luma.
        saturation: The same, about each pixel's luma.
        hue: The shift, as a share of the colour circle, is drawn from ``[-x, x]``, or from the two numbers given; at most
            0.5 either way.
        field: Name of the image.

    Raises:
        ValueError: If a range is impossible.
    """

    brightness: Range = 0.0
    contrast: Range = 0.0
    saturation: Range = 0.0
    hue: Range = 0.0
    field: str = "image"

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            object.__setattr__(self, name, _range(name, getattr(self, name), 1.0, (0.0, math.inf)))
        object.__setattr__(self, "hue", _range("hue", self.hue, 0.0, (-0.5, 0.5)))

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """The sample with its image, uint8 ``[height, width, 3]``, replaced by a new array."""
        image = image_of(sample, self.field)
        drawn = rng.random(4).tolist()
        ranges: Any = (self.brightness, self.contrast, self.saturation, self.hue)
        factors = [low + (high - low) * number for (low, high), number in zip(ranges, drawn, strict=True)]
        matrix = _affine(_mean_luma(image), *factors)
        return {**sample, self.field: np.array(Image.fromarray(image).convert("RGB", matrix))}


def _affine(
    luma: float, brightness: float, contrast: float, saturation: float, hue: float
) -> tuple[float, float, float, float, float, float, float, float, float, float, float, float]:
    """Three rows of factors of red, green and blue, and what is added; as Pillow takes it."""
    across, along = saturation * math.cos(2 * math.pi * hue), saturation * math.sin(2 * math.pi * hue)
    turned = _RGB @ np.array([[1, 0, 0], [0, across, along], [0, -along, across]]) @ _YIQ
    rows = np.empty((3, 4))
    rows[:, :3] = brightness * contrast * turned
    rows[:, 3] = brightness * (1 - contrast) * luma
    return tuple(rows.ravel().tolist())  # type: ignore[return-value]


def _mean_luma(image: np.ndarray) -> float:
    height, width, _ = image.shape
    # Down the columns first, which numpy does twenty times as fast as both ways at once.
    sums = image.reshape(height, -1).sum(0, dtype=np.uint32).reshape(width, 3).sum(0)
    return float(_YIQ[0] @ sums) / max(1, height * width)


def _range(name: str, given: Range, middle: float, limits: tuple[float, float]) -> tuple[float, float]:
    low, high = limits
    if isinstance(given, (int, float)):
        least, largest = max(low, middle - given), middle + given
    else:
        least, largest = given if len(given) == 2 else (1.0, 0.0)
    if not low <= least <= largest <= high or largest == math.inf:
        raise ValueError(
            f"{name} {given!r}: want a number, 0 or more, or [least, largest], within [{low:g}, {high:g}]."
        )
    return float(least), float(largest)
