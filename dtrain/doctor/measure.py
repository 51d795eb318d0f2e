"""Duration of a loader's samples, of an optimizer step and of an all-reduce.

* All ranks run the same number of steps, which follows from the slowest rank's first steps.
* Variants of a step that are compared are timed alternately, because the speed of a machine varies within seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from dtrain.console import Finding
from dtrain.distributed.collectives import wait_for_all
from dtrain.distributed.world import World

if TYPE_CHECKING:  # `doctor` without a config must work where training cannot be imported
    from dtrain.data import Batch, ShardLoader
    from dtrain.training.step import TrainStep

#: Floats and bytes of the control all-reduce of a step (the vote).
VOTE_FLOATS = 8
VOTE_BYTES = 4 * VOTE_FLOATS
#: Bytes of the first bucket of gradients in DDP, and of the others.
BUCKETS_BYTES = (2**20, 25 * 2**20)

_WAITING_BELOW = 0.5
_ROUNDS, _MAX_STEPS = 4, 500
_SLOW_VOTE = 1e-3
_VOTES, _BUCKETS, _WARM_UP = 200, 10, 5


# -- the loader


@dataclass(frozen=True)
class LoaderRate:
    """Speed of the loader of one rank.

    Attributes:
        seconds: Seconds for each sample.
        busy: Fraction of the time in which workers computed, in [0, 1]; in the remaining time they waited for storage or in the
            dataset. Time in which other programs had the cores does not count. None on a system without /proc/PID/schedstat.
        bad: Number of samples that could not be read.
    """

    seconds: float
    busy: float | None
    bad: int

    @property
    def waiting(self) -> bool:
        """Whether workers spend most of the time waiting."""
        return self.busy is not None and self.busy < _WAITING_BELOW


def endless_batches(loader: ShardLoader) -> Iterator[Batch]:
    """The micro-batches of a rank in the order of training, over all epochs."""
    while True:
        epoch, _ = loader.position
        batches = iter(loader)
        while loader.position[0] == epoch:
            for _ in range(loader.micro_batches_per_step):
                yield next(batches)
            loader.commit()


def loader_rate(loader: ShardLoader, batches: Iterator[Batch], seconds: float) -> LoaderRate:
    """Takes micro-batches as fast as the loader makes them.

    Args:
        loader: The loader.
        batches: ``endless_batches(loader)``, with no batch prefetched.
        seconds: Duration of the measurement; it is longer if the workers need more time for two micro-batches each.
    """
    workers = max(loader.num_workers, 1)
    for _ in range(workers):  # the first batch of each worker is not timed: the worker opens files and fills caches
        next(batches)
    count, samples_before = 0, loader.samples_received
    pids = [child.pid or 0 for child in multiprocessing.active_children()] if loader.num_workers else [os.getpid()]
    times, started = _scheduled(pids), time.perf_counter()
    while count < workers or time.perf_counter() - started < seconds:
        next(batches)
        count += 1
    duration = time.perf_counter() - started
    busy = _busy(times, _scheduled(pids), len(pids) * duration)
    # Per sample, because the last micro-batches of an epoch have fewer samples.
    return LoaderRate(duration / max(loader.samples_received - samples_before, 1), busy, loader.bad_samples)


def _scheduled(pids: Sequence[int]) -> tuple[float, float] | None:
    """Seconds in which the processes computed, and in which they were ready but had no core; None if they are not known."""
    computed = delayed = 0
    try:
        for pid in pids:
            # Linux, Documentation/scheduler/sched-stats.rst: nanoseconds; zeros where the kernel was built without them.
            times = Path(f"/proc/{pid}/schedstat").read_text().split()
            computed, delayed = computed + int(times[0]), delayed + int(times[1])
    except (OSError, ValueError, IndexError):
        return None
    return (computed / 1e9, delayed / 1e9) if computed else None


def _busy(before: tuple[float, float] | None, after: tuple[float, float] | None, seconds: float) -> float | None:
    """The fraction of ``seconds`` in which processes computed, without the time that other programs took from them."""
    if before is None or after is None:
        return None
    computed, delayed = after[0] - before[0], after[1] - before[1]
    return min(1.0, computed / max(seconds - delayed, computed)) if computed else 0.0


# -- the step


@dataclass(frozen=True)
class Timed:
    """A step to time.

    Attributes:
        step: The step.
        window: Returns the micro-batches of one accumulation window, on the device.
        micro_batches: Number of micro-batches in the window.
        warm_up: Number of first steps that are not timed: they build buckets, load kernels, compile, or start workers.
    """

    step: TrainStep
    window: Callable[[], Iterable[Batch]]
    micro_batches: int
    warm_up: int

    def run(self, steps: int, device: torch.device) -> float:
        """Collective. Runs steps; returns the seconds of one step on this rank."""
        wait_for_all()
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(steps):
            self.step.accumulate(self.window(), self.micro_batches)
            self.step.settle()  # the result of the previous step, as in the training loop
            self.step.apply()
        self.step.settle()
        _synchronize(device)
        return (time.perf_counter() - started) / steps


def seconds_per_step(variants: Sequence[Timed], world: World, seconds: float) -> list[list[float]]:
    """Collective. Times variants of a step alternately.

    Args:
        variants: The steps to time.
        world: All ranks, also for a step that runs without communication.
        seconds: Approximate duration for each variant; it takes longer if a step does.

    Returns:
        For each variant the seconds of a step on each rank, medians over the rounds.
    """
    estimates = []
    for variant in variants:
        first = max(gather_values(variant.run(1, world.device), world))
        if variant.warm_up > 1 and first < seconds:
            variant.run(variant.warm_up - 1, world.device)
        estimates.append(max(gather_values(variant.run(1, world.device), world)))
    rounds = _ROUNDS if max(estimates) * _ROUNDS <= 2 * seconds else 1
    steps = [min(max(int(seconds / rounds / one), 1), _MAX_STEPS) for one in estimates]
    durations = [
        [variant.run(number, world.device) for variant, number in zip(variants, steps, strict=True)]
        for _ in range(rounds)
    ]
    return [gather_values(float(median), world) for median in np.median(durations, axis=0)]


def gather_values(value: float, world: World) -> list[float]:
    """Collective. The value of every rank."""
    values = [0.0] * world.size
    dist.all_gather_object(values, value)
    return values


# -- the all-reduce


@dataclass(frozen=True)
class AllReduce:
    """Speed of all-reduce between the ranks.

    Attributes:
        size: Number of ranks.
        seconds: Bytes of a tensor to the seconds of one all-reduce on the slowest rank.
    """

    size: int
    seconds: dict[int, float]

    @classmethod
    def measure(cls, world: World) -> AllReduce:
        """Collective. Times all-reduces of the sizes of a vote and of DDP's gradient buckets."""
        votes = {VOTE_BYTES: _median_seconds(VOTE_BYTES, _VOTES, world.device)}
        buckets = {nbytes: _median_seconds(nbytes, _BUCKETS, world.device) for nbytes in BUCKETS_BYTES}
        return cls(world.size, votes | buckets)

    def estimate(self, nbytes: int) -> float:
        """Estimated seconds for ``nbytes``: linear between measured sizes, and in proportion to the largest above it."""
        sizes = sorted(self.seconds)
        if nbytes > sizes[-1]:
            return nbytes / sizes[-1] * self.seconds[sizes[-1]]
        return float(np.interp(nbytes, sizes, [self.seconds[size] for size in sizes]))

    def findings(self) -> list[Finding]:
        """Latency of a small all-reduce and bandwidth of large ones.

        The bandwidth is the bus bandwidth of nccl-tests: bytes per second times 2 (n - 1) / n, comparable between numbers of
        ranks n.
        """
        latency = self.seconds[VOTE_BYTES]
        vote = f"{VOTE_FLOATS} floats in {latency * 1e6:,.0f} microseconds (median of {_VOTES}, slowest rank)"
        slow = latency > _SLOW_VOTE
        remedy = (
            "Every step waits for one such all-reduce. Start fewer processes than cores, and check the network interface "
            "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
        )
        buckets = [
            f"{nbytes / 2**20:g} MiB in {self.seconds[nbytes] * 1e3:,.1f} ms, {self._bandwidth(nbytes) / 1e9:,.2f} GB/s"
            for nbytes in BUCKETS_BYTES
        ]
        return [
            Finding("all-reduce latency", vote, "warning" if slow else "ok", remedy if slow else ""),
            Finding(
                "all-reduce bandwidth",
                f"{'; '.join(buckets)} on the bus: the fp32 gradients of 100 million parameters take "
                f"{self.estimate(400_000_000) * 1e3:,.0f} ms without overlap",
            ),
        ]

    def _bandwidth(self, nbytes: int) -> float:
        return nbytes / self.seconds[nbytes] * 2 * (self.size - 1) / self.size


def _median_seconds(nbytes: int, times: int, device: torch.device) -> float:
    """Median seconds of one all-reduce on the slowest rank; the same value on every rank."""
    tensor = torch.zeros(nbytes // 4, device=device)
    for _ in range(_WARM_UP):
        dist.all_reduce(tensor)
    durations = []
    for _ in range(times):
        _synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        _synchronize(device)
        durations.append(time.perf_counter() - start)
    median = torch.tensor([float(np.median(durations))], device=device)
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return float(median)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
