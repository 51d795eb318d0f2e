"""What a map-style data set returns to what a batch takes: arrays, tensors, pictures, numbers and text, by role.

Only images are converted: whatever holds pixels becomes uint8 RGB ``[height, width, 3]``, as from a file. Everything else
keeps its type; what travels in which dtype is decided by ``dtrain.data.wire``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from dtrain.data.crop import Crop
from dtrain.data.fields import DataError, Field, SampleError
from dtrain.data.image import decode_image

_CHANNELS = (1, 3, 4)


def as_it_is(value: Any) -> Any:
    """The decoder of a field that has none of its own."""
    return value


def value_of(
    field: Field, raw: Any, out: np.ndarray | None = None, crop: Callable[[int, int], Crop] | None = None
) -> Any:
    """The value of one field.

    Args:
        field: Says what it is. Its decoder, if it has one, is called with ``raw`` first.
        raw: What the data set returned for it.
        out: uint8, ``[height, width, 3]``: where an encoded image goes if it has that shape.
        crop: ``crop(height, width)`` of an image, in place of the field's own.

    Returns:
        For the role image, uint8 ``[height, width, 3]``, cropped: from a PIL image, the bytes of an image file, or an array
        or tensor ``[height, width]``, ``[height, width, channels]`` or, if the last axis cannot be that,
        ``[channels, height, width]``; of four channels the last is dropped. Else what the decoder made of ``raw``, PIL images
        as arrays.

    Raises:
        SampleError: If an image file is damaged. ``ValueError``, ``OSError`` and ``EOFError`` of a field's own decoder count
            as that.
        DataError: If the role is image and the value holds no uint8 pixels.
    """
    assert field.decoder is not None
    try:
        value = field.decoder(raw)
        if isinstance(value, Image.Image):
            value = _picture(field, value)
    except SampleError:
        raise
    except (ValueError, OSError, EOFError) as error:
        raise SampleError(f"field {field.name!r}: {type(error).__name__}: {error}") from error
    if isinstance(value, Tensor):
        value = value.detach()
    if field.role != "image":
        return value
    crop = crop or field.crop
    if isinstance(value, (bytes, bytearray, memoryview)):
        return decode_image(bytes(value), crop, out, field.exif, field.decode == "reduced")
    pixels = _rgb(field, value)
    return pixels if crop is None else crop(*pixels.shape[:2]).cut(pixels)


def _picture(field: Field, picture: Image.Image) -> np.ndarray:
    if field.exif:
        picture = ImageOps.exif_transpose(picture)
    # A mask keeps its palette's numbers, an image shows its colours.
    return np.array(picture.convert("RGB") if field.role == "image" else picture)


def _rgb(field: Field, value: Any) -> np.ndarray:
    pixels = value.cpu().numpy() if isinstance(value, Tensor) and value.element_size() == 1 else value
    if isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8:
        if pixels.ndim == 2:
            pixels = pixels[:, :, np.newaxis]
        if pixels.ndim == 3 and pixels.shape[2] not in _CHANNELS and pixels.shape[0] in _CHANNELS:
            pixels = pixels.transpose(1, 2, 0)
        if pixels.ndim == 3 and pixels.shape[2] in _CHANNELS:
            return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels[:, :, :3]
    got = f"{value.dtype} {list(value.shape)}" if isinstance(value, (np.ndarray, Tensor)) else type(value).__name__
    raise DataError(
        f"field {field.name!r}: the data set returns {got}, but images travel as uint8 pixels and are normalised on the "
        "device. Leave out ToTensor and Normalize; or declare role: feature for what is normalised already."
    )
