"""A micro-batch: its fields, and how they get from a worker to the device.

* The *transfer dtype* of a field is its dtype between worker and device. Images are transferred as uint8 ``[rows,
  height, width, 3]``; features in the compute dtype, cast in the worker, so that collation writes the cast values
  directly into shared memory; everything else keeps the dtype it is stored in.
* *Arrival* (``arrived``) is the conversion on the device: images become ``[rows, 3, height, width]`` (channels_last by
  default), normalised in fp32 and cast last. Normalising in bf16 instead would lose two grey levels and shift the mean.
* *Device copies* run on a CUDA stream of their own, so that they overlap with compute.

The precision policy chooses the dtypes; this module applies them to the fields.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from dtrain.data.fields import DataError, Field, NoSuchField
from dtrain.precision.policy import Precision

ON_OVERFLOW = ("error", "clamp", "fp32")
# No role, or a role that the extension may imply: labels are integers, so floats under that role are undeclared.
_UNDECLARED = (None, "label")
_MIN_SAVING = 256  # bytes per sample that are worth a suggestion


class Batch(dict[str, Any]):
    """A micro-batch of one rank; ``batch[name]`` is a tensor ``[rows, ...]`` or, for text and bytes, a list.

    Attributes:
        sample_keys: ``<shard>/<key>`` of each row; ``""`` where the row is masked.
        valid: bool, shape ``[rows]``; false for rows that pad a short batch and for rows of bad samples.
        bad: One record for each bad sample of this micro-batch: its key, epoch, shard, offset and reason.
        transfer: The transfer dtypes, from which ``to`` converts; None after that.
        transfer_bytes: Bytes of the tensors that the worker sent.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        sample_keys: list[str],
        valid: Tensor,
        bad: Sequence[dict[str, Any]] = (),
        transfer: Transfer | None = None,
        transfer_bytes: int | None = None,
    ) -> None:
        super().__init__(columns)
        self.sample_keys = sample_keys
        self.valid = valid
        self.bad = list(bad)
        self.transfer = transfer
        if transfer_bytes is None:
            transfer_bytes = sum(column.nbytes for column in self.values() if isinstance(column, Tensor))
        self.transfer_bytes = transfer_bytes

    def __missing__(self, name: str) -> Any:
        raise NoSuchField(
            f"the batch has no field {name!r}; it has {', '.join(map(repr, self)) or 'none'}. Give a field this name in "
            "data.fields (such as data.fields.jpg.name), or configure the task to use another field."
        )

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """The batch on ``device``.

        Images arrive as uint8 ``[rows, height, width, 3]`` and become ``[rows, 3, height, width]``, in channels_last
        memory format unless the loader was built without it: scaled to [0, 1], normalised with the field's mean and
        standard deviation in fp32, then cast to the compute dtype. Video, uint8 ``[rows, frames, 3, height, width]``, keeps
        its shape and is normalised in the same way. Every other field keeps its dtype.
        """
        return self.copied(device, non_blocking).arrived()

    def copied(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """The first half of ``to``: the tensors in their transfer dtypes, on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def arrived(self) -> Batch:
        """The second half of ``to``, in place and on the current device: images are normalised and cast."""
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            for name, column in self.items():
                if isinstance(column, Tensor):
                    self[name] = transfer.arrive(name, column)
        return self

    def __copy__(self) -> Batch:
        return Batch(self, self.sample_keys, self.valid, self.bad, self.transfer, self.transfer_bytes)

    def clone(self) -> Batch:
        """A copy that shares no tensor with this one."""
        return self._map(torch.clone)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the batch, ``valid`` included."""
        yield from (column for column in self.values() if isinstance(column, Tensor))
        yield self.valid

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; called by torch's DataLoader."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        columns = {name: function(column) if isinstance(column, Tensor) else column for name, column in self.items()}
        return Batch(columns, self.sample_keys, function(self.valid), self.bad, self.transfer, self.transfer_bytes)


class Transfer:
    """The transfer dtypes of a run's fields.

    Args:
        fields: The declared fields.
        precision: The run's precision.
        mode: ``"auto"`` sends features in the compute dtype, ``"fp32"`` in fp32.
        on_overflow: Handling of a feature outside the range of fp16: ``"error"``, ``"clamp"`` to the range, or
            ``"fp32"`` (features are then always sent in fp32, so that a batch's dtype does not depend on its content).
        channels_last: Memory format of images on the device; contiguous if false.

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
            raise ValueError(f"data.transfer: got {mode!r}, want auto or fp32.")
        if on_overflow not in ON_OVERFLOW:
            raise ValueError(f"data.on_overflow: got {on_overflow!r}, want one of {', '.join(ON_OVERFLOW)}.")
        self._fields = {field.name: field for field in fields}
        self._compute_dtype = precision.compute_dtype
        self._clamp = on_overflow == "clamp"
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        fits = self._compute_dtype != torch.float16 or on_overflow != "fp32"
        self._feature_dtype = self._compute_dtype if mode == "auto" and fits else torch.float32
        self._dtypes = {field.name: precision.transfer_dtype(field.role) if field.role else None for field in fields}
        self._dtypes |= {field.name: self._feature_dtype for field in fields if field.role in ("feature", "audio")}

    def describe(self) -> str:
        """``image uint8, label as stored``: a line for the banner."""
        return ", ".join(f"{name} {_name(dtype) if dtype else 'as stored'}" for name, dtype in self._dtypes.items())

    def suggestions(self, batch: Mapping[str, Any]) -> list[str]:
        """One line for each float field without a declared role that would be smaller in transfer as a feature."""
        lines = []
        for name, field in self._fields.items():
            column = batch[name]
            if field.role not in _UNDECLARED or not isinstance(column, Tensor) or not column.is_floating_point():
                continue
            saved = math.prod(column.shape[1:]) * (column.dtype.itemsize - self._feature_dtype.itemsize)
            if saved >= _MIN_SAVING:
                lines.append(
                    f"field {name!r} is transferred as {_name(column.dtype)} {list(column.shape[1:])}, because it has "
                    f"{f'role {field.role}' if field.role else 'no role'}. If it is an input of the model, set "
                    f"data.fields.{field.ext}.role=feature to transfer {_name(self._feature_dtype)}: {saved:,} bytes per "
                    "sample less. If its values must stay exact, declare the role coord, target or weight."
                )
        return lines

    def dtype(self, name: str, own: torch.dtype) -> torch.dtype:
        """The transfer dtype of a field whose values have dtype ``own``: that of its role for floats, else ``own``."""
        wanted = self._dtypes[name]
        return wanted if wanted is not None and own.is_floating_point else own

    def cast(self, name: str, key: str, source: Tensor, out: Tensor) -> None:
        """Writes a value of sample ``key`` into ``out``, a row of the same shape in the transfer dtype.

        Raises:
            DataError: If a finite value is outside the range of the transfer dtype and is not clamped; names it.
        """
        # bf16 has nearly the range of fp32 (only the last 0.4 % is lost), so checking every value would cost more than
        # it finds.
        if source.dtype != out.dtype and (out.dtype == torch.float16 or source.dtype == torch.float64):
            source = self._within_range(name, key, source, out.dtype)
        out.copy_(source)

    def arrive(self, name: str, tensor: Tensor) -> Tensor:
        """A field as the model receives it, on the device of ``tensor``."""
        field = self._fields.get(name)  # None for the mask of a text
        if field is None or field.role not in ("image", "video"):
            return tensor
        mean, std = _grey_levels(field.mean, tensor.device), _grey_levels(field.std, tensor.device)
        if field.role == "video":
            return tensor.to(torch.float32).sub_(mean).div_(std).to(self._compute_dtype)
        return normalised(tensor, mean, std, self._compute_dtype).contiguous(memory_format=self._layout)

    def _within_range(self, name: str, key: str, source: Tensor, dtype: torch.dtype) -> Tensor:
        # Checks the source, because finding infinities in the result of the cast takes ten times as long.
        limit = torch.finfo(dtype).max
        low, high = (value.item() for value in torch.aminmax(source)) if source.numel() else (0, 0)
        if -limit <= low and high <= limit:
            return source
        # nan, inf or too large: only a finite value that is too large is lost in the cast.
        finite = source[source.isfinite()]
        worst = finite[finite.abs().argmax()].item() if finite.numel() else 0
        if abs(worst) <= limit:
            return source
        if self._clamp:
            return torch.where(source.isfinite(), source.clamp(-limit, limit), source)
        raise DataError(
            f"sample {key!r}: field {name!r} holds {worst:g}, outside the range of {_name(dtype)}, +-{limit:g}. Set "
            "data.on_overflow=fp32 to transfer features in fp32, or =clamp to clip them, or scale the field when packing."
        )


def normalised(pixels: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
    """Normalises images for a model.

    Args:
        pixels: uint8, ``[rows, height, width, 3]``.
        mean: Mean of each channel on the scale 0 to 255, fp32, ``[3, 1, 1]``.
        std: Standard deviation of each channel on the scale 0 to 255, fp32, ``[3, 1, 1]``.
        dtype: Dtype of the result; normalisation itself is in fp32.

    Returns:
        ``[rows, 3, height, width]`` in channels_last memory format.
    """
    # [rows, height, width, 3] with permuted axes is channels_last already: nothing is copied.
    return pixels.permute(0, 3, 1, 2).to(torch.float32).sub_(mean).div_(std).to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=64)
def _grey_levels(values: tuple[float, float, float], device: torch.device) -> Tensor:
    """One value per channel, scaled to 0 to 255, fp32, shape ``[3, 1, 1]``; cached, because a copy to a GPU blocks the host."""
    with torch.inference_mode(False):  # else a tensor cached in an evaluation could not be used in training
        return torch.tensor([255 * value for value in values], device=device).view(3, 1, 1)


class DeviceCopies:
    """``batch.to(device)``, with the copy on a CUDA stream of its own; on a CPU nothing is copied.

    A copy that is queued on the compute stream waits for all kernels before it. On its own stream it starts at once,
    while the GPU still computes the previous step. That requires page-locked memory (``ShardLoader(pin_memory=True)``)
    and two things that torch does not do by itself:

    * The compute stream waits for the copy.
    * ``Tensor.record_stream`` registers the compute stream's use of the copy with torch's allocator; else the next copy
      could overwrite memory that a kernel still reads. For the page-locked source torch does this itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> Batch:
        """The batch on the device, ready for use on the current stream; see ``Batch.to``."""
        if self._stream is None:
            return copy(batch).arrived()  # the tensors are on the device already
        with torch.cuda.stream(self._stream):
            copied = batch.copied(self._device)
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._stream)
        for tensor in copied.tensors():
            tensor.record_stream(compute)
        # Normalisation is a kernel, so it runs on the compute stream.
        return copied.arrived()
