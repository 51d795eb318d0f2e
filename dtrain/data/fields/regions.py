"""Regions of an image: masks and boxes, which are cropped, resized and mirrored together with it.

* A *mask* has a number for each pixel, such as its class: integers ``[height, width]``, of the size of the stored image.
* *Boxes* are fp32 ``[boxes, 5]``: left, top, right and bottom edge in pixels, the right and bottom ones exclusive, and the
  class. Their number varies. They are padded to ``[length, 5]`` after all augmentations, with NaN, which becomes zeros and a
  count in the finished batch.
* A *move* is what happens to the pixels of an image: a ``Crop``, or the shift and reflection of an augmentation. It applies
  to all regions of the image, which the sample lists under ``REGIONS_KEY``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from dtrain.data.fields.field import DataError, Field, SampleError

#: Of a sample with regions, on its way through augmentations: the fields that are regions.
REGIONS_KEY = "__regions__"
_EDGES = 4
_MASK_DTYPES = ("uint8", "int16", "int32", "int64")


class Move(Protocol):
    """What an augmentation does to the pixels of an image, and to masks and boxes of the same image."""

    def cut(self, pixels: np.ndarray) -> np.ndarray:
        """The new image ``[height, width, ...]``."""

    def cut_mask(self, mask: np.ndarray, ignore: int) -> np.ndarray:
        """The new mask ``[height, width]``, of numbers of ``mask``, and ``ignore`` outside of the image."""

    def move_boxes(self, boxes: np.ndarray) -> np.ndarray:
        """The boxes that are in the new image, fp32 ``[boxes, 5]``; ends with ``kept_boxes``."""


def moved_regions(sample: Mapping[str, Any], image: str, size: tuple[int, int], move: Move) -> dict[str, Any]:
    """The moved regions of an image of a sample, by name.

    Args:
        sample: The sample of an augmentation.
        image: Name of the image.
        size: Height and width of the image before the move.
        move: What happens to the image.

    Raises:
        DataError: If a mask has a different size than the image, or boxes are not ``[boxes, 5]``.
    """
    moved = {}
    for field in regions_of(sample, image):
        value, name = sample[field.name], field.name
        shape = value.shape if isinstance(value, np.ndarray) else type(value).__name__
        if field.role == "boxes":
            if not _is_boxes(value):
                raise DataError(f"the augmentation needs {name!r} to be boxes, fp32 [boxes, 5]; got {shape}.")
            moved[name] = move.move_boxes(value)
        else:
            if shape != size:
                raise DataError(
                    f"the augmentation needs the mask {name!r} to have the size of {image!r}, {size}; got {shape}. An "
                    "augmentation before it has to change both."
                )
            moved[name] = move.cut_mask(value, field.ignore)
    return moved


def regions_of(sample: Mapping[str, Any], image: str) -> list[Field]:
    """The masks and boxes of an image, of a sample on its way through augmentations."""
    return [field for field in sample.get(REGIONS_KEY, ()) if field.of == image]


def region_of(field: Field, value: Any, size: tuple[int, int] | None, move: Move | None) -> np.ndarray:
    """A mask or boxes as stored, moved as the image was when it was read.

    Args:
        field: Of the role mask or boxes.
        value: The decoded value: an array or a tensor; boxes may be nested lists.
        size: Height and width of the stored image; None: the sample has none.
        move: How the image was cropped and resized; None: not at all.

    Returns:
        A new array: a mask ``[height, width]``, or boxes, fp32 ``[boxes, 5]``, not padded. Boxes with four numbers are of
        the class 0.

    Raises:
        SampleError: If the value is no mask of the size of the image, or no boxes, or has more boxes than ``field.length``.
    """
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    if field.role == "mask":
        if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype.name not in _MASK_DTYPES:
            got = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise SampleError(f"field {field.name!r}: {got}, want {' or '.join(_MASK_DTYPES)} [height, width]")
        if size is not None and array.shape != size:
            raise SampleError(
                f"field {field.name!r}: the mask is {array.shape[0]} x {array.shape[1]}, its image {field.of!r} is "
                f"{size[0]} x {size[1]}"
            )
        return array.copy() if move is None else move.cut_mask(array, field.ignore)
    boxes = _boxes(field, array)
    return boxes if move is None else move.move_boxes(boxes)


def padded_boxes(field: Field, boxes: Any) -> np.ndarray:
    """Boxes of a sample after all augmentations, fp32 ``[field.length, 5]``, padded with NaN.

    Raises:
        DataError: If they are not fp32 ``[boxes, 5]``, or too many.
    """
    assert field.length is not None
    if not _is_boxes(boxes) or len(boxes) > field.length:
        got = f"{boxes.dtype} {list(boxes.shape)}" if isinstance(boxes, np.ndarray) else type(boxes).__name__
        raise DataError(
            f"the augmentation returned {got} as {field.name!r}, want fp32 [boxes, 5] with at most {field.length} boxes. "
            f"Set length of the field, or return fewer."
        )
    rows = np.full((field.length, _EDGES + 1), np.nan, np.float32)
    rows[: len(boxes)] = boxes
    return rows


def boxes_and_count(padded: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of ``padded_boxes``, ``[..., length, 5]``, with zeros as padding; and the number of boxes, int64 ``[...]``."""
    missing = padded.isnan()
    return padded.masked_fill(missing, 0), (~missing[..., 0]).sum(dim=-1)


def _is_boxes(value: Any) -> bool:
    return (
        isinstance(value, np.ndarray) and value.dtype == np.float32 and value.ndim == 2 and value.shape[1] == _EDGES + 1
    )


def _boxes(field: Field, value: Any) -> np.ndarray:
    assert field.length is not None
    try:
        boxes = np.array(value, np.float32)
    except (ValueError, TypeError):  # lists of different lengths, or no numbers
        boxes = np.zeros((1, 0), np.float32)
    if boxes.size == 0 and len(boxes) == 0:
        return np.zeros((0, _EDGES + 1), np.float32)
    if boxes.ndim != 2 or boxes.shape[1] not in (_EDGES, _EDGES + 1) or not np.isfinite(boxes).all():
        raise SampleError(
            f"field {field.name!r}: not boxes. Want a list of [left, top, right, bottom] or [left, top, right, bottom, "
            f"class], finite numbers"
        )
    if len(boxes) > field.length:
        raise SampleError(f"field {field.name!r}: {len(boxes)} boxes, more than its length {field.length}")
    wrong = np.flatnonzero((boxes[:, 2:4] < boxes[:, :2]).any(axis=1))
    if len(wrong):
        raise SampleError(
            f"field {field.name!r}: box {wrong[0]} is {boxes[wrong[0], :4].tolist()}; want left, top, right, bottom, with "
            "left <= right and top <= bottom"
        )
    return boxes if boxes.shape[1] > _EDGES else np.concatenate([boxes, np.zeros_like(boxes[:, :1])], axis=1)
