"""The vote for gradients on a CPU, where looking at a value is free: in Python floats, a tenth of the price of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt

import numpy as np
import torch
from torch import Tensor

from dtrain.precision.vote import Decision, Tally, sum_over_ranks, tally


class HostVote:
    """As ``Vote``, with the same arithmetic in the same order: bit for bit what the tensors of a GPU would say.

    Args:
        world_size: Ranks that vote.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._flags = (torch.tensor(False), torch.tensor(True))
        self._sums: list[float] = []
        self.word: list[float] = []

    def add(self, values: Sequence[Tensor | float]) -> None:
        """As ``Vote.add``."""
        numbers = [float(value.item() if isinstance(value, Tensor) else value) for value in values]
        self._sums = [a + b for a, b in zip(self._sums, numbers, strict=True)] if self._sums else numbers

    def overflow(self, norm: Tensor) -> Tensor:
        """As ``Vote.overflow``."""
        loss_sum, count, *_ = self._sums
        return self._flags[not (isfinite(norm.item()) and isfinite(loss_sum) and isfinite(count))]

    def cast(
        self,
        overflow: Tensor,
        norm: Tensor,
        scale: Tensor,
        *,
        stop: bool,
        save: bool,
        samples: int,
        bad: int,
        nbytes: int,
        own_norm: Tensor | None = None,
    ) -> None:
        """Collective. As ``Vote.cast``."""
        overflowed, factor = overflow.item(), scale.item()
        shared, own = norm.item(), own_norm.item() if own_norm is not None else 0.0
        square = shared * shared / self._world_size + own * own  # ** would raise where a float64 overflows
        sums, self._sums = self._sums, []
        readable = [0.0] * (1 + len(sums)) if overflowed else [square, *sums]
        said = [overflowed, factor, factor * factor, *readable, stop, save, samples, bad, nbytes]
        self.word = list(map(float, said)) if self._world_size == 1 else _summed(said)

    def decide(self, scale: Tensor, nominal: int, clip_norm: float | None) -> Decision:
        """As ``Vote.decide``."""
        overflow, _, _, square, _, count, *_ = self.word
        overflowed = overflow > 0
        skip = overflowed or count == 0
        coefficient = nominal / (1 if skip else count) / scale.item()
        if clip_norm is not None:
            coefficient *= min(1.0, clip_norm / (sqrt(square) * coefficient + 1e-6))
        factor = torch.scalar_tensor(coefficient, dtype=torch.float32) if coefficient != 1 else None
        return Decision(self._flags[skip], self._flags[overflowed], factor)

    def tally(self, metrics: Sequence[str]) -> Tally:
        """As ``Vote.tally``."""
        return tally(self.word, self._world_size, metrics)


def _summed(said: list[float]) -> list[float]:
    word = torch.from_numpy(np.array(said, dtype=np.float64))  # torch.tensor takes three times as long
    sum_over_ranks(word)
    return word.tolist()
