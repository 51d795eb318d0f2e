"""Arrays as PNG files."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of an array.

    Args:
        pixels: Grey, shape ``[height, width]``, or red, green and blue, ``[height, width, 3]``; uint8, or floating in [0, 1],
            where what is outside counts as the nearest end.
    """
    if pixels.dtype != np.uint8:
        pixels = (np.nan_to_num(pixels).clip(0, 1) * 255).round().astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
