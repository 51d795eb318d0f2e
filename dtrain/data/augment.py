"""Augmentations of one sample: ``augment(sample, rng) -> sample`` on a dict of numpy arrays.

The generator is keyed by (seed, epoch, sample), so what happens to a sample does not depend on who loads it. Each
object here draws a fixed count of numbers, whatever they turn out to be, and leaves the arrays it was given alone.

An augmentation that begins with a ``Cropper`` replaces the image's own size, and the loader crops while it decodes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dtrain.data.crop import INTERPOLATIONS, Crop
from dtrain.data.fields import DataError

Augment = Callable[[dict[str, Any], np.random.Generator], dict[str, Any]]

MODES = ("zero", "reflect")
# So often torchvision, too, draws an area and a shape before it takes what fits.
_ATTEMPTS = 10


class Compose:
    """Augmentations one after the other, all with the same generator.

    Args:
        steps: In their order.

    Raises:
        ValueError: If one of them cannot be called.
    """

    def __init__(self, steps: Sequence[Augment]) -> None:
        for step in steps:
            if not callable(step):
                raise ValueError(f"Compose: got the step {step!r}, want callables (sample, rng) -> sample.")
        # Flat, so that the first of all is seen.
        self.steps: tuple[Augment, ...] = tuple(
            inner for step in steps for inner in (step.steps if isinstance(step, Compose) else (step,))
        )

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """What the last step returns."""
        for step in self.steps:
            sample = step(sample, rng)
        return sample


class Cropper(ABC):
    """An augmentation that crops one image and does nothing else.

    Attributes:
        field: Name of the image.
    """

    field: str

    @abstractmethod
    def crop(self, height: int, width: int, rng: np.random.Generator) -> Crop:
        """The crop of an image of this size."""

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """The sample with its image, uint8 ``[height, width, 3]``, replaced by a new array."""
        image = image_of(sample, self.field)
        height, width = image.shape[:2]
        return {**sample, self.field: np.array(self.crop(height, width, rng).cut(image), order="C")}


def begins_with(augment: Augment | None) -> tuple[Cropper | None, Augment | None]:
    """The cropper that an augmentation begins with, and what follows it; None where there is none."""
    steps = augment.steps if isinstance(augment, Compose) else (augment,)
    if not steps or not isinstance(steps[0], Cropper):
        return None, augment
    return steps[0], Compose(steps[1:]) if len(steps) > 1 else None


@dataclass(frozen=True)
class RandomResizedCrop(Cropper):
    """Cuts a window of random area and shape out of an image, and brings it to one size.

    The augmentation of the ImageNet recipes (Szegedy et al. 2015), with torchvision's way to choose the window.

    Args:
        size: Of the result in pixels: one number, or height and width.
        scale: Least and largest share of the image's area.
        ratio: Least and largest width over height.
        interpolation: ``"bilinear"`` or ``"bicubic"``; both antialiased.
        field: Name of the image.

    Raises:
        ValueError: If a range or a size is impossible, or ``interpolation`` unknown.
    """

    size: int | Sequence[int]
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"
    field: str = "image"

    def __post_init__(self) -> None:
        sides = (self.size, self.size) if isinstance(self.size, int) else tuple(self.size)
        if len(sides) != 2 or min(sides) < 1:
            raise ValueError(f"size {self.size!r}: want pixels, one number or [height, width].")
        for name, top in (("scale", 1.0), ("ratio", math.inf)):
            limits = tuple(getattr(self, name))
            if len(limits) != 2 or not 0 < limits[0] <= limits[1] <= top or limits[1] == math.inf:
                raise ValueError(f"{name} {list(limits)}: want [least, largest], above 0{' and up to 1' * (top == 1)}.")
            object.__setattr__(self, name, limits)
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(
                f"interpolation {self.interpolation!r} is unknown, want one of {', '.join(INTERPOLATIONS)}."
            )
        object.__setattr__(self, "size", sides)

    def crop(self, height: int, width: int, rng: np.random.Generator) -> Crop:
        """The first of ten random windows that fits; if none does, the largest of an allowed shape in the middle."""
        down, right, *pairs = rng.random(2 + 2 * _ATTEMPTS).tolist()
        (least, largest), (tallest, widest) = self.scale, map(math.log, self.ratio)
        for area, shape in zip(pairs[::2], pairs[1::2], strict=True):
            pixels = height * width * (least + area * (largest - least))
            aspect = math.exp(tallest + shape * (widest - tallest))
            columns, rows = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
            if 0 < columns <= width and 0 < rows <= height:
                top, left = int(down * (height - rows + 1)), int(right * (width - columns + 1))
                return self._window(top, left, rows, columns)
        aspect = min(max(width / height, self.ratio[0]), self.ratio[1])
        columns, rows = min(width, round(height * aspect)), min(height, round(width / aspect))
        return self._window((height - rows) // 2, (width - columns) // 2, rows, columns)

    def _window(self, top: int, left: int, height: int, width: int) -> Crop:
        rows, columns = self.size  # type: ignore[misc]
        return Crop(top, left, height, width, (rows, columns), interpolation=self.interpolation)


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
        return {**sample, self.field: _mirrored(cut) if self.flip and mirror < 0.5 else cut}

    def _reflect(self, image: np.ndarray, down: int, right: int) -> np.ndarray:
        height, width = image.shape[:2]
        if self.padding >= min(height, width):
            raise DataError(f"{self.field!r} is {height} x {width}, too small to reflect {self.padding} pixels.")
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
        return {**sample, self.field: _mirrored(image) if mirrored else image.copy()}


def image_of(sample: dict[str, Any], field: str) -> np.ndarray:
    """The pixels of a field of a sample.

    Raises:
        DataError: If it is missing, or no uint8 array ``[height, width, 3]``.
    """
    image = _array(sample, field)
    if image.dtype != np.uint8 or image.shape[2:] != (3,):
        raise DataError(
            f"the augmentation wants {field!r} to be an image, uint8 [height, width, 3]; it is {image.dtype} "
            f"{list(image.shape)}."
        )
    return image


def _array(sample: dict[str, Any], field: str) -> np.ndarray:
    if field not in sample:
        raise DataError(f"the augmentation wants the field {field!r}, the sample has {', '.join(map(repr, sample))}.")
    value = sample[field]
    if not isinstance(value, np.ndarray) or value.ndim < 2:
        raise DataError(f"the augmentation wants {field!r} to be [height, width, ...], got {type(value).__name__}.")
    return value


def _mirrored(image: np.ndarray) -> np.ndarray:
    if image.dtype != np.uint8:
        return np.ascontiguousarray(image[:, ::-1])
    # numpy moves these byte by byte; torch takes a fifteenth of its time.
    return torch.from_numpy(np.require(image, requirements=["C", "W"])).flip(1).numpy()


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
