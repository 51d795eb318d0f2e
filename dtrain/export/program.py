"""The program of an artefact: a module that maps rows, in the loader's format, to fp32 outputs, including preprocessing.

* A *program* normalises images in fp32 and then casts them; other floats are only cast. All storage formats therefore take the
  same rows, and callers need not preprocess.
* ``RowSpec`` is the dtype and shape of its input rows.
* ``ImageInput`` is the preprocessing of one image field, from the bytes of a file to the same pixels as in the loader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dtrain.data.fields.decode import decode_image
from dtrain.data.fields.field import Field
from dtrain.data.fields.parse import parse_fields
from dtrain.data.loading.batch import normalised
from dtrain.errors import ConfigError


class Program(nn.Module):
    """A model with its preprocessing; returns fp32 outputs.

    Args:
        model: The model in eval mode, with its weights in ``dtype``.
        image: Preprocessing of the image that the model takes; None if it takes something else.
        dtype: Dtype to which floats are cast before the model.
        channels_last: Whether images are passed to the model in channels_last layout; else contiguous.

    Example:
        >>> import torch
        >>> from dtrain.export.program import Program
        >>> program = Program(torch.nn.Linear(4, 2, dtype=torch.bfloat16).eval(), None, torch.bfloat16)
        >>> program(torch.ones(3, 4)).dtype
        torch.float32
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, model: nn.Module, image: ImageInput | None, dtype: torch.dtype, channels_last: bool = True
    ) -> None:
        super().__init__()
        self.model = model
        self._dtype = dtype
        self._takes_images = image is not None
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        if image is not None:
            tensors = (*model.parameters(), *model.buffers())
            device = tensors[0].device if tensors else None
            for name, values in (("mean", image.mean), ("std", image.std)):
                levels = torch.tensor([255 * value for value in values], device=device).view(3, 1, 1)
                self.register_buffer(name, levels, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Computes the model's outputs, cast to fp32.

        Args:
            rows: uint8 ``[rows, height, width, 3]`` for an image model, else the model's argument; floats are cast.

        Raises:
            ConfigError: If the model returns anything but one tensor.
        """
        if self._takes_images:
            rows = normalised(rows, self.mean, self.std, self._dtype).contiguous(memory_format=self._layout)
        elif rows.is_floating_point():
            rows = rows.to(self._dtype)
        outputs = self.model(rows)
        if not isinstance(outputs, Tensor):
            raise ConfigError(
                f"model: {type(self.model).__name__} returns {type(outputs).__name__}, but an artefact's output is one "
                "tensor. Export a model whose forward returns only the tensor that you need."
            )
        return outputs.float()


@dataclass(frozen=True)
class RowSpec:
    """Dtype and shape of the rows that a program takes.

    Attributes:
        dtype: Name of a torch dtype, such as ``uint8``.
        shape: Shape of one row; the number of rows is free.
    """

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def from_rows(cls, rows: Tensor) -> RowSpec:
        """The specification of a batch ``[rows, ...]``."""
        return cls(_dtype_name(rows), tuple(rows.shape[1:]))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RowSpec:
        """Reads ``dataclasses.asdict`` of a specification back.

        Raises:
            ValueError: If ``value`` has a different form.
        """
        try:
            spec = cls(str(value["dtype"]), tuple(int(length) for length in value["shape"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"rows {value!r} lack a dtype or shape ({type(error).__name__}: {error})") from error
        if not isinstance(getattr(torch, spec.dtype, None), torch.dtype):
            raise ValueError(f"rows: {spec.dtype!r} is not a torch dtype")
        return spec

    def __str__(self) -> str:
        return f"{self.dtype} {['rows', *self.shape]}".replace("'", "")

    def checked(self, rows: Tensor) -> Tensor:
        """Casts floats to the dtype of the specification, and checks dtype and shape, which compiled programs do not check.

        Raises:
            ConfigError: If dtype or shape differ.
        """
        dtype: torch.dtype = getattr(torch, self.dtype)
        if rows.is_floating_point() and dtype.is_floating_point:
            rows = rows.to(dtype)
        if rows.dtype != dtype or tuple(rows.shape[1:]) != self.shape:
            raise ConfigError(
                f"the artefact takes {self}, got {_dtype_name(rows)} {list(rows.shape)}. Convert the rows to that form, or "
                "export the model again with rows of the new form."
            )
        return rows


@dataclass(frozen=True)
class ImageInput:
    """The preprocessing of one image field.

    Attributes:
        field: The field's name in the training batches.
        size: Height and width in pixels after resizing; None keeps each image's own size.
        mean: Per channel, of images scaled to [0, 1].
        std: Per channel, of images scaled to [0, 1].
        exif: Whether to rotate an image by its EXIF orientation.
        shorter_side: Length in pixels to which the shorter side is resized before a centre crop to ``size``; None resizes
            directly to ``size``.
        reduced: Whether large JPEGs are decoded at a fraction of their size.
        own_decoder: Whether training used a custom decoder, which an artefact does not contain.
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
    def from_field(cls, field: Field, size: tuple[int, int] | None = None) -> ImageInput:
        """The preprocessing of a declared field; ``size`` is used if the field declares none."""
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
        """Reads ``dataclasses.asdict`` of an image input back.

        Raises:
            ValueError: If ``value`` has a different form, or an option is impossible.
        """
        try:
            options = {option: value[option] for option in ("size", "mean", "std", "exif", "shorter_side")}
            own_decoder = bool(value["own_decoder"])
            decode = "reduced" if value["reduced"] else "full"
            (field,) = parse_fields({"png": {"name": value["field"], "role": "image", "decode": decode, **options}})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"input {value!r} is not an image input ({type(error).__name__}: {error})") from error
        return dataclasses.replace(cls.from_field(field), own_decoder=own_decoder)

    def decode(self, payload: bytes) -> np.ndarray:
        """Decodes the bytes of an image file as the evaluation loader does, to uint8 ``[height, width, 3]``.

        Raises:
            SampleError: If it is not a readable image.
        """
        field = Field("png", self.field, "image", self.size, self.mean, self.std, shorter_side=self.shorter_side)
        return decode_image(payload, field.crop, exif=self.exif, reduced=self.reduced)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
