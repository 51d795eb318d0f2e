"""Which part of an image is seen, and at what size.

* A *crop* is a window of an image, and the size that it is brought to. It is chosen from the image's height and width alone,
  so it is known before anything is decoded.
* *Reduction*: JPEG stores blocks of 8 x 8 frequencies, and a decoder that leaves out the higher ones hands over an image of
  1/2, 1/4 or 1/8 of the size in less time. A crop allows as much of it as leaves two pixels for each that is wanted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

INTERPOLATIONS = ("bilinear", "bicubic")
# With two pixels left for each one wanted, photographs differ by 0.4 to 1.0 grey levels on average from those that were
# decoded in full, half of what another interpolation changes; with one left, by 1.2 to 4.
_PIXELS_LEFT = 2


class Crop(NamedTuple):
    """A window of an image, and the size that it is brought to.

    Attributes:
        top: First row.
        left: First column.
        height: Rows.
        width: Columns.
        size: Height and width that the window is resized to.
        center: Height and width of what is cut from the middle of that; None keeps all.
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
        """By what an image may be reduced before this is cut from it: 8, 4, 2, or 1 for not at all."""
        most = min(self.height // self.size[0], self.width // self.size[1]) // _PIXELS_LEFT
        return next((factor for factor in (8, 4, 2) if factor <= most), 1)

    def reduced(self, factor: int) -> Crop:
        """The same window of the reduced image, to the nearest of its pixels."""
        top, left = round(self.top / factor), round(self.left / factor)
        bottom, right = round((self.top + self.height) / factor), round((self.left + self.width) / factor)
        return self._replace(top=top, left=left, height=bottom - top, width=right - left)

    def cut(self, pixels: np.ndarray) -> np.ndarray:
        """What the crop shows of an image.

        Args:
            pixels: uint8, ``[height, width, 3]``.

        Returns:
            uint8, ``[height, width, 3]`` of the wanted size; a view of ``pixels`` where nothing had to be resized.
        """
        window = pixels[self.top : self.top + self.height, self.left : self.left + self.width]
        scaled = resize(window, self.size, self.interpolation)
        if self.center is None:
            return scaled
        (height, width), (rows, columns) = self.size, self.center
        # Halves go to the even neighbour, as in torchvision.
        top, left = round((height - rows) / 2), round((width - columns) / 2)
        return scaled[top : top + rows, left : left + columns]


def whole(height: int, width: int, size: tuple[int, int], shorter_side: int | None = None) -> Crop:
    """An image at another size: for evaluation, where nothing is random.

    Args:
        height: Of the image.
        width: Of the image.
        size: Height and width of the result.
        shorter_side: None resizes to ``size``, aspect ratio disregarded. Else the shorter side is brought to this, the
            other in proportion, and ``size`` is cut from the middle (torchvision's ``Resize`` and ``CenterCrop``).
            Neither side of ``size`` is larger than it.
    """
    if shorter_side is None:
        return Crop(0, 0, height, width, size)
    scaled = (
        (shorter_side, shorter_side * width // height)
        if height <= width
        else (shorter_side * height // width, shorter_side)
    )
    return Crop(0, 0, height, width, scaled, size)


def resize(pixels: np.ndarray, size: tuple[int, int], interpolation: str = "bilinear") -> np.ndarray:
    """Pixels at another size, aspect ratio disregarded, antialiased.

    torch's kernels, which torchvision calls too, compute in integers, so that every CPU gives the same bits, and need a
    quarter of Pillow's time. Bilinear follows Pillow to within two grey levels, seldom more than one.

    Args:
        pixels: uint8, ``[height, width, 3]``.
        size: New height and width.
        interpolation: One of ``INTERPOLATIONS``.

    Returns:
        uint8, ``[size[0], size[1], 3]``; ``pixels`` itself if it has that size.
    """
    if pixels.shape[:2] == size:
        return pixels
    # [1, 3, height, width] in channels_last layout, here and there, saves two thirds of the time. In the other order the one
    # image would get a stride that is none of that layout.
    image = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).unsqueeze(0).permute(0, 3, 1, 2)
    scaled = torch.nn.functional.interpolate(image, size, mode=interpolation, antialias=True)
    return np.ascontiguousarray(scaled.permute(0, 2, 3, 1)[0].numpy())
