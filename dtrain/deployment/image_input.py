"""What an image model takes in: from a file to the pixels that the trainer's loader would have made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtrain.data.field_options import parse_fields
from dtrain.data.fields import Field
from dtrain.data.image import decode_image


@dataclass(frozen=True)
class ImageInput:
    """The preprocessing of one image field.

    Attributes:
        field: The field's name in the batches that the model was trained on.
        size: Height and width in pixels that images are resized to; None keeps their own.
        mean: Per channel, of images scaled to [0, 1].
        std: Per channel.
        exif: Turn an image as its EXIF orientation says.
        shorter_side: Of the image before ``size`` is cut from its middle; None resizes to ``size``.
        reduced: Large JPEGs are decoded at a part of their size.
        own_decoder: The training decoded its files in a way of its own, which an artefact does not have.
    """

    field: str
    size: tuple[int, int] | None
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    exif: bool = False
    shorter_side: int | None = None
    reduced: bool = False
    own_decoder: bool = False

    @classmethod
    def of(cls, field: Field, size: tuple[int, int] | None = None) -> ImageInput:
        """That of a declared field; ``size`` stands in where the field keeps the images' own."""
        return cls(
            field.name,
            field.size or size,
            field.mean,
            field.std,
            field.exif,
            field.shorter_side,
            field.decode == "reduced",
            field.kind != "image",
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ImageInput:
        """What ``to_json`` gave.

        Raises:
            ValueError: If it is something else.
        """
        try:
            options = {option: value[option] for option in ("size", "mean", "std", "exif", "shorter_side")}
            own_decoder = bool(value["own_decoder"])
            decode = "reduced" if value["reduced"] else "full"
            (field,) = parse_fields({"png": {"name": value["field"], "role": "image", "decode": decode, **options}})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"input {value!r} describes no image ({type(error).__name__}: {error})") from error
        return dataclasses.replace(cls.of(field), own_decoder=own_decoder)

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return dataclasses.asdict(self)

    def decode(self, payload: bytes) -> np.ndarray:
        """The pixels of an image file, uint8 ``[height, width, 3]``.

        Raises:
            SampleError: If it is no readable image.
        """
        return decode_image(payload, self._as_field().crop, exif=self.exif, reduced=self.reduced)

    def _as_field(self) -> Field:
        return Field("png", self.field, "image", self.size, self.mean, self.std, shorter_side=self.shorter_side)
