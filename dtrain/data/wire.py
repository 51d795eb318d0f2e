"""What travels from a worker to the device, field by field.

* On the *wire* (worker to trainer) images are uint8 ``[rows, height, width, 3]``; features have the compute dtype, cast
  in the worker before collation, since collation writes straight into shared memory; everything else keeps its type.
* On *arrival* images become ``[rows, 3, height, width]``, by default in channels_last layout: normalised in fp32, cast last.
  Normalising in bf16 instead loses two grey levels and shifts the mean.

The precision policy names the dtypes; here they meet the fields.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dtrain.data.fields import DataError, Field
from dtrain.precision.policy import Precision

ON_OVERFLOW = ("error", "clamp", "fp32")
# Labels are whole numbers; floats under that role are something else.
_UNDECLARED = (None, "label")
_WORTH_A_LINE = 256  # bytes a sample


class Wire:
    """The dtypes of a run's fields.

    Args:
        fields: The declared fields.
        precision: The run's precision.
        mode: ``"auto"`` follows the precision; ``"fp32"`` sends features in fp32.
        on_overflow: A feature that fp16 cannot hold: ``"error"``, ``"clamp"`` to its range, or ``"fp32"`` (features
            then always travel in fp32, so that a batch's dtype does not depend on its content).
        channels_last: Images arrive in this layout; contiguous if not.

    Raises:
        ValueError: If ``mode`` or ``on_overflow`` is unknown.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        precision: Precision,
        mode: str = "auto",
        on_overflow: str = "error",
        channels_last: bool = True,
    ) -> None:
        if mode not in ("auto", "fp32"):
            raise ValueError(f"data.wire: got {mode!r}, want auto or fp32.")
        if on_overflow not in ON_OVERFLOW:
            raise ValueError(f"data.on_overflow: got {on_overflow!r}, want one of {', '.join(ON_OVERFLOW)}.")
        self._fields = {field.name: field for field in fields}
        self._compute_dtype = precision.compute_dtype
        self._clamp = on_overflow == "clamp"
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        fits = self._compute_dtype != torch.float16 or on_overflow != "fp32"
        self._feature_dtype = self._compute_dtype if mode == "auto" and fits else torch.float32
        self._dtypes = {field.name: precision.wire_dtype(field.role) if field.role else None for field in fields}
        self._dtypes |= {field.name: self._feature_dtype for field in fields if field.role == "feature"}

    def describe(self) -> str:
        """``image uint8, label as stored``: a line for the banner."""
        return ", ".join(f"{name} {_name(dtype) if dtype else 'as stored'}" for name, dtype in self._dtypes.items())

    def suggestions(self, batch: Mapping[str, Any]) -> list[str]:
        """Fields that may travel in more bytes than need be because nobody said what they are: a line for each.

        Args:
            batch: As it travels or as it arrived.
        """
        lines = []
        for name, field in self._fields.items():
            column = batch[name]
            if field.role not in _UNDECLARED or not isinstance(column, Tensor) or not column.is_floating_point():
                continue
            saved = math.prod(column.shape[1:]) * (column.dtype.itemsize - self._feature_dtype.itemsize)
            if saved >= _WORTH_A_LINE:
                lines.append(
                    f"field {name!r} travels as {_name(column.dtype)} {list(column.shape[1:])}, for it has "
                    f"{f'role {field.role}' if field.role else 'no role'}. If it is an input of the model, "
                    f"data.fields.{field.ext}.role=feature sends {_name(self._feature_dtype)}: {saved:,} bytes a sample less. "
                    "If it must stay exact, role coord, target or weight says so."
                )
        return lines

    def dtype(self, name: str, own: torch.dtype) -> torch.dtype:
        """The wire dtype of a field's values of dtype ``own``: its role's for floats, else ``own``."""
        wanted = self._dtypes[name]
        return wanted if wanted is not None and own.is_floating_point else own

    def cast(self, name: str, key: str, source: Tensor, out: Tensor) -> None:
        """Writes a value of sample ``key`` into ``out``, a row of the wire dtype and of the same shape.

        Raises:
            DataError: If a finite value is outside the range of the wire dtype and ``on_overflow`` is not ``"clamp"``;
                names sample, field and value.
        """
        # From fp32 to bf16 only the last 0.4 % of the range is lost, too little to look at every value.
        if source.dtype != out.dtype and (out.dtype == torch.float16 or source.dtype == torch.float64):
            source = self._within_range(name, key, source, out.dtype)
        out.copy_(source)

    def arrive(self, name: str, tensor: Tensor) -> Tensor:
        """A field as the model wants it, on the device that ``tensor`` is on."""
        field = self._fields[name]
        if field.role != "image":
            return tensor
        mean, std = _grey_levels(field.mean, tensor.device), _grey_levels(field.std, tensor.device)
        return normalised(tensor, mean, std, self._compute_dtype).contiguous(memory_format=self._layout)

    def _within_range(self, name: str, key: str, source: Tensor, dtype: torch.dtype) -> Tensor:
        # Looked for in the source: to find the infinities that a cast has made costs ten times as much.
        limit = torch.finfo(dtype).max
        low, high = (value.item() for value in torch.aminmax(source)) if source.numel() else (0, 0)
        if -limit <= low and high <= limit:
            return source
        # Not a number, infinite, or too large: only the last is lost in the cast.
        finite = source[source.isfinite()]
        worst = finite[finite.abs().argmax()].item() if finite.numel() else 0
        if abs(worst) <= limit:
            return source
        if self._clamp:
            return torch.where(source.isfinite(), source.clamp(-limit, limit), source)
        raise DataError(
            f"sample {key!r}: field {name!r} holds {worst:g}, outside the range of {_name(dtype)}, +-{limit:g}. Set "
            "data.on_overflow=fp32 to send features in fp32, =clamp to clip them, or scale the field when packing."
        )


def normalised(pixels: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
    """Images as a model takes them.

    Args:
        pixels: uint8, ``[rows, height, width, 3]``.
        mean: Per channel on the scale of pixels, fp32, ``[3, 1, 1]``.
        std: Per channel on the scale of pixels, fp32, ``[3, 1, 1]``.
        dtype: What they are cast to once they are normalised in fp32.

    Returns:
        ``[rows, 3, height, width]`` in channels_last layout.
    """
    # [rows, height, width, 3] seen as [rows, 3, height, width] is channels_last already.
    return pixels.permute(0, 3, 1, 2).to(torch.float32).sub_(mean).div_(std).to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=64)
def _grey_levels(values: tuple[float, float, float], device: torch.device) -> Tensor:
    """Three channels' values on the scale of pixels, fp32, shape ``[3, 1, 1]``; kept, for a copy stalls the host."""
    with torch.inference_mode(False):  # whoever asks first may be an evaluation
        return torch.tensor([255 * value for value in values], device=device).view(3, 1, 1)
