"""A micro-batch: the fields of its rows, which rows are real, and who they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Batch(dict[str, Any]):
    """A micro-batch of one rank; ``batch[name]`` is a tensor ``[rows, ...]`` or, for text and bytes, a list.

    Attributes:
        sample_keys: ``<shard>/<key>`` of each row; ``""`` where the row is masked.
        valid: bool, shape ``[rows]``; false for rows that only fill up a short batch or whose sample was bad.
        bad: A line for each bad sample of this micro-batch: shard, key, offset and reason.
    """

    sample_keys: list[str]
    valid: Tensor
    bad: list[dict[str, Any]]

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """The batch on ``device``.

        Images arrive as uint8 ``[rows, height, width, 3]`` and become ``[rows, 3, height, width]`` in channels_last
        layout: scaled to [0, 1], normalised with the field's mean and standard deviation in fp32, then cast to the
        compute dtype. Every other field keeps its dtype.
        """
        raise NotImplementedError

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; called by torch's DataLoader."""
        raise NotImplementedError
