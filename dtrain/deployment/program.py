"""The program of an artefact: from rows as the loader hands them over to outputs in fp32.

What a trainer does around the model is part of it: images are normalised in fp32 and cast last, other floats are cast.
So the same rows go into every format, and none needs the training code to prepare them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.data.wire import normalised
from dtrain.deployment.image_input import ImageInput


class Program(nn.Module):
    """A model with what comes before and after it.

    Args:
        model: In eval mode, its weights cast.
        image: What goes in; None where that is no image.
        dtype: What floats are cast to before they go into the model.
        channels_last: Layout in which images reach the model; contiguous if not.
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
        """The model's outputs, fp32.

        Args:
            rows: uint8 ``[rows, height, width, 3]`` for an image model, else the model's argument itself.

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
                f"{type(self.model).__name__} returns {type(outputs).__name__}. An artefact's outputs are one tensor: export a "
                "model whose forward returns the one that is wanted."
            )
        return outputs.float()


@dataclass(frozen=True)
class RowSpec:
    """What rows a traced program takes.

    Attributes:
        dtype: Name of a torch dtype, such as ``uint8``.
        shape: Of one row; any number of rows may come.
    """

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, rows: Tensor) -> RowSpec:
        """That of given rows."""
        return cls(str(rows.dtype).removeprefix("torch."), tuple(rows.shape[1:]))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RowSpec:
        """What ``vars`` of a specification gave.

        Raises:
            ValueError: If it is something else.
        """
        try:
            spec = cls(str(value["dtype"]), tuple(int(length) for length in value["shape"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"rows {value!r} say no dtype and shape ({type(error).__name__}: {error})") from error
        if not isinstance(getattr(torch, spec.dtype, None), torch.dtype):
            raise ValueError(f"rows: {spec.dtype!r} is no dtype of torch")
        return spec

    def __str__(self) -> str:
        return f"{self.dtype} {['rows', *self.shape]}".replace("'", "")

    def checked(self, rows: Tensor) -> Tensor:
        """The rows, floats in the dtype of the specification.

        Raises:
            ConfigError: If they are not what the program takes. Compiled code does not look: it would compute nonsense.
        """
        dtype: torch.dtype = getattr(torch, self.dtype)
        if rows.is_floating_point() and dtype.is_floating_point:
            rows = rows.to(dtype)
        if rows.dtype != dtype or tuple(rows.shape[1:]) != self.shape:
            raise ConfigError(
                f"the artefact takes {self}, got {str(rows.dtype).removeprefix('torch.')} {list(rows.shape)}. Bring the rows "
                "into this form, or export the model for that one."
            )
        return rows
