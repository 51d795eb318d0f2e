"""The vote: one all-reduce of control data per step, after which every rank takes the same decision.

* The *payload* is the float64 vector that the ranks sum: overflow flag, loss scale, squared gradient norm, loss sum and
  count, sums and counts of the metrics, and values from the host (stop and save requests, sample counts, bytes).
* An *overflow* is a loss, count, gradient norm or buffer that is not finite. An overflow on one rank makes all ranks *skip*
  the update: no rank changes parameters, optimizer state or buffers.
* The *decision* (skip or not, factor for the gradients) is computed from the summed payload, so it is equal on all ranks.
* The *step statistics* are the summed payload as Python numbers, for logs, schedules and stop requests.
* An *agreement* is the process group that sums the payload; ``CrossRankGradScaler`` uses the same class.

Flags are summed as 0/1, counts as exact integers. The norm, losses and counts of a rank that overflowed are replaced by
zero first, because a sum with a NaN is NaN on all ranks. A MAX reduction would lose the NaN of every rank but the first.

On a GPU the arithmetic stays on the device and the host reads the payload one step later. On a CPU the same arithmetic is
done in Python floats, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan, sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.precision.spike import HostSpikeRule, SpikeOptions, SpikeRule

# The payload: overflow, scale, squared scale, squared norm, loss sum, count; (sum, count) of each metric; stop, save,
# samples, bad samples, bytes, restarts of workers.
_HEAD, _HOST = 6, 6


def payload_bytes(metrics: int) -> int:
    """Size in bytes of the payload of a task with this number of metrics."""
    return 8 * (_HEAD + 2 * metrics + _HOST)


class Decision(NamedTuple):
    """Whether a step is skipped, and how its gradients are rescaled; equal on all ranks. All tensors have shape ``[]``.

    Attributes:
        skip: bool: no rank updates its parameters.
        overflowed: bool: at least one rank has an overflow.
        coefficient: fp32: multiplying the gradients by it gives the gradient of the mean loss, unscaled and clipped.
            Undefined if the step is skipped. None: 1.
        skipped_spike: bool: the step is skipped because of a spike; None unless spikes are skipped.
    """

    skip: Tensor
    overflowed: Tensor
    coefficient: Tensor | None
    skipped_spike: Tensor | None = None


@dataclass(slots=True)  # one per step; a frozen dataclass takes as long to create as everything else in step_stats()
class StepStats:
    """The summed payload of a step as numbers, equal on all ranks.

    Attributes:
        overflowed_ranks: Number of ranks whose loss, count or gradients were not finite.
        grad_norm: Norm of all gradients, still multiplied by the loss scale. Gradients that all ranks share count once.
            NaN if any rank overflowed.
        loss_scale: Loss scale of the gradients.
        loss_sum: Sum of the losses over all valid rows (or tokens), without the ranks that overflowed.
        count: Number of valid rows (or tokens), without the ranks that overflowed.
        metrics: (sum, count) of each metric of the task.
        stop: Number of ranks that request a stop.
        save: Number of ranks that request a checkpoint.
        samples: Number of valid samples.
        bad: Number of samples that were masked because they could not be read.
        bytes: Bytes of the batches that the loaders of all ranks delivered.
        worker_restarts: How many times ranks restarted their loader workers.
        spike: Whether the gradient norm is a spike (``train.spike``).
        skipped_spike: Whether the step is skipped because of that.
    """

    overflowed_ranks: int
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
    worker_restarts: int = 0
    spike: bool = False
    skipped_spike: bool = False

    @property
    def out_of_memory(self) -> bool:
        """Whether a rank could not compute the step: its count is minus infinity."""
        return self.count == -inf

    @property
    def applied(self) -> bool:
        """Whether the step updates the parameters: no rank overflowed, the count is positive, and no spike is skipped."""
        return not (_skips(self.overflowed_ranks, self.count) or self.skipped_spike)


def step_stats(payload: Sequence[float], world_size: int, metrics: Sequence[str]) -> StepStats:
    """Reads a summed payload.

    Args:
        payload: Sum of the payloads of all ranks.
        world_size: Number of ranks.
        metrics: Names of the task's metrics, in the order in which ``Vote.add`` got them.

    Raises:
        ConfigError: If the ranks have different loss scales.
    """
    overflow, scale, scale_squared, square, loss_sum, count = payload[:_HEAD]
    stop, save, samples, bad, nbytes, restarts = payload[-_HOST:]
    if not equal_scales(world_size, scale, scale_squared):
        raise ConfigError(
            f"the loss scales of the {world_size} ranks differ (mean {scale / world_size:g}). "
            "Was the scale or the scaler's state changed on one rank only? Start again from the last checkpoint."
        )
    pairs = payload[_HEAD:-_HOST]
    return StepStats(
        overflowed_ranks=int(overflow),
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
        worker_restarts=int(restarts),
    )


def _skips(overflowed_ranks: Any, count: Any) -> Any:
    """Whether no rank updates its parameters: a bool for numbers, a bool tensor for tensors."""
    # A negative count comes from a wrong task. It would turn the gradients around.
    return (overflowed_ranks > 0) | (count <= 0)


def equal_scales(ranks: int, total: Any, squares: Any) -> Any:
    """Whether all ranks have the same scale: a bool, or a bool tensor of shape ``[]``.

    Args:
        ranks: Number of ranks.
        total: Sum of the ranks' scales: a float, or a tensor of shape ``[]``.
        squares: Sum of the squares of the ranks' scales, likewise.
    """
    # Cauchy-Schwarz: ranks * squares >= total ** 2, and they are equal only if all scales are. 1e-9 is for rounding.
    return ranks * squares <= total * total * (1 + 1e-9)


class Agreement:
    """A process group that sums small control payloads, so that all its ranks take the same decision.

    The group is looked up at each use, because a gradient scaler may be created before the process group.

    Args:
        group: The ranks; None: the default group, or this process alone if there is no group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @property
    def has_own_group(self) -> bool:
        """Whether the group is a different one than the default group."""
        return self._group is not None

    @property
    def size(self) -> int:
        """Number of ranks in the group; -1 if this process is not one of them."""
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self._group)

    def gather(self, value: Any) -> list[Any]:
        """Collective. The picklable values of all ranks. Needs a process group."""
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def sum_payload(self, payload: Tensor) -> None:
        """Collective. Replaces ``payload`` by its sum over the ranks, in place. Needs a process group."""
        group = self._group or dist.group.WORLD
        assert group is not None, "no process group"
        # The method that dist.all_reduce() calls. On gloo the Python around it takes 15 to 20 us of CPU time per step (51
        # against 71 us on 2 ranks, torch 2.13), more than all other arithmetic of the vote.
        group.allreduce([payload]).wait()


