"""The values of one sample: its fields decoded, its image cropped, its regions moved along, and the augmentation applied.

* A crop at the start of the augmentation (``Cropper``) is chosen while its image is decoded, in place of the image's size.
* *Regions*, masks and boxes, are decoded after the images: what happened to the image when it was read happens to them.
* Boxes are padded last, so an augmentation sees as many as the sample has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtrain.data.augment import Augment, begins_with
from dtrain.data.fields.crop import Crop
from dtrain.data.fields.field import REGIONS, DataError, Field
from dtrain.data.fields.regions import REGIONS_KEY, padded_boxes, region_of

#: ``crop(height, width)`` of an image.
CropOf = Callable[[int, int], Crop]


class SampleBuilder:
    """Builds samples.

    Args:
        fields: The fields of a sample.
        augment: The augmentation; None for none.

    Attributes:
        augment: The augmentation without a crop at its start, which happens while decoding.
        is_needed: Whether values depend on each other or on random numbers, so that fields cannot be decoded one by one.

    Raises:
        ValueError: If the augmentation starts with a crop of a field that is not an image.
    """

    def __init__(self, fields: Sequence[Field], augment: Augment | None) -> None:
        self._fields = fields
        self._cropper, self.augment = begins_with(augment)
        images = [field.name for field in fields if field.role in ("image", "video")]
        if self._cropper is not None and self._cropper.field not in images:
            raise ValueError(
                f"data.augment crops {self._cropper.field!r}, which is not an image. Images: {', '.join(images) or 'none'}."
            )
        self._regions = tuple(field for field in fields if field.role in REGIONS)
        self._with_regions = {field.of for field in self._regions}
        self.draws = augment is not None or any(field.clip == "random" for field in fields)
        self.is_needed = self.draws or bool(self._regions)

    def values(
        self,
        decode: Callable[[int, CropOf | None, float], Any],
        rng: np.random.Generator | None,
    ) -> dict[str, Any]:
        """The values of all fields by name, and what else the augmentation returns.

        Args:
            decode: ``decode(number, crop, at)`` is the value of a field, given its number. ``crop`` and ``at`` are as for
                ``dtrain.data.fields.decode.decode``.
            rng: The generator of the sample; None where ``draws`` is false.

        Raises:
            SampleError: If a mask or boxes do not fit their image.
            DataError: If the augmentation does not pass on what says which values are regions.
        """
        decoded: dict[str, Any] = {}
        frames: dict[str, _Frame] = {}
        for number, field in enumerate(self._fields):
            crop: CropOf | None = None
            if self._cropper is not None and self._cropper.field == field.name:
                crop = functools.partial(self._cropper.crop, rng=rng)  # type: ignore[arg-type]
            if field.name in self._with_regions:
                frame = frames[field.name] = _Frame(crop or field.crop)
                crop = frame if frame.inner is not None else None
            at = rng.random() if rng is not None and field.clip == "random" else 0.5
            decoded[field.name] = decode(number, crop, at)
        for field in self._regions:
            frame = frames.get(field.of or "", _NO_FRAME)
            size = frame.size or (decoded[field.of].shape[:2] if field.of else None)
            decoded[field.name] = region_of(field, decoded[field.name], size, frame.crop)
        if self.augment is not None:
            assert rng is not None
            if not self._regions:
                return self.augment(decoded, rng)
            decoded = dict(self.augment({**decoded, REGIONS_KEY: self._regions}, rng))
            if decoded.pop(REGIONS_KEY, None) is None:  # a later step would move the image alone
                raise DataError(
                    f"the augmentation returned {', '.join(map(repr, decoded)) or 'nothing'}, which lacks {REGIONS_KEY!r}, the "
                    "list of masks and boxes. Return the sample with changes: {**sample, 'image': changed}."
                )
        for field in self._regions:
            if field.role == "boxes" and field.name in decoded:
                decoded[field.name] = padded_boxes(field, decoded[field.name])
        return decoded


class _Frame:
    """The crop of an image, with what it was: the size of the stored image, and the crop that was chosen."""

    def __init__(self, inner: CropOf | None) -> None:
        self.inner = inner
        self.size: tuple[int, int] | None = None
        self.crop: Crop | None = None

    def __call__(self, height: int, width: int) -> Crop:
        assert self.inner is not None
        self.size, self.crop = (height, width), self.inner(height, width)
        return self.crop


_NO_FRAME = _Frame(None)
