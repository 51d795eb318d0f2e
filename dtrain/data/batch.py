"""A micro-batch: the fields of its rows, which rows are real, and who they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dtrain.data.fields import NoSuchField
from dtrain.data.wire import Wire


class Batch(dict[str, Any]):
    """A micro-batch of one rank; ``batch[name]`` is a tensor ``[rows, ...]`` or, for text and bytes, a list.

    Attributes:
        sample_keys: ``<shard>/<key>`` of each row; ``""`` where the row is masked.
        valid: bool, shape ``[rows]``; false for rows that only fill up a short batch or whose sample was bad.
        bad: A line for each bad sample of this micro-batch: its key, epoch, shard, offset and reason.
        wire: What ``to`` still has to do; None once it has been done.
        wire_bytes: Bytes of the tensors as the worker handed them over.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        sample_keys: list[str],
        valid: Tensor,
        bad: Sequence[dict[str, Any]] = (),
        wire: Wire | None = None,
        wire_bytes: int | None = None,
    ) -> None:
        super().__init__(columns)
        self.sample_keys = sample_keys
        self.valid = valid
        self.bad = list(bad)
        self.wire = wire
        if wire_bytes is None:
            wire_bytes = sum(column.nbytes for column in self.values() if isinstance(column, Tensor))
        self.wire_bytes = wire_bytes

    def __missing__(self, name: str) -> Any:
        raise NoSuchField(
            f"the batch has no field {name!r}, but {', '.join(map(repr, self)) or 'none at all'}. Give one this name in "
            "data.fields (such as data.fields.jpg.name), or tell the task which one to use."
        )

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """The batch on ``device``.

        Images arrive as uint8 ``[rows, height, width, 3]`` and become ``[rows, 3, height, width]``, in channels_last
        layout unless the loader was told otherwise: scaled to [0, 1], normalised with the field's mean and standard
        deviation in fp32, then cast to the compute dtype. Every other field keeps its dtype.
        """
        return self.copied(device, non_blocking).arrived()

    def copied(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """The first half of ``to``: what was on the wire, on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def arrived(self) -> Batch:
        """The second half of ``to``, in place, where the batch is."""
        wire, self.wire = self.wire, None
        if wire is not None:
            for name, column in self.items():
                if isinstance(column, Tensor):
                    self[name] = wire.arrive(name, column)
        return self

    def __copy__(self) -> Batch:
        return Batch(self, self.sample_keys, self.valid, self.bad, self.wire, self.wire_bytes)

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
        return Batch(columns, self.sample_keys, function(self.valid), self.bad, self.wire, self.wire_bytes)
