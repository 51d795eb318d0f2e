"""The vote: one small SUM all-reduce a step, after which every rank knows, and decides, the same.

The *word* is a float64 vector. What decides (overflow, count) is 0/1 flags and exact integers, never raw norms or losses:
with MAX a NaN on any rank but the first is lost, and a NaN in a SUM would hide the rest of the word.

On a GPU all arithmetic stays there, and the host reads the word a step later. On a CPU there is nothing to wait for, and the
same arithmetic is done in Python floats (``host_vote``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan, sqrt
from typing import NamedTuple

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


@dataclass(slots=True)  # not frozen, which would take as long as all the rest of reading a word
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


def tally(word: Sequence[float], world_size: int, metrics: Sequence[str]) -> Tally:
    """A summed word as numbers.

    Args:
        word: From the vote of all ranks.
        world_size: How many they are.
        metrics: Names of the task's metrics.

    Raises:
        ConfigError: If the ranks do not have one loss scale.
    """
    overflow, scale, scale_squared, square, loss_sum, count = word[:_HEAD]
    stop, save, samples, bad, nbytes = word[-_HOST:]
    # Cauchy-Schwarz: equality holds only if all scales are equal.
    if abs(world_size * scale_squared / scale**2 - 1) > 1e-9:
        raise ConfigError(
            f"the loss scales of the {world_size} ranks differ (mean {scale / world_size:g}). "
            "Was the scale or the scaler's state changed on one rank only? Start again from the last checkpoint."
        )
    pairs = word[_HEAD:-_HOST]
    return Tally(
        overflow=int(overflow),
        grad_norm=sqrt(square) if not overflow else nan,
        loss_scale=scale / world_size,
        loss_sum=loss_sum,
        count=count,
        metrics=dict(zip(metrics, zip(pairs[::2], pairs[1::2], strict=True), strict=True)),
        stop=int(stop),
        save=int(save),
        samples=int(samples),
        bad=int(bad),
        bytes=nbytes,
    )


def sum_over_ranks(word: Tensor) -> None:
    """Collective, in place."""
    # What dist.all_reduce calls, whose own Python takes as long as packing the word.
    dist.distributed_c10d._get_default_group().allreduce([word]).wait()


class Vote:
    """Adds up, sums, decides and tells; arithmetic on the device.

    Args:
        device: Where gradients are.
        world_size: Ranks that vote.
    """

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._world_size = world_size
        self._device = device
        self._sums: Tensor | None = None
        # Pinned, so that sending it to a GPU does not wait for the GPU.
        self._host = torch.zeros(_HOST, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._host_values = self._host.numpy()
        self._copy = _HostCopy(device)
        self.word = torch.empty(0)

    def add(self, values: Sequence[Tensor | float]) -> None:
        """What a micro-batch brings is added to that of the others of its window.

        Args:
            values: Loss sum and count, then sum and count of each metric: numbers, or tensors of shape ``[]``.
        """
        sums = torch.stack([self._number(value) for value in values])
        self._sums = sums if self._sums is None else self._sums + sums

    def overflow(self, norm: Tensor) -> Tensor:
        """Whether gradient norm, loss sum or count of the window is not finite on this rank: bool, shape ``[]``."""
        return torch.cat([norm.reshape(1), self._window_sums.narrow(0, 0, 2)]).isfinite().all().logical_not()

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
        """Collective. Says what the window was; afterwards ``word`` is what all ranks said, and the next window begins.

        Args:
            overflow: bool, shape ``[]``: this rank's loss or gradients are not finite.
            norm: Shape ``[]``: norm of the gradients that all ranks have alike.
            scale: Shape ``[]``: this rank's loss scale.
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
        readable = torch.cat([square.reshape(1), self._window_sums]).masked_fill(overflow, 0)
        self._sums = None
        self.word = torch.cat([head, readable, self._host.to(self._device, non_blocking=True)])
        if self._world_size > 1:
            sum_over_ranks(self.word)
        self._copy.start(self.word)

    def decide(self, scale: Tensor, nominal: int, clip_norm: float | None) -> Decision:
        """What every rank does with its gradients, from what all have said; on the device.

        Args:
            scale: Shape ``[]``: the loss scale.
            nominal: Rows that the sums of gradients were divided by.
            clip_norm: Largest norm of the gradient of the mean loss; None does not clip.
        """
        overflow, _, _, square, _, count, *_ = self.word.unbind()
        overflowed = overflow > 0
        skip = overflowed | (count == 0)
        coefficient = nominal / count.masked_fill(skip, 1) / scale
        if clip_norm is not None:
            coefficient = coefficient * (clip_norm / (square.sqrt() * coefficient + 1e-6)).clamp(max=1)
        return Decision(skip, overflowed, coefficient.float())

    def tally(self, metrics: Sequence[str]) -> Tally:
        """The word as numbers; waits for it.

        Raises:
            ConfigError: If the ranks do not have one loss scale.
        """
        return tally(self._copy.wait(), self._world_size, metrics)

    @property
    def _window_sums(self) -> Tensor:
        assert self._sums is not None, "no micro-batch was added"
        return self._sums

    def _number(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().double()
        return torch.full((), value, dtype=torch.float64, device=self._device)


class _HostCopy:
    """The word on its way to the host: copied without waiting, waited for when it is read."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._word: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def start(self, word: Tensor) -> None:
        if not self._on_cuda:
            self._word = word
            return
        if self._word is None or self._word.shape != word.shape:
            self._word = torch.empty(word.shape, dtype=word.dtype, pin_memory=True)
            self._copied = torch.cuda.Event()
        self._word.copy_(word, non_blocking=True)
        assert self._copied is not None
        self._copied.record()

    def wait(self) -> list[float]:
        assert self._word is not None
        if self._copied is not None:
            self._copied.synchronize()
        return self._word.tolist()
