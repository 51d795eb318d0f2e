"""What travels from a worker to the device, field by field.

* On the *wire* (worker to trainer) images are uint8 ``[rows, height, width, 3]``; features have the compute dtype, cast
  in the worker before collation, since collation writes straight into shared memory; everything else keeps its type.
* On *arrival* images become ``[rows, 3, height, width]`` in channels_last layout: normalised in fp32, cast last.
  Normalising in bf16 instead loses two grey levels and shifts the mean.

The precision policy names the dtypes; here they meet the fields.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dtrain.data.fields import Field
from dtrain.precision.policy import Precision

ON_OVERFLOW = ("error", "clamp", "fp32")


class Wire:
    """The dtypes of a run's fields.

    Args:
        fields: The declared fields.
        precision: The run's precision.
        mode: ``"auto"`` follows the precision; ``"fp32"`` sends features in fp32.
        on_overflow: A feature that fp16 cannot hold: ``"error"``, ``"clamp"`` to its range, or ``"fp32"`` (features
            then always travel in fp32, so that a batch's dtype does not depend on its content).

    Raises:
        ValueError: If ``mode`` or ``on_overflow`` is unknown.
    """

    def __init__(
        self, fields: Sequence[Field], precision: Precision, mode: str = "auto", on_overflow: str = "error"
    ) -> None:
        if mode not in ("auto", "fp32"):
            raise ValueError(f"data.wire: got {mode!r}, want auto or fp32.")
        if on_overflow not in ON_OVERFLOW:
            raise ValueError(f"data.on_overflow: got {on_overflow!r}, want one of {', '.join(ON_OVERFLOW)}.")
        self._fields = {field.name: field for field in fields}
        self._compute_dtype = precision.compute_dtype
        self._clamp = on_overflow == "clamp"
        self._dtypes = {field.name: precision.wire_dtype(field.role) if field.role else None for field in fields}
        fits = self._compute_dtype != torch.float16 or on_overflow != "fp32"
        if mode == "fp32" or not fits:
            for name, field in self._fields.items():
                if field.role == "feature":
                    self._dtypes[name] = torch.float32

    def describe(self) -> str:
        """``image uint8, label as stored``: a line for the banner."""
        return ", ".join(
            f"{name} {str(dtype).removeprefix('torch.') if dtype else 'as stored'}"
            for name, dtype in self._dtypes.items()
        )

    def dtype(self, name: str, array: np.ndarray) -> torch.dtype:
        """The wire dtype of a numeric field: its role's for floats, else the one it has."""
        own = torch.from_numpy(array).dtype
        wanted = self._dtypes[name]
        return wanted if wanted is not None and (own.is_floating_point or wanted == torch.uint8) else own

    def cast(self, name: str, key: str, array: np.ndarray, out: Tensor) -> None:
        """Writes ``array`` into ``out``, a row of the wire dtype.

        Raises:
            ValueError: If a finite value is outside the range of an fp16 wire and ``on_overflow`` is ``"error"``;
                names sample, field and value.
        """
        source = torch.from_numpy(array)
        if out.dtype == torch.float16 and source.dtype in (torch.float32, torch.float64) and source.numel():
            # Checked on the source: a look for infinities in the fp16 result costs ten times as much.
            limit = torch.finfo(torch.float16).max
            low, high = (float(value) for value in torch.aminmax(source))
            if low < -limit or high > limit:
                if not self._clamp:
                    raise ValueError(
                        f"sample {key!r}: field {name!r} holds {high if high > limit else low:g}, outside fp16's range "
                        f"of +-{limit:g}. Set data.on_overflow=fp32 to send features in fp32, =clamp to clip them, or "
                        "scale the field when packing."
                    )
                source = source.clamp(-limit, limit)
        out.copy_(source)

    def arrive(self, name: str, tensor: Tensor) -> Tensor:
        """A field as the model wants it, on the device that ``tensor`` is on."""
        field = self._fields[name]
        if field.role != "image":
            return tensor
        mean = torch.tensor(field.mean, device=tensor.device) * 255
        std = torch.tensor(field.std, device=tensor.device) * 255
        # [rows, height, width, 3] seen as [rows, 3, height, width] is channels_last already.
        pixels = tensor.permute(0, 3, 1, 2).to(torch.float32)
        return pixels.sub_(mean.view(3, 1, 1)).div_(std.view(3, 1, 1)).to(self._compute_dtype)
