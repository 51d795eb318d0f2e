"""Augmentations of one sample: ``augment(sample, rng) -> sample`` on a dict of numpy arrays.

The generator is keyed by (seed, epoch, sample), so what happens to a sample does not depend on who loads it. Each
object here draws a fixed count of numbers, whatever they turn out to be, and leaves the arrays it was given alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

MODES = ("zero", "reflect")


@dataclass(frozen=True)
class RandomCropFlip:
    """Pads an image, cuts a window of its old size at a random place, and mirrors half of them.

    The augmentation of the CIFAR recipes (Lee et al. 2015, He et al. 2016).

    Args:
        field: Name of an array ``[height, width, ...]``, such as an image.
        padding: Pixels on each side.
        flip: Mirror left to right with probability 1/2.
        mode: The padding: ``"zero"``, or ``"reflect"`` for the image mirrored at its border pixels.

    Raises:
        ValueError: If ``padding`` is negative or ``mode`` unknown.
    """

    field: str = "image"
    padding: int = 4
    flip: bool = True
    mode: str = "zero"

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"padding {self.padding}: want pixels, 0 or more.")
        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode!r} is unknown, want one of {', '.join(MODES)}.")

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """The sample with the field's array replaced by a new one of the same shape and dtype."""
        image = _array(sample, self.field)
        down, right, mirror = rng.random(3).tolist()
        shifts = (int(down * (2 * self.padding + 1)) - self.padding, int(right * (2 * self.padding + 1)) - self.padding)
        cut = self._reflect(image, *shifts) if self.mode == "reflect" else _shift(image, *shifts)
        if self.flip and mirror < 0.5:
            cut = np.ascontiguousarray(cut[:, ::-1])
        return {**sample, self.field: cut}

    def _reflect(self, image: np.ndarray, down: int, right: int) -> np.ndarray:
        height, width = image.shape[:2]
        if self.padding >= min(height, width):
            raise ValueError(f"{self.field!r} is {height} x {width}, too small to reflect {self.padding} pixels.")
        return image.take(_reflected(height, down), axis=0).take(_reflected(width, right), axis=1)


@dataclass(frozen=True)
class Flip:
    """Mirrors an image left to right.

    Args:
        field: Name of an array ``[height, width, ...]``.
        probability: How often.

    Raises:
        ValueError: If ``probability`` is none.
    """

    field: str = "image"
    probability: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability {self.probability}: want a number from 0 to 1.")

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """The sample with the field's array replaced by a new one of the same shape and dtype."""
        image = _array(sample, self.field)
        mirrored = rng.random() < self.probability
        return {**sample, self.field: np.ascontiguousarray(image[:, ::-1]) if mirrored else image.copy()}


def _array(sample: dict[str, Any], field: str) -> np.ndarray:
    if field not in sample:
        raise ValueError(f"the augmentation wants the field {field!r}, the sample has {', '.join(map(repr, sample))}.")
    value = sample[field]
    if not isinstance(value, np.ndarray) or value.ndim < 2:
        raise ValueError(f"the augmentation wants {field!r} to be [height, width, ...], got {type(value).__name__}.")
    return value


def _shift(image: np.ndarray, down: int, right: int) -> np.ndarray:
    """The window of ``image`` that starts at (down, right), zero outside."""
    out = np.zeros_like(image)
    height, width = image.shape[:2]
    rows, columns = max(height - abs(down), 0), max(width - abs(right), 0)
    top, left = max(down, 0), max(right, 0)
    to_top, to_left = max(-down, 0), max(-right, 0)
    out[to_top : to_top + rows, to_left : to_left + columns] = image[top : top + rows, left : left + columns]
    return out


def _reflected(length: int, shift: int) -> np.ndarray:
    """Indices of the window of ``length`` that starts at ``shift``, mirrored at the first and the last element."""
    index = np.abs(np.arange(shift, shift + length))
    return np.where(index >= length, 2 * (length - 1) - index, index)