def make_vote(device: torch.device, world_size: int, spikes: SpikeOptions | None = None) -> Vote:
    """The vote of ``world_size`` ranks for gradients on ``device``: tensor arithmetic, or Python floats on a CPU."""
    return _HostVote(world_size, spikes) if device.type == "cpu" else Vote(device, world_size, spikes)


class Vote:
    """One rank's side of the vote, with its arithmetic on the device.

    Per step: ``add()`` for each micro-batch, ``overflow()``, ``all_reduce()``, ``decide()``; later ``step_stats()``.

    Args:
        device: Where the gradients are.
        world_size: Number of ranks that vote; above 1 a default process group must exist.
        spikes: Settings for finding spikes of the gradient norm; None: spikes are not looked for.

    Attributes:
        payload: The last summed payload, float64, shape ``[6 + 2 * metrics + 5]``. On a CPU the list ``numbers`` instead.
        spikes: The rule that finds spikes, with its window of norms; None without one.
    """

    def __init__(self, device: torch.device, world_size: int, spikes: SpikeOptions | None = None) -> None:
        self.spikes: SpikeRule | HostSpikeRule | None = SpikeRule(spikes, device) if spikes is not None else None
        self._world_size = world_size
        self._agreement = Agreement()
        self._device = device
        self._sums: Tensor | None = None
        # Page-locked, so that copying it to a GPU does not wait for the GPU.
        self._host = torch.zeros(_HOST, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._host_values = self._host.numpy()
        self._copy = _HostCopy(device)
        self.payload = torch.empty(0)

    def add(self, values: Sequence[Tensor | float]) -> None:
        """Adds the values of a micro-batch to the sums of its accumulation window.

        Args:
            values: Loss sum and count, then sum and count of each metric: numbers, or tensors of shape ``[]``.
        """
        sums = torch.stack([self._number(value) for value in values])
        self._sums = sums if self._sums is None else self._sums + sums

    def drop_window(self) -> None:
        """Drops the sums of the accumulation window."""
        self._sums = None

    def cannot_compute(self, metrics: int) -> None:
        """Replaces the sums of the window after this rank ran out of memory, so that all ranks skip the step.

        Args:
            metrics: Number of metrics of the task.
        """
        self.drop_window()
        self.add([0.0, -inf, *[0.0] * (2 * metrics)])

    def overflow(self, norms: Mapping[int, Tensor]) -> Tensor:
        """Whether a gradient norm, the loss sum or count of the window is not finite on this rank: bool, shape ``[]``."""
        norm = torch.stack([*norms.values()])
        return torch.cat([norm, self._window_sums.narrow(0, 0, 2)]).isfinite().all().logical_not()

    def all_reduce(
        self,
        overflow: Tensor,
        norms: Mapping[int, Tensor],
        scale: Tensor,
        *,
        stop: bool,
        save: bool,
        samples: int,
        bad: int,
        nbytes: int,
        worker_restarts: int = 0,
    ) -> None:
        """Collective. Sums the payloads of all ranks and begins the next accumulation window.

        Args:
            overflow: bool, shape ``[]``: this rank's loss, gradients or buffers are not finite.
            norms: Shape ``[]`` each: norms of this rank's gradients, by the number of ranks that hold the same ones: all ranks
                with DDP, 1 for gradients or parts of gradients that only this rank has.
            scale: Shape ``[]``: this rank's loss scale.
            stop: Whether this rank requests a stop.
            save: Whether this rank requests a checkpoint.
            samples: Valid samples of this rank's window.
            bad: Samples of that window that could not be read.
            nbytes: Bytes of the batches that the loader delivered for it.
            worker_restarts: How many times it restarted its workers.
        """
        self._sum_over_ranks(overflow, norms, scale, (stop, save, samples, bad, nbytes, worker_restarts))

    def _sum_over_ranks(
        self, overflow: Tensor, norms: Mapping[int, Tensor], scale: Tensor, host_values: tuple[int, ...]
    ) -> None:
        self._host_values[:] = host_values
        scale = scale.double()
        head = torch.stack([overflow.double(), scale, scale * scale])
        # Each of the ranks that hold the same gradients contributes a share, so that the sum over ranks counts them once.
        square = sum((norm.double().square() / copies for copies, norm in norms.items()), torch.zeros_like(scale))
        # A value that is not finite would make the sums of all ranks NaN. The flag reports it.
        finite = torch.cat([square.reshape(1), self._window_sums]).masked_fill(overflow, 0)
        self._sums = None
        self.payload = torch.cat([head, finite, self._host.to(self._device, non_blocking=True)])
        if self._world_size > 1:
            self._agreement.sum_payload(self.payload)
        if self.spikes is None:
            self._copy.start(self.payload)

    def decide(self, scale: Tensor, nominal: int, clip_norm: float | None) -> Decision:
        """The decision of all ranks, computed from the summed payload; does not wait for the device.

        Args:
            scale: Shape ``[]``: the loss scale.
            nominal: Number of rows that the loss sums were divided by before the backward.
            clip_norm: Maximum norm of the gradient of the mean loss; None: no clipping.
        """
        overflow, _, _, square, _, count, *_ = self.payload.unbind()
        skip = _skips(overflow, count)
        # The backward took the gradient of scale * loss sum / nominal; wanted is the gradient of loss sum / count. In a skip
        # the count may be 0, and the 1 only avoids an infinity.
        coefficient = nominal / count.masked_fill(skip, 1) / scale
        skipped_spike = None
        if isinstance(self.spikes, SpikeRule):
            spike = self.spikes.is_spike(square.sqrt() * coefficient, ~skip)
            # Known only after the sum, and copied with it, so that the host does not have to wait.
            self._copy.start(torch.cat([self.payload, spike.reshape(1).double()]))
            if self.spikes.options.skips:
                skip, skipped_spike = skip | spike, spike
        if clip_norm is not None:
            # 1e-6 as in torch.nn.utils.clip_grad_norm_.
            coefficient = coefficient * (clip_norm / (square.sqrt() * coefficient + 1e-6)).clamp(max=1)
        return Decision(skip, overflow > 0, coefficient.float(), skipped_spike)

    def step_stats(self, metrics: Sequence[str]) -> StepStats:
        """The summed payload as numbers; waits until it has arrived on the host.

        Raises:
            ConfigError: If the ranks have different loss scales.
        """
        *payload, spike = [*self._copy.wait(), *([0.0] if self.spikes is None else [])]
        return self._with_spike(step_stats(payload, self._world_size, metrics), bool(spike))

    def _with_spike(self, stats: StepStats, spike: bool) -> StepStats:
        if spike and self.spikes is not None:
            stats.spike, stats.skipped_spike = True, self.spikes.options.skips
        return stats

    @property
    def _window_sums(self) -> Tensor:
        assert self._sums is not None, "no micro-batch was added"
        return self._sums

    def _number(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().double()
        # Not torch.tensor(): filling on the device needs no copy from the host.
        return torch.full((), value, dtype=torch.float64, device=self._device)


class _HostCopy:
    """Copies the payload to host memory; waits for the device only when it is read."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._payload: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def start(self, payload: Tensor) -> None:
        if not self._on_cuda:
            self._payload = payload
            return
        if self._payload is None or self._payload.shape != payload.shape:
            self._payload = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True)
            self._copied = torch.cuda.Event()
        self._payload.copy_(payload, non_blocking=True)
        assert self._copied is not None
        self._copied.record()

    def wait(self) -> list[float]:
        assert self._payload is not None
        if self._copied is not None:
            self._copied.synchronize()
        return self._payload.tolist()


class _HostVote(Vote):
    """``Vote`` in Python floats: the same operations in the same order, so the same bits.

    Kept next to the tensor version because reading a CPU tensor is free, while each small tensor operation takes about a
    microsecond: in a world of one a vote takes 8 us instead of 98, and a step of a small MLP 180 us less (torch 2.13).
    """

    def __init__(self, world_size: int, spikes: SpikeOptions | None = None) -> None:
        self.spikes = HostSpikeRule(spikes) if spikes is not None else None
        self._spike = False
        self._world_size = world_size
        self._agreement = Agreement()
        self._bools = (torch.tensor(False), torch.tensor(True))
        self._window: list[float] = []
        self._values = np.empty(0)
        self.numbers: list[float] = []

    def add(self, values: Sequence[Tensor | float]) -> None:
        numbers = [float(value.item() if isinstance(value, Tensor) else value) for value in values]
        self._window = [a + b for a, b in zip(self._window, numbers, strict=True)] if self._window else numbers

    def drop_window(self) -> None:
        self._window = []

    def overflow(self, norms: Mapping[int, Tensor]) -> Tensor:
        loss_sum, count, *_ = self._window
        finite = all(isfinite(norm.item()) for norm in norms.values())
        return self._bools[not (finite and isfinite(loss_sum) and isfinite(count))]

    def _sum_over_ranks(
        self, overflow: Tensor, norms: Mapping[int, Tensor], scale: Tensor, host_values: tuple[int, ...]
    ) -> None:
        overflowed, factor = overflow.item(), scale.item()
        square = 0.0
        for copies, tensor in norms.items():
            norm = tensor.item()
            # Not **, which raises OverflowError where a float64 product becomes infinite.
            square += norm * norm / copies
        sums, self._window = self._window, []
        finite = [0.0] * (1 + len(sums)) if overflowed else [square, *sums]
        numbers = [overflowed, factor, factor * factor, *finite, *host_values]
        if self._world_size == 1:
            self.numbers = list(map(float, numbers))
            return
        if len(self._values) != len(numbers):
            self._values = np.empty(len(numbers))
            self.payload = torch.from_numpy(self._values)  # the same memory
        # A tensor made of the numbers would take three times as long (3.3 against 1.2 us).
        self._values[:] = numbers
        self._agreement.sum_payload(self.payload)
        self.numbers = self._values.tolist()

    def decide(self, scale: Tensor, nominal: int, clip_norm: float | None) -> Decision:
        overflow, _, _, square, _, count, *_ = self.numbers
        skip = _skips(overflow, count)
        coefficient = nominal / (1 if skip else count) / scale.item()
        skipped_spike = None
        if isinstance(self.spikes, HostSpikeRule):
            self._spike = self.spikes.is_spike(sqrt(square) * coefficient, not skip)
            skipped_spike = self._bools[self._spike] if self.spikes.options.skips else None
            skip |= self._spike and self.spikes.options.skips
        if clip_norm is not None:
            coefficient *= min(1.0, clip_norm / (sqrt(square) * coefficient + 1e-6))
        factor = torch.scalar_tensor(coefficient, dtype=torch.float32) if coefficient != 1 else None
        return Decision(self._bools[skip], self._bools[overflow > 0], factor, skipped_spike)

    def step_stats(self, metrics: Sequence[str]) -> StepStats:
        return self._with_spike(step_stats(self.numbers, self._world_size, metrics), self._spike)
