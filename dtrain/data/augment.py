"""Augmentations of one sample: ``augment(sample, rng) -> sample`` on a dict of numpy arrays.

* The generator is keyed by (seed, epoch, sample), so the result does not depend on the rank or worker that loads the
  sample.
* Each augmentation draws a fixed number of random numbers and does not change its input arrays.
* A ``Geometric`` augmentation moves pixels of an image. Masks and boxes of the image move with it
  (``dtrain.data.fields.regions``).
* A ``Cropper`` at the start replaces the image's own size: the loader then crops while it decodes, which is cheaper.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dtrain.config.partials import plain_partial
from dtrain.data.fields.crop import INTERPOLATIONS, Crop, kept_boxes
from dtrain.data.fields.field import DataError
from dtrain.data.fields.regions import REGIONS_KEY, Move, moved_regions, regions_of

Augment = Callable[[dict[str, Any], np.random.Generator], dict[str, Any]]

MODES = ("zero", "reflect")
# Attempts to draw a fitting area and aspect ratio before the fallback, as in torchvision.
_ATTEMPTS = 10
# RGB to luma and two colour axes (NTSC's YIQ), and back.
_YIQ = np.array([[0.299, 0.587, 0.114], [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
_RGB = np.linalg.inv(_YIQ)

Range = float | Sequence[float]


class Compose:
    """Augmentations one after the other, all with the same generator.

    Args:
        steps: The augmentations, in order.

    Raises:
        ValueError: If one of them is not callable.

    Example:
        >>> import numpy as np
        >>> from dtrain.data.augment import ColorJitter, Compose, Flip, RandomResizedCrop
        >>> augment = Compose([RandomResizedCrop(32), Flip(), ColorJitter(brightness=0.4)])
        >>> sample = {"image": np.zeros((48, 64, 3), np.uint8)}
        >>> augment(sample, np.random.default_rng(0))["image"].shape
        (32, 32, 3)
    """

    def __init__(self, steps: Sequence[Augment]) -> None:
        for step in steps:
            if not callable(step):
                raise ValueError(f"Compose: got step {step!r}, want a callable (sample, rng) -> sample.")
        # Flattened, so that a crop at the start of a nested Compose is found.
        self.steps: tuple[Augment, ...] = tuple(
            inner for step in steps for inner in (step.steps if isinstance(step, Compose) else (plain_partial(step),))
        )

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """The sample after the last step."""
        for step in self.steps:
            sample = step(sample, rng)
        return sample


class Geometric(ABC):
    """An augmentation that moves the pixels of one image, and the masks and boxes that belong to it.

    Example:
        >>> import numpy as np
        >>> from dtrain.data.augment import Geometric
        >>> from dtrain.data.fields.crop import Crop
        >>> class Left(Geometric):
        ...     field = "image"
        ...     def move(self, height, width, rng):
        ...         return Crop(0, 0, height, width // 2, size=(height, width // 2))
        >>> Left()({"image": np.zeros((4, 6, 3), np.uint8)}, np.random.default_rng(0))["image"].shape
        (4, 3, 3)

    Attributes:
        field: Name of the image.
    """

    field: str

    @abstractmethod
    def move(self, height: int, width: int, rng: np.random.Generator) -> Move:
        """How an image of this height and width is moved; draws a fixed number of random numbers."""

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """The sample with new arrays for its image, ``[height, width, ...]``, and for the masks and boxes of this image."""
        image = _array(sample, self.field)
        height, width = image.shape[:2]
        move = self.move(height, width, rng)
        cut = move.cut(image)
        if np.may_share_memory(cut, image):
            cut = np.array(cut, order="C")
        changed = {self.field: cut}
        if REGIONS_KEY in sample:
            changed |= moved_regions(sample, self.field, (height, width), move)
        return {**sample, **changed}


class Cropper(Geometric):
    """An augmentation that crops one image and does nothing else."""

    @abstractmethod
    def crop(self, height: int, width: int, rng: np.random.Generator) -> Crop:
        """The crop of an image of this height and width."""

    def move(self, height: int, width: int, rng: np.random.Generator) -> Crop:
        """The crop."""
        return self.crop(height, width, rng)

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """The sample with new arrays for its image, uint8 ``[height, width, 3]``, and for the masks and boxes of this image."""
        image_of(sample, self.field)
        return super().__call__(sample, rng)


@dataclass(frozen=True)
class RandomResizedCrop(Cropper):
    """Cuts a rectangle of random area and aspect ratio out of an image and resizes it.

    The augmentation of the ImageNet recipes (Szegedy et al. 2015); the rectangle is chosen as in torchvision.

    Args:
        size: Size of the result in pixels: one number, or height and width.
        scale: Smallest and largest share of the image's area.
        ratio: Smallest and largest aspect ratio, width over height.
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
        """The first of ten random rectangles that fits into the image; if none does, the largest centred one of an allowed
        aspect ratio."""
        down, right, *pairs = rng.random(2 + 2 * _ATTEMPTS).tolist()
        (least, largest), (tallest, widest) = self.scale, map(math.log, self.ratio)
        for area, shape in zip(pairs[::2], pairs[1::2], strict=True):
            pixels = height * width * (least + area * (largest - least))
            aspect = math.exp(tallest + shape * (widest - tallest))
            columns, rows = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
            if 0 < columns <= width and 0 < rows <= height:
                top, left = int(down * (height - rows + 1)), int(right * (width - columns + 1))
                return self._rectangle(top, left, rows, columns)
        aspect = min(max(width / height, self.ratio[0]), self.ratio[1])
        columns, rows = min(width, round(height * aspect)), min(height, round(width / aspect))
        return self._rectangle((height - rows) // 2, (width - columns) // 2, rows, columns)

    def _rectangle(self, top: int, left: int, height: int, width: int) -> Crop:
        rows, columns = self.size  # type: ignore[misc]
        return Crop(top, left, height, width, (rows, columns), interpolation=self.interpolation)


@dataclass(frozen=True)
class RandomCropFlip(Geometric):
    """Pads an image, crops its old size at a random place, and mirrors it with probability 1/2.

    The augmentation of the CIFAR recipes (Lee et al. 2015, He et al. 2016). In the mode ``zero``, masks are padded with
    their field's ``ignore``. Boxes are not extended into the pixels that the mode ``reflect`` adds.

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

    def move(self, height: int, width: int, rng: np.random.Generator) -> Move:
        """The shift and reflection, which keep the size."""
        down, right, mirror = rng.random(3).tolist()
        shifts = (int(down * (2 * self.padding + 1)) - self.padding, int(right * (2 * self.padding + 1)) - self.padding)
        if self.mode == "reflect" and self.padding >= min(height, width):
            raise DataError(f"{self.field!r} is {height} x {width}, too small to reflect {self.padding} pixels.")
        return _Shift(height, width, *shifts, self.mode == "reflect", self.flip and mirror < 0.5)


@dataclass(frozen=True)
class Flip(Geometric):
    """Mirrors an image left to right.

    Args:
        field: Name of an array ``[height, width, ...]``.
        probability: Probability of mirroring.

    Raises:
        ValueError: If ``probability`` is outside [0, 1].
    """

    field: str = "image"
    probability: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability {self.probability}: want a number from 0 to 1.")

    def move(self, height: int, width: int, rng: np.random.Generator) -> Move:
        """The reflection, or nothing."""
        return _Shift(height, width, mirrored=rng.random() < self.probability)


@dataclass(frozen=True)
class ColorJitter:
    """Changes brightness, contrast, saturation and hue, in this order, each by a random amount.

    The augmentation of Howard ("Some improvements on deep convolutional neural network based image classification",
    2013) with the arguments of torchvision's class of this name. As in NVIDIA DALI's ``ColorTwist``, all four changes
    are one affine map of the colours, which takes an eighth of torchvision's time. Results differ from torchvision's in two
    ways: values are clipped once at the end instead of after each change, and hue is rotated at constant luma in YIQ
    instead of HSV. For torchvision's own results use ``TorchvisionTransform``.

    Args:
        brightness: The factor is drawn from ``[max(0, 1 - x), 1 + x]``, or from a range ``[low, high]``.
        contrast: The same, relative to the image's mean luma.
        saturation: The same, relative to each pixel's luma.
        hue: The shift, as a share of the colour circle, is drawn from ``[-x, x]``, or from a range ``[low, high]``;
            within [-0.5, 0.5].
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


class TorchvisionTransform:
    """Calls a transform of ``torchvision.transforms.v2``, or any similar callable, on one image.

    Such transforms draw from torch's global generator. It is seeded from the sample's generator for the call and
    restored afterwards, so that the result still depends on (seed, epoch, sample) only.

    Args:
        transform: Called with a uint8 tensor ``[3, height, width]``; returns one of any height and width. Leave out
            ``ToDtype`` and ``Normalize``: images are transferred as uint8 and normalised on the device.
        field: Name of the image.
        only_colours: Whether the transform leaves every pixel in its place, as ``ColorJitter`` does and ``RandAugment`` does
            not. Required for an image with a mask or boxes, which the transform does not move.

    Raises:
        ValueError: If ``transform`` is not callable, or is a class.
    """

    def __init__(self, transform: Callable[[Tensor], Tensor], field: str = "image", only_colours: bool = False) -> None:
        if isinstance(transform, type) or not callable(transform):
            raise ValueError(
                f"transform {transform!r}: want an object such as torchvision.transforms.v2.RandAugment()."
            )
        self.transform = plain_partial(transform)
        self.field = field
        self.only_colours = only_colours

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """The sample with its image, uint8 ``[height, width, 3]``, replaced by a new array.

        Raises:
            DataError: If the transform returns anything but uint8 ``[3, height, width]``, or the image has a mask or boxes and
                ``only_colours`` is false.
        """
        if not self.only_colours and (regions := regions_of(sample, self.field)):
            raise DataError(
                f"the transform of {self.field!r} may move pixels, but not {regions[0].name!r}. Set only_colours=true if it "
                "changes colours only; otherwise use RandomResizedCrop, RandomCropFlip, Flip or your own Geometric."
            )
        image = torch.from_numpy(np.array(image_of(sample, self.field))).permute(2, 0, 1)
        seed = int(rng.integers(2**63))
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which would also initialise CUDA in the worker.
            torch.default_generator.manual_seed(seed)
            changed = self.transform(image)
        if not isinstance(changed, Tensor) or changed.dtype != torch.uint8 or changed.shape[:-2] != (3,):
            got = f"{changed.dtype} {list(changed.shape)}" if isinstance(changed, Tensor) else type(changed).__name__
            raise DataError(
                f"the transform of {self.field!r} returns {got}, want uint8 [3, height, width]. Leave out ToDtype and "
                "Normalize: images are normalised on the device, by the field's mean and std."
            )
        return {**sample, self.field: np.ascontiguousarray(changed.permute(1, 2, 0).numpy())}


def begins_with(augment: Augment | None) -> tuple[Cropper | None, Augment | None]:
    """Splits an augmentation into a ``Cropper`` at its start and the rest; None for a missing part."""
    steps = augment.steps if isinstance(augment, Compose) else (augment,)
    if not steps or not isinstance(steps[0], Cropper):
        return None, augment
    return steps[0], Compose(steps[1:]) if len(steps) > 1 else None


def image_of(sample: dict[str, Any], field: str) -> np.ndarray:
    """The pixels of a field of a sample; ``DataError`` unless it is a uint8 array ``[height, width, 3]``."""
    image = _array(sample, field)
    if image.dtype != np.uint8 or image.shape[2:] != (3,):
        raise DataError(
            f"the augmentation needs {field!r} to be an image, uint8 [height, width, 3]; got {image.dtype} "
            f"{list(image.shape)}."
        )
    return image


def _array(sample: dict[str, Any], field: str) -> np.ndarray:
    if field not in sample:
        raise DataError(f"the augmentation needs the field {field!r}; the sample has {', '.join(map(repr, sample))}.")
    value = sample[field]
    if not isinstance(value, np.ndarray) or value.ndim < 2:
        raise DataError(f"the augmentation needs {field!r} to be [height, width, ...], got {type(value).__name__}.")
    return value


class _Shift(NamedTuple):
    """The rectangle of an image's own size that starts at (down, right), mirrored or not."""

    height: int
    width: int
    down: int = 0
    right: int = 0
    reflects: bool = False
    mirrored: bool = False

    def cut(self, pixels: np.ndarray) -> np.ndarray:
        return self._cut(pixels, 0)

    def cut_mask(self, mask: np.ndarray, ignore: int) -> np.ndarray:
        return self._cut(mask, ignore)

    def move_boxes(self, boxes: np.ndarray) -> np.ndarray:
        moved = boxes - np.array([self.right, self.down, self.right, self.down, 0], np.float32)
        if self.mirrored:
            moved[:, [0, 2]] = self.width - moved[:, [2, 0]]
        return kept_boxes(moved, self.height, self.width)

    def _cut(self, array: np.ndarray, fill: int) -> np.ndarray:
        if self.reflects:
            rows, columns = _reflected(self.height, self.down), _reflected(self.width, self.right)
            array = array.take(rows, axis=0).take(columns, axis=1)
        elif self.down or self.right:
            array = _shift(array, self.down, self.right, fill)
        elif not self.mirrored:
            return array.copy()
        return _mirrored(array) if self.mirrored else array


def _mirrored(image: np.ndarray) -> np.ndarray:
    if image.dtype != np.uint8:
        return np.ascontiguousarray(image[:, ::-1])
    # numpy mirrors uint8 byte by byte; torch takes a fifteenth of the time.
    return torch.from_numpy(np.require(image, requirements=["C", "W"])).flip(1).numpy()


def _shift(image: np.ndarray, down: int, right: int, fill: int) -> np.ndarray:
    """The rectangle of the image's size that starts at (down, right); ``fill`` outside the image."""
    out = np.full_like(image, fill) if fill else np.zeros_like(image)
    height, width = image.shape[:2]
    rows, columns = max(height - abs(down), 0), max(width - abs(right), 0)
    top, left = max(down, 0), max(right, 0)
    to_top, to_left = max(-down, 0), max(-right, 0)
    out[to_top : to_top + rows, to_left : to_left + columns] = image[top : top + rows, left : left + columns]
    return out


def _reflected(length: int, shift: int) -> np.ndarray:
    """Indices of the range of ``length`` that starts at ``shift``, mirrored at the first and the last element."""
    index = np.abs(np.arange(shift, shift + length))
    return np.where(index >= length, 2 * (length - 1) - index, index)


def _affine(luma: float, brightness: float, contrast: float, saturation: float, hue: float) -> Any:
    """12 floats in Pillow's order: the rows of a 3 x 4 matrix (factors of red, green and blue, and an offset)."""
    across, along = saturation * math.cos(2 * math.pi * hue), saturation * math.sin(2 * math.pi * hue)
    turned = _RGB @ np.array([[1, 0, 0], [0, across, along], [0, -along, across]]) @ _YIQ
    rows = np.empty((3, 4))
    rows[:, :3] = brightness * contrast * turned
    rows[:, 3] = brightness * (1 - contrast) * luma
    return tuple(rows.ravel().tolist())


def _mean_luma(image: np.ndarray) -> float:
    height, width, _ = image.shape
    # Columns first: numpy sums them twenty times as fast as both axes at once.
    sums = image.reshape(height, -1).sum(0, dtype=np.uint32).reshape(width, 3).sum(0)
    return float(_YIQ[0] @ sums) / max(1, int(height * width))


def _range(name: str, value: Range, middle: float, limits: tuple[float, float]) -> tuple[float, float]:
    low, high = limits
    if isinstance(value, (int, float)):
        least, largest = max(low, middle - value), middle + value
    else:
        least, largest = value if len(value) == 2 else (1.0, 0.0)
    if not low <= least <= largest <= high or largest == math.inf:
        raise ValueError(
            f"{name} {value!r}: want a number, 0 or more, or [least, largest], within [{low:g}, {high:g}]."
        )
    return float(least), float(largest)
