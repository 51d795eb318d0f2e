"""A micro-batch: its fields, and how they get from a worker to the device.

* The *transfer dtype* of a field is its dtype between worker and device. Images are transferred as uint8 ``[rows,
  height, width, 3]``; features in the compute dtype, cast in the worker, so that collation writes the cast values
  directly into shared memory; everything else keeps the dtype it is stored in.
* *Arrival* (``arrived``) is the conversion on the device: images become ``[rows, 3, height, width]`` (channels_last by
  default), normalised in fp32 and cast last. Normalising in bf16 instead would lose two grey levels and shift the mean.
* *Device copies* run on their own CUDA stream, so that they overlap with compute.

The precision policy chooses the dtypes; this module applies them to the fields.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.data.fields.field import DataError, Field, NoSuchField
from dtrain.data.order.index import Index
from dtrain.precision.policy import Precision

ON_OVERFLOW = ("error", "clamp", "fp32")
# No role, or a role that the extension may imply: labels are integers, so floats under that role are undeclared.
_UNDECLARED = (None, "label")
_MIN_SAVING = 256  # bytes per sample that are worth a suggestion
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Batch(dict[str, Any]):
    """A micro-batch of one rank; ``batch[name]`` is a tensor ``[rows, ...]`` or, for text and bytes, a list.

    Attributes:
        rows: Which sample is in each row; the constructor also accepts a list of their keys.
        valid: bool, shape ``[rows]``; false for rows that pad a short batch and for rows of bad samples.
        bad: One record for each bad sample of this micro-batch: its key, epoch, shard, offset and reason.
        transfer: The transfer dtypes, which ``to`` needs to convert the fields; None once they are converted.
        transfer_bytes: Bytes of the tensors that the worker sent.
        sources: Names of the sources of a mixture in training, in the order of their numbers in ``batch["source"]``; else ().

    Raises:
        NoSuchField: From ``batch[name]``, if the batch has no such field; names those that it has.

    Example:
        >>> import torch
        >>> from dtrain.data import Batch
        >>> batch = Batch({"x": torch.ones(3, 2)}, ["a", "b", ""], valid=torch.tensor([True, True, False]))
        >>> batch.num_valid, batch.valid_rows()["x"].shape
        (2, torch.Size([2, 2]))
    """

    sources: Sequence[str] = ()

    def __init__(
        self,
        columns: Mapping[str, Any],
        rows: Rows | list[str],
        valid: Tensor,
        bad: Sequence[dict[str, Any]] = (),
        transfer: Transfer | None = None,
        transfer_bytes: int | None = None,
    ) -> None:
        super().__init__(columns)
        self.rows = rows if isinstance(rows, Rows) else Rows(rows)
        self.valid = valid
        self.bad = list(bad)
        self.transfer = transfer
        if transfer_bytes is None:
            transfer_bytes = sum(column.nbytes for column in self.values() if isinstance(column, Tensor))
        self.transfer_bytes = transfer_bytes
        # The copy of ``valid`` on a device, its version, and its true rows, as the host knew them when it was copied.
        self._known: tuple[Tensor, int, list[int]] | None = None

    @property
    def sample_keys(self) -> list[str]:
        """``<shard>/<key>`` of each row; ``""`` where the row is masked."""
        return self.rows.keys

    @property
    def num_valid(self) -> int:
        """The number of valid rows, without waiting for the device."""
        return self.rows.num_valid

    def __missing__(self, name: str) -> Any:
        raise NoSuchField(
            f"the batch has no field {name!r}; it has {', '.join(map(repr, self)) or 'none'}. Give a field this name in "
            "data.fields (such as data.fields.jpg.name), or configure the task to use a different field."
        )

    def valid_for(self, *names: str) -> Tensor:
        """Which rows are valid and come from a source that has all of these fields: bool, shape ``[rows]``.

        Only the sources of a mixture with ``missing="mask"`` can lack fields; the batch then has a column ``has_<field>``.
        """
        valid = self.valid
        if "source" in self:
            for name in names:
                if f"has_{name}" in self:
                    valid = valid & self[f"has_{name}"]
        return valid

    def by_source(self, losses: Tensor, counts: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        """The loss of each source as metrics of a task: ``loss/<source>`` to (sum, count).

        Empty unless the batch is from a mixture in training.

        Args:
            losses: Sum of the losses of each row, shape ``[rows]``; rows where ``valid`` is false are left out.
            counts: How many losses (for example, of tokens) each sum has, shape ``[rows]``; None: one for each valid row.
        """
        if not self.sources:
            return {}
        valid = self.valid
        mine = (self["source"] == torch.arange(len(self.sources), device=valid.device).unsqueeze(1)) & valid
        sums = torch.where(mine, losses.detach(), 0).sum(dim=1).unbind()
        numbers = (mine if counts is None else mine * counts).sum(dim=1).unbind()
        return {f"loss/{name}": pair for name, *pair in zip(self.sources, sums, numbers, strict=True)}  # type: ignore[misc]

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
        batch = self.mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        if not self.valid.is_cuda and batch.valid.is_cuda and not batch.valid.is_inference():
            batch._known = batch.valid, batch.valid._version, self.kept_rows()
        return batch

    def arrived(self) -> Batch:
        """The second half of ``to``, in place and on the current device: images are normalised and cast."""
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            for name, column in self.items():
                if isinstance(column, Tensor):
                    self[name] = transfer.arrive(name, column)
        return self

    def __copy__(self) -> Batch:
        return self._with(self, self.valid)

    def clone(self) -> Batch:
        """A copy that shares no tensor with this one."""
        return self.mapped(torch.clone)

    def kept_rows(self) -> list[int]:
        """The rows where ``valid`` is true. On a GPU the host waits only if ``valid`` was changed there."""
        if self._known is not None:
            known, version, kept = self._known
            if known is self.valid and known._version == version:
                return kept
        return [row for row, valid in enumerate(self.valid.tolist()) if valid]

    def other_columns(self) -> list[str]:
        """Names of columns that do not have one entry per row, such as a number that a hook adds."""
        rows = len(self.valid)
        return [
            name
            for name, column in self.items()
            if not (
                column.shape[:1] == (rows,)
                if isinstance(column, Tensor)
                else isinstance(column, list) and len(column) == rows
            )
        ]

    def valid_rows(self) -> Batch:
        """The batch without its masked rows; ``other_columns`` is empty. The host waits only as in ``kept_rows``."""
        return self.chosen(self.kept_rows())

    def chosen(self, rows: Sequence[int]) -> Batch:
        """A batch of the given rows, which may repeat; ``other_columns`` is empty."""
        index = torch.tensor(rows, dtype=torch.int64).to(self.valid.device, non_blocking=True)
        columns = {
            name: rows_of(column, index) if isinstance(column, Tensor) else [column[row] for row in rows]
            for name, column in self.items()
        }
        batch = self._with(columns, self.valid[index])
        batch.rows = self.rows.chosen(rows)
        return batch

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the batch, ``valid`` included."""
        yield from (column for column in self.values() if isinstance(column, Tensor))
        yield self.valid

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory."""
        return self.mapped(lambda tensor: tensor.pin_memory())

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """A batch with ``function`` applied to each tensor."""
        columns = {name: function(column) if isinstance(column, Tensor) else column for name, column in self.items()}
        return self._with(columns, function(self.valid))

    def _with(self, columns: Mapping[str, Any], valid: Tensor) -> Batch:
        batch = Batch(columns, self.rows, valid, self.bad, self.transfer, self.transfer_bytes)
        batch.sources = self.sources
        return batch


def rows_of(column: Tensor, index: Tensor) -> Tensor:
    """``column[index]``; torch 2.9 cannot index uint16, uint32 and uint64 on a CPU."""
    signed = _SIGNED.get(column.dtype)
    return column[index] if signed is None else column.view(signed)[index].view(column.dtype)


class Rows:
    """The samples of a batch's rows.

    Building and sending strings is slow, and most keys are never read. So a worker sends the numbers of the samples, and
    the keys are built when they are first read.

    Args:
        samples: The number of each row's sample, int64, shape ``[rows]``, -1 where the row is masked; or its key, ``""``
            where the row is masked.
        index: Has the keys of numbered samples; None in a batch on its way from a worker, whose loader sets the attribute.
    """

    def __init__(self, samples: np.ndarray | list[str], index: Index | None = None) -> None:
        self._samples = samples
        self.index = index

    @property
    def keys(self) -> list[str]:
        """The key of each row; ``""`` where the row is masked."""
        samples = self._samples
        if isinstance(samples, np.ndarray):
            assert self.index is not None
            keys = iter(self.index.keys(samples[samples >= 0]))
            samples = self._samples = [next(keys) if sample >= 0 else "" for sample in samples.tolist()]
        return samples

    @functools.cached_property
    def num_valid(self) -> int:
        """The number of rows that are not masked."""
        samples = self._samples
        if isinstance(samples, np.ndarray):
            return int(np.count_nonzero(samples >= 0))
        return len(samples) - samples.count("")

    def chosen(self, rows: Sequence[int]) -> Rows:
        """These rows alone."""
        samples = self._samples
        return Rows(samples[rows] if isinstance(samples, np.ndarray) else [samples[row] for row in rows], self.index)

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self._samples if self.index is None else self.keys,)

    def without_index(self) -> Rows:
        """The rows as a worker sends them: without the index, from which the loader makes the keys."""
        return Rows(self._samples)


@dataclass(frozen=True)
class TransferOptions:
    """How the values of a batch travel from a worker to the device.

    Args:
        features: dtype of features: ``"auto"`` is the compute dtype, ``"fp32"`` is fp32.
        on_overflow: Handling of a feature outside the range of fp16: ``"error"``, ``"clamp"`` to the range, or
            ``"fp32"`` (features are then always sent in fp32, so that a batch's dtype does not depend on its content).
        channels_last: Memory format of images on the device; contiguous if false.

    Raises:
        ValueError: If ``features`` or ``on_overflow`` is unknown.

    Example:
        >>> import numpy as np
        >>> from dtrain.data import ShardLoader, TransferOptions
        >>> arrays, fields = {"x": np.ones((4, 2), np.float32)}, {"x": {"name": "x", "role": "feature"}}
        >>> options = {"precision": "bf16", "transfer": TransferOptions(features="fp32")}
        >>> loader = ShardLoader.over(arrays, fields, global_batch_size=2, num_workers=0, **options)
        >>> next(loader.epoch(0))["x"].dtype
        torch.float32
    """

    features: str = "auto"
    on_overflow: str = "error"
    channels_last: bool = True

    def __post_init__(self) -> None:
        if self.features not in ("auto", "fp32"):
            raise ValueError(f"data.transfer: got {self.features!r}, want auto or fp32.")
        if self.on_overflow not in ON_OVERFLOW:
            raise ValueError(f"data.on_overflow: got {self.on_overflow!r}, want one of {', '.join(ON_OVERFLOW)}.")


class Transfer:
    """The transfer dtypes of a run's fields.

    Args:
        fields: The declared fields.
        precision: The run's precision.
        options: Settings that do not follow from the fields and the precision; None: the defaults.
    """

    def __init__(self, fields: Sequence[Field], precision: Precision, options: TransferOptions | None = None) -> None:
        options = options or TransferOptions()
        self._fields = {field.name: field for field in fields}
        self._compute_dtype = precision.compute_dtype
        self._clamp = options.on_overflow == "clamp"
        self._layout = torch.channels_last if options.channels_last else torch.contiguous_format
        fits = self._compute_dtype != torch.float16 or options.on_overflow != "fp32"
        self._feature_dtype = self._compute_dtype if options.features == "auto" and fits else torch.float32
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
        """The transfer dtype of a field whose values have dtype ``own``: the dtype of its role for floats, else ``own``."""
        wanted = self._dtypes[name]
        return wanted if wanted is not None and own.is_floating_point else own

    def cast(self, name: str, key: Callable[[], str], source: Tensor, out: Tensor) -> None:
        """Writes a value of sample ``key()`` into ``out``, a row of the same shape in the transfer dtype.

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

    def _within_range(self, name: str, key: Callable[[], str], source: Tensor, dtype: torch.dtype) -> Tensor:
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
        helps = dtype == torch.float16 and abs(worst) <= torch.finfo(torch.float32).max
        wider = "data.on_overflow=fp32 to transfer features in fp32, or " if helps else ""
        raise DataError(
            f"sample {key()!r}: field {name!r} holds {worst:g}, outside the range of {_name(dtype)}, +-{limit:g}. Set {wider}"
            "data.on_overflow=clamp to clip them, or scale the field when packing."
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


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for training and all evaluations of a process: torch's allocator keeps the memory of each stream apart."""
    return torch.cuda.Stream(device)


class DeviceCopies:
    """``batch.to(device)``, with the copy on a separate CUDA stream; on a CPU nothing is copied.

    A copy that is queued on the compute stream waits for all kernels before it. On a separate stream it starts at once,
    while the GPU still computes the previous step. That requires page-locked memory (``WorkerOptions(pin_memory=True)``)
    and two things that torch does not do by itself:

    * The compute stream waits for the copy.
    * ``Tensor.record_stream`` registers the compute stream's use of the copy with torch's allocator; else the next copy
      could overwrite memory that a kernel still reads. For the page-locked source torch does this itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _copy_stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> Batch:
        """The batch on the device, ready for use on the current stream; see ``Batch.to``."""
        if self._stream is None:
            return batch._with(batch, batch.valid).arrived()  # the tensors are on the device already
        with torch.cuda.stream(self._stream):
            copied = batch.copied(self._device)
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._stream)
        for tensor in copied.tensors():
            tensor.record_stream(compute)
        # Normalisation is a kernel, so it runs on the compute stream.
        return copied.arrived()
