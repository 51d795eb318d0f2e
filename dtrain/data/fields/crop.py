"""Crop rectangles of images, of their masks and boxes, and resizing.

* A *crop* is a rectangle of an image and the size that it is resized to. It depends on the image's height and width
  only, so it can be chosen before the image is decoded.
* *Reduction*: JPEG stores blocks of 8 x 8 frequencies. Without the higher ones, an image of 1/2, 1/4 or 1/8 of the size
  is decoded in less time. A crop allows the largest reduction that leaves two pixels for each pixel of the result.
* An image is *thin* if its longer side is more than 16 times its shorter one. Resized by its shorter side it could take
  gigabytes, all but the middle for nothing, so only the middle is computed.
* A *mask* has a class number for each pixel; it is resized by nearest neighbours, so that no number is made up. *Boxes* are
  rows of left, top, right and bottom edge in pixels, and a class.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

INTERPOLATIONS = ("bilinear", "bicubic")
# Measured on photographs: with two pixels left for each pixel of the result, they differ by 0.4 to 1.0 grey levels on
# average from a full decode, half of the effect of a different interpolation; with one left, by 1.2 to 4.
_PIXELS_LEFT = 2
_THIN = 16


class Crop(NamedTuple):
    """A rectangle of an image in pixels, and the size that it is resized to.

    Attributes:
        size: Height and width of the resized rectangle.
        center: Height and width to cut from the middle of the resized image; None keeps all.
        interpolation: One of ``INTERPOLATIONS``.
    """

    top: int
    left: int
    height: int
    width: int
    size: tuple[int, int]
    center: tuple[int, int] | None = None
    interpolation: str = "bilinear"

    @property
    def reduction(self) -> int:
        """The factor by which an image may be reduced before this crop: 8, 4, 2, or 1 for none."""
        most = min(self.height // self.size[0], self.width // self.size[1]) // _PIXELS_LEFT
        return next((factor for factor in (8, 4, 2) if factor <= most), 1)

    def reduced(self, factor: int) -> Crop:
        """The same rectangle in an image reduced by ``factor``, rounded to its pixels."""
        top, left = round(self.top / factor), round(self.left / factor)
        bottom, right = round((self.top + self.height) / factor), round((self.left + self.width) / factor)
        return self._replace(top=top, left=left, height=bottom - top, width=right - left)

    def cut(self, pixels: np.ndarray) -> np.ndarray:
        """Applies the crop to an image.

        Args:
            pixels: uint8, ``[height, width, 3]``.

        Returns:
            uint8, ``[height, width, 3]`` of the new size; a view of ``pixels`` where nothing was resized.
        """
        rectangle = pixels[self.top : self.top + self.height, self.left : self.left + self.width]
        if self.center is None:
            return resize(rectangle, self.size, self.interpolation)
        (height, width), (top, left, rows, columns) = self.size, self._window
        if width > _THIN * height:
            needed, weights = _weights(self.width, width, range(left, left + columns), self.interpolation)
            part = resize(_weighted(rectangle[:, needed], weights), (height, columns), self.interpolation)
            return part[top : top + rows]
        if height > _THIN * width:
            needed, weights = _weights(self.height, height, range(top, top + rows), self.interpolation)
            part = rectangle[needed]
            part = resize(part, (len(part), width), self.interpolation)[:, left : left + columns]
            return _weighted(part.swapaxes(0, 1), weights).swapaxes(0, 1)
        return resize(rectangle, self.size, self.interpolation)[top : top + rows, left : left + columns]

    def cut_mask(self, mask: np.ndarray, ignore: int = 255) -> np.ndarray:
        """Applies the crop to a mask: every pixel of the result is a pixel of the mask.

        Args:
            mask: Integers, ``[height, width]`` of the image.
            ignore: Not used, because a crop is inside its image.

        Returns:
            A new array ``[height, width]`` of the new size, in the dtype of ``mask``.
        """
        top, left, rows, columns = self._window
        down = self.top + _nearest(self.height, self.size[0])[top : top + rows]
        right = self.left + _nearest(self.width, self.size[1])[left : left + columns]
        cut: np.ndarray = mask[down[:, np.newaxis], right]
        return cut

    def move_boxes(self, boxes: np.ndarray) -> np.ndarray:
        """Applies the crop to boxes.

        Args:
            boxes: fp32, ``[boxes, 5]``, in pixels of the image.

        Returns:
            fp32, ``[boxes, 5]``, in pixels of the result; as ``kept_boxes`` in its size.
        """
        top, left, rows, columns = self._window
        scale = np.array([self.size[1] / self.width, self.size[0] / self.height] * 2, np.float32)
        first, second = (np.array([x, y] * 2, np.float32) for x, y in ((self.left, self.top), (left, top)))
        moved = boxes.copy()
        moved[:, :4] = (boxes[:, :4] - first) * scale - second
        return kept_boxes(moved, rows, columns)

    @property
    def _window(self) -> tuple[int, int, int, int]:
        """Top, left, height and width of what is cut from the resized image."""
        if self.center is None:
            return 0, 0, *self.size
        # Halves are rounded to the even neighbour, as in torchvision.
        top, left = (round((side - part) / 2) for side, part in zip(self.size, self.center, strict=True))
        return top, left, *self.center


def whole(height: int, width: int, size: tuple[int, int], shorter_side: int | None = None) -> Crop:
    """The crop of a whole image, or of its middle, resized; for evaluation, where nothing is random.

    Args:
        height: Height of the image.
        width: Width of the image.
        size: Height and width of the result.
        shorter_side: None resizes to ``size``, ignoring the aspect ratio. Else the shorter side is resized to this
            number of pixels, the other in proportion, and ``size`` is cut from the middle (torchvision's ``Resize`` and
            ``CenterCrop``). Neither side of ``size`` may be larger.
    """
    if shorter_side is None:
        return Crop(0, 0, height, width, size)
    scaled = (
        (shorter_side, shorter_side * width // height)
        if height <= width
        else (shorter_side * height // width, shorter_side)
    )
    return Crop(0, 0, height, width, scaled, size)


def kept_boxes(boxes: np.ndarray, height: int, width: int) -> np.ndarray:
    """Boxes clipped to an image, without those that keep less than a pixel of their width or height.

    Args:
        boxes: fp32, ``[boxes, 5]``: left, top, right and bottom edge in pixels, and class.
        height: Height of the image.
        width: Width of the image.

    Returns:
        fp32, ``[boxes, 5]``, in the same order.
    """
    clipped = boxes.copy()
    clipped[:, :4] = np.clip(boxes[:, :4], 0, np.array([width, height] * 2, np.float32))
    kept: np.ndarray = clipped[(clipped[:, 2:4] - clipped[:, :2] >= 1).all(axis=1)]
    return kept


def resize(pixels: np.ndarray, size: tuple[int, int], interpolation: str = "bilinear") -> np.ndarray:
    """Resizes pixels with antialiasing, ignoring the aspect ratio.

    Uses torch's kernels, which torchvision calls too: they compute in integers, so that every CPU gives the same bits,
    and take a quarter of Pillow's time. Bilinear results differ from Pillow's by at most two grey levels, seldom more
    than one.

    Args:
        pixels: uint8, ``[height, width, 3]``.
        size: New height and width.
        interpolation: One of ``INTERPOLATIONS``.

    Returns:
        uint8, ``[size[0], size[1], 3]``; ``pixels`` itself if it has that size.
    """
    if pixels.shape[:2] == size:
        return pixels
    # channels_last input and output saves two thirds of the time. The axes are permuted after unsqueeze, because the
    # strides of a single image are not recognised as channels_last otherwise.
    image = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).unsqueeze(0).permute(0, 3, 1, 2)
    scaled = torch.nn.functional.interpolate(image, size, mode=interpolation, antialias=True)
    return np.ascontiguousarray(scaled.permute(0, 2, 3, 1)[0].numpy())


def _nearest(length: int, size: int) -> np.ndarray:
    """The pixel of a side that is nearest to the centre of each pixel of the resized side; int64, ``[size]``."""
    return (2 * np.arange(size) + 1) * length // (2 * size)


def _weights(side: int, size: int, wanted: range, interpolation: str) -> tuple[slice, np.ndarray]:
    """The part of a side that some pixels of the resized side depend on, and the weights by which they do.

    Args:
        side: Number of pixels.
        size: Number of pixels after resizing.
        wanted: Consecutive pixels of the resized side.
        interpolation: One of ``INTERPOLATIONS``.

    Returns:
        The part, and fp32 ``[len(part), len(wanted)]``: what ``resize`` rounds to integers.
    """
    scale = side / size
    blur = max(scale, 1)
    centers = (np.array(wanted) + 0.5) * scale
    reach = (2 if interpolation == "bicubic" else 1) * blur
    part = slice(max(math.floor(centers[0] - reach), 0), min(math.ceil(centers[-1] + reach), side))
    x = np.abs(np.arange(part.start, part.stop)[:, None] + 0.5 - centers) / blur
    if interpolation == "bicubic":
        weights = np.where(x < 1, (1.5 * x - 2.5) * x**2 + 1, np.where(x < 2, ((2.5 - 0.5 * x) * x - 4) * x + 2, 0))
    else:
        weights = np.clip(1 - x, 0, None)
    return part, (weights / weights.sum(axis=0)).astype(np.float32)


def _weighted(pixels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Resizes the columns of ``pixels`` by the weights of ``_weights``; uint8, ``[height, weights.shape[1], 3]``."""
    resized = np.tensordot(pixels, weights, axes=(1, 0))  # [height, 3, width]
    return np.clip(np.floor(resized + 0.5), 0, 255).astype(np.uint8).swapaxes(1, 2)
