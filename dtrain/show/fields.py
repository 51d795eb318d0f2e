"""What each field costs: its stored dtype, the dtype in which workers send it, bytes of a sample, and the range of its values.

All numbers are of the rows that were read. The range is that of the values as workers send them: an image is uint8, and is
normalised on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.data import Batch
from dtrain.data.fields.field import Field
from dtrain.show.split import Split


@dataclass(frozen=True)
class FieldFacts:
    """A column of the batches.

    Attributes:
        role: Role of the field, ``mask`` of a mask, or "" where it has none.
        dtype: Dtype or type of the stored values; "" if unknown.
        transfer_dtype: Dtype in which a worker sends them; ``list`` for objects.
        shape: Shape of a row as it is sent; () for a number or an object.
        bytes_per_sample: Bytes of a row as it is sent; None for objects.
        range: Smallest and largest finite value; None for objects.
        mean: Mean of the finite values; None likewise.
        std: Their standard deviation; None likewise.
        not_finite: How many values are infinite or NaN.
    """

    role: str
    dtype: str
    transfer_dtype: str
    shape: tuple[int, ...]
    bytes_per_sample: int | None
    range: tuple[float, float] | None
    mean: float | None
    std: float | None
    not_finite: int

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {**self.__dict__, "shape": list(self.shape), "range": None if self.range is None else list(self.range)}


def describe_fields(split: Split, stored: Sequence[Mapping[str, Any]]) -> dict[str, FieldFacts]:
    """The facts of each column of the batches that a split has read.

    Args:
        split: The split, after ``rows``.
        stored: Stored values of some of its samples.
    """
    fields = {field.name: field for field in split.loader.source.fields}
    masks = {field.columns[1]: field for field in fields.values() if field.columns[1:]}
    first: dict[str, Any] = {}
    for values in stored:
        first = {**values, **first}
    names = dict.fromkeys(name for batch in split.batches for name in batch)
    return {name: _facts(name, fields.get(name), name in masks, first, split.batches) for name in names}


def suggestions(split: Split) -> list[str]:
    """One line for each field that a different role would make smaller in transfer."""
    return split.loader.transfer.suggestions(split.batches[0]) if split.batches else []


def _facts(
    name: str, field: Field | None, is_mask: bool, stored: Mapping[str, Any], batches: Sequence[Batch]
) -> FieldFacts:
    role = "mask" if is_mask else (field.role or "") if field is not None else ""
    dtype = _dtype(stored[name]) if name in stored else ""
    columns = [batch[name] for batch in batches]
    if not isinstance(columns[0], Tensor):
        return FieldFacts(role, dtype, "list", (), None, None, None, None, 0)
    count = total = squares = 0.0
    low, high, not_finite = math.inf, -math.inf, 0
    for batch, column in zip(batches, columns, strict=True):
        values = column.to(torch.float64)[batch.valid].reshape(-1)
        finite = values[values.isfinite()]
        not_finite += len(values) - len(finite)
        if len(finite):
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            count, total = count + len(finite), total + float(finite.sum())
            squares += float(finite.square().sum())
    mean = total / count if count else None
    std = math.sqrt(max(0.0, squares / count - mean**2)) if mean is not None else None
    sent = columns[0]
    return FieldFacts(
        role,
        dtype,
        str(sent.dtype).removeprefix("torch."),
        tuple(sent.shape[1:]),
        math.prod(sent.shape[1:]) * sent.dtype.itemsize,
        (low, high) if count else None,
        mean,
        std,
        not_finite,
    )


def _dtype(value: Any) -> str:
    if isinstance(value, (np.ndarray, np.generic, Tensor)):
        return str(value.dtype).removeprefix("torch.")
    return {"str": "text", "dict": "json", "list": "json"}.get(type(value).__name__, type(value).__name__)
