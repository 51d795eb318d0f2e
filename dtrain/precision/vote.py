"""The vote: one small SUM all-reduce a step, after which every rank knows, and decides, the same.

The *word* is a float64 vector. What decides (overflow, count) is 0/1 flags and exact integers, never raw norms or losses:
with MAX a NaN on any rank but the first is lost, and a NaN in a SUM would hide the rest of the word.

On a GPU all arithmetic stays there. On a CPU a Python float costs a tenth of a tensor of one number, so the same
arithmetic is done in floats (``HostVote``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan, sqrt
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.config.errors import ConfigError

# The word: overflow, scale, its square, norm, loss sum, count; sum and count of each metric; what only the host knows.
_HEAD, _HOST = 6, 5


def word_bytes(metrics: int) -> int:
    """Size of the word, with so many metrics of the task."""
    return 8 * (_HEAD + 2 * metrics + _HOST)


class Decision(NamedTuple):
    """What a step depends on: on the device, equal on all ranks, each of shape ``[]``.

    Attributes:
        skip: bool: no rank moves its parameters.
        overflowed: bool: some rank's loss or gradients were not finite.
        coefficient: fp32: multiplied with the gradients it gives those of the mean loss, unscaled and clipped; without
            meaning in a skip. None if it is known to be 1.
    """

    skip: Tensor
    overflowed: Tensor
    coefficient: Tensor | None


@dataclass(frozen=True)
class Tally:
    """A step's vote as numbers, equal on all ranks.

    Attributes:
        overflow: Ranks whose loss or gradients were not finite.
        grad_norm: Norm of all gradients, those that the ranks share counted once; still multiplied by the loss scale. NaN
            if any rank overflowed.
        loss_scale: The scale that the gradients carry.
        loss_sum: Sum of the losses over all valid rows (or tokens); without the ranks that overflowed.
        count: Valid rows (or tokens).
        metrics: (sum, count) of each of the task's metrics.
        stop: Ranks that ask for a stop.
        save: Ranks that ask for a checkpoint.
        samples: Valid samples.
        bad: Samples masked because they could not be read.
        bytes: What the loaders handed over.
    """

    overflow: int
    grad_norm: float
    loss_scale: float
    loss_sum: float
    count: float
    metrics: dict[str, tuple[float, float]]
    stop: int
    save: int
    samples: int
    bad: int
    bytes: float

    @property
    def applied(self) -> bool:
        """Whether the step moves the parameters: no rank overflowed, and there was something to learn from."""
        return self.overflow == 0 and self.count > 0


class Vote:
    """Packs, sums and unpacks the word; arithmetic on the device.

    Args:
        device: Where gradients are.
        world_size: Ranks that vote.
    """

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._world_size = world_size
        self._device = device
        # Pinned, so that sending it to a GPU does not wait for the GPU.
        self._host = torch.zeros(_HOST, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._host_values = self._host.numpy()

    def sums(self, values: Sequence[Tensor | float]) -> Tensor:
        """What a micro-batch brings, ready to be added to that of others: float64, shape ``[2 + 2 * metrics]``.

        Args:
            values: Loss sum and count, then sum and count of each metric: numbers, or tensors of shape ``[]``.
        """
        return torch.stack([self._number(value) for value in values])

    def overflow(self, norm: Tensor, sums: Tensor) -> Tensor:
        """Whether gradient norm, loss sum or count is not finite on this rank: bool, shape ``[]``."""
        return torch.cat([norm.reshape(1), sums.narrow(0, 0, 2)]).isfinite().all().logical_not()

    def cast(
        self,
        overflow: Tensor,
        norm: Tensor,
        scale: Tensor,
        sums: Tensor,
        *,
        stop: bool,
        save: bool,
        samples: int,
        bad: int,
        nbytes: int,
        own_norm: Tensor | None = None,
    ) -> Tensor:
        """Collective. The word, summed over all ranks: float64, on the device.

        Args:
            overflow: bool, shape ``[]``: this rank's loss or gradients are not finite.
            norm: Shape ``[]``: norm of the gradients that all ranks have alike.
            scale: Shape ``[]``: this rank's loss scale.
            sums: float64, shape ``[2 + 2 * metrics]``: loss sum and count, then those of each metric.
            stop: This rank was asked to stop.
            save: This rank wants a checkpoint.
            samples: Valid samples of this rank's window.
            bad: Its bad samples.
            nbytes: Its bytes on the wire.
            own_norm: Shape ``[]``: norm of the gradients that only this rank has; None if there are none.
        """
        self._host_values[:] = (stop, save, samples, bad, nbytes)
        scale = scale.double()
        head = torch.stack([overflow.double(), scale, scale * scale])
        square = norm.double().square() / self._world_size
        if own_norm is not None:
            square = square + own_norm.double().square()
        readable = torch.cat([square.reshape(1), sums]).masked_fill(overflow, 0)
        return self._summed(torch.cat([head, readable, self._host.to(self._device, non_blocking=True)]))

    def decision(self, word: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the step depends on, on the device and equal on all ranks.

        Returns:
            Whether some rank overflowed (bool), the gradient norm, and the count of valid rows (or tokens) of all ranks
            (float64), each of shape ``[]``.
        """
        overflow, _, _, square, _, count, *_ = word.unbind()
        return overflow > 0, square.sqrt(), count

    def decide(self, word: Tensor, scale: Tensor, nominal: int, clip_norm: float | None) -> Decision:
        """What every rank does with its gradients, from what all have said.

        Args:
            word: From ``cast``.
            scale: Shape ``[]``: the loss scale.
            nominal: Rows that the sums of gradients were divided by.
            clip_norm: Largest norm of the gradient of the mean loss; None does not clip.
        """
        overflowed, norm, count = self.decision(word)
        skip = overflowed | (count == 0)
        coefficient = nominal / count.masked_fill(skip, 1) / scale
        if clip_norm is not None:
            coefficient = coefficient * (clip_norm / (norm * coefficient + 1e-6)).clamp(max=1)
        return Decision(skip, overflowed, coefficient.float())

    def tally(self, word: Sequence[float], metrics: Sequence[str]) -> Tally:
        """The word as numbers.

        Raises:
            ConfigError: If the ranks do not have one loss scale.
        """
        overflow, scale, scale_squared, square, loss_sum, count = word[:_HEAD]
        stop, save, samples, bad, nbytes = word[-_HOST:]
        # Cauchy-Schwarz: equality holds only if all scales are equal.
        if abs(self._world_size * scale_squared / scale**2 - 1) > 1e-9:
            raise ConfigError(
                f"the loss scales of the {self._world_size} ranks differ (mean {scale / self._world_size:g}). "
                "Was the scale or the scaler's state changed on one rank only? Start again from the last checkpoint."
            )
        pairs = word[_HEAD:-_HOST]
        return Tally(
            overflow=int(overflow),
            grad_norm=sqrt(square) if not overflow else nan,
            loss_scale=scale / self._world_size,
            loss_sum=loss_sum,
            count=count,
            metrics={name: (pairs[2 * i], pairs[2 * i + 1]) for i, name in enumerate(metrics)},
            stop=int(stop),
            save=int(save),
            samples=int(samples),
            bad=int(bad),
            bytes=nbytes,
        )

    def _number(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().double()
        return torch.full((), value, dtype=torch.float64, device=self._device)

    def _summed(self, word: Tensor) -> Tensor:
        if self._world_size > 1:
            # What dist.all_reduce calls, whose own Python takes as long as packing the word.
            dist.distributed_c10d._get_default_group().allreduce([word]).wait()
        return word


class HostVote(Vote):
    """The same for gradients on the CPU, in Python floats: float64 like the word, and looking at a value is free."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        super().__init__(device, world_size)
        self._flags = (torch.tensor(False), torch.tensor(True))

    def sums(self, values: Sequence[Tensor | float]) -> Tensor:
        """As ``Vote.sums``."""
        numbers = [value.item() if isinstance(value, Tensor) else value for value in values]
        return _float64(numbers)

    def overflow(self, norm: Tensor, sums: Tensor) -> Tensor:
        """As ``Vote.overflow``."""
        loss_sum, count, *_ = sums.tolist()
        return self._flags[not (isfinite(norm.item()) and isfinite(loss_sum) and isfinite(count))]

    def cast(
        self,
        overflow: Tensor,
        norm: Tensor,
        scale: Tensor,
        sums: Tensor,
        *,
        stop: bool,
        save: bool,
        samples: int,
        bad: int,
        nbytes: int,
        own_norm: Tensor | None = None,
    ) -> Tensor:
        """Collective. As ``Vote.cast``."""
        overflowed, factor = bool(overflow), scale.item()
        shared, own = norm.item(), own_norm.item() if own_norm is not None else 0.0
        square = shared * shared / self._world_size + own * own  # ** would raise where a float64 overflows
        readable = [0.0] * (1 + len(sums)) if overflowed else [square, *sums.tolist()]
        word = [overflowed, factor, factor * factor, *readable, stop, save, samples, bad, nbytes]
        return self._summed(_float64(word))

    def decide(self, word: Tensor, scale: Tensor, nominal: int, clip_norm: float | None) -> Decision:
        """As ``Vote.decide``."""
        overflow, _, _, square, _, count, *_ = word.tolist()
        overflowed = overflow > 0
        skip = overflowed or count == 0
        coefficient = nominal / (1 if skip else count) / scale.item()
        if clip_norm is not None:
            coefficient *= min(1.0, clip_norm / (sqrt(square) * coefficient + 1e-6))
        factor = torch.scalar_tensor(coefficient, dtype=torch.float32) if coefficient != 1 else None
        return Decision(self._flags[skip], self._flags[overflowed], factor)


def _float64(numbers: Sequence[float]) -> Tensor:
    # By way of numpy: torch.tensor takes three times as long for a dozen numbers.
    return torch.from_numpy(np.array(numbers, dtype=np.float64))
