"""The vote: one small SUM all-reduce a step, after which every rank knows, and decides, the same.

The *word* is a float64 vector. What decides (overflow, count) is 0/1 flags and exact integers, never raw norms or losses:
with MAX a NaN on any rank but the first is lost, and a NaN in a SUM would hide the rest of the word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.config.errors import ConfigError

# Computed on the device, in this order, then the task's metrics, then what only the host knows.
_DEVICE = ("overflow", "norm", "scale", "scale_squared", "loss_sum", "count")
_HOST = ("stop", "save", "samples", "bad", "bytes")


@dataclass(frozen=True)
class Tally:
    """A step's vote as numbers, equal on all ranks.

    Attributes:
        overflow: Ranks whose loss or gradients were not finite.
        grad_norm: Norm of the gradients that this rank would step with, averaged over the ranks; still multiplied by
            the loss scale. NaN if any rank overflowed.
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
    """Packs, sums and unpacks the word.

    Args:
        device: Where gradients are.
        world_size: Ranks that vote.
    """

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._world_size = world_size
        self._device = device
        # Pinned, so that sending it to a GPU does not wait for the GPU.
        self._host = torch.zeros(len(_HOST), dtype=torch.float64, pin_memory=device.type == "cuda")
        self._host_values = self._host.numpy()

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
    ) -> Tensor:
        """Collective. The word, summed over all ranks, on the device.

        Args:
            overflow: bool, shape ``[]``: this rank's loss or gradients are not finite.
            norm: Shape ``[]``: this rank's gradient norm.
            scale: Shape ``[]``: this rank's loss scale.
            sums: float64, shape ``[2 + 2 * metrics]``: loss sum and count, then those of each metric.
            stop: This rank was asked to stop.
            save: This rank wants a checkpoint.
            samples: Valid samples of this rank's window.
            bad: Its bad samples.
            nbytes: Its bytes on the wire.
        """
        self._host_values[:] = (stop, save, samples, bad, nbytes)
        scale = scale.double()
        head = torch.stack([overflow.double(), norm.double(), scale, scale * scale])
        readable = torch.cat([head[1:2], sums]).masked_fill(overflow, 0)
        word = torch.cat(
            [head[:1], readable[:1], head[2:], readable[1:], self._host.to(self._device, non_blocking=True)]
        )
        if self._world_size > 1:
            dist.all_reduce(word)
        return word

    def decision(self, word: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the step depends on, on the device and equal on all ranks.

        Returns:
            Whether some rank overflowed (bool), the gradient norm, and the count of valid rows (or tokens) of all ranks
            (float64), each of shape ``[]``.
        """
        overflow, norm, _, _, _, count, *_ = word.unbind()
        return overflow > 0, norm / self._world_size, count

    def tally(self, word: Sequence[float], metrics: Sequence[str]) -> Tally:
        """The word as numbers.

        Raises:
            ConfigError: If the ranks do not have one loss scale.
        """
        named = dict(zip(_DEVICE, word, strict=False))
        host = dict(zip(_HOST, word[-len(_HOST) :], strict=True))
        # Cauchy-Schwarz: equality holds only if all scales are equal.
        if abs(self._world_size * named["scale_squared"] / named["scale"] ** 2 - 1) > 1e-9:
            raise ConfigError(
                f"the loss scales of the {self._world_size} ranks differ (mean {named['scale'] / self._world_size:g}). "
                "Was the scale or the scaler's state changed on one rank only? Start again from the last checkpoint."
            )
        pairs = word[len(_DEVICE) : -len(_HOST)]
        return Tally(
            overflow=int(named["overflow"]),
            grad_norm=named["norm"] / self._world_size if not named["overflow"] else float("nan"),
            loss_scale=named["scale"] / self._world_size,
            loss_sum=named["loss_sum"],
            count=named["count"],
            metrics={name: (pairs[2 * i], pairs[2 * i + 1]) for i, name in enumerate(metrics)},
            stop=int(host["stop"]),
            save=int(host["save"]),
            samples=int(host["samples"]),
            bad=int(host["bad"]),
            bytes=host["bytes"],
        )
