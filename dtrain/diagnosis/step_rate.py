"""How long an optimizer step takes: the trainer's own step, on whatever micro-batches it is given.

* All ranks do the same number of steps, which they agree on after a few, so that none waits for another in the end.
* What is to be compared takes turns, because a machine is not equally fast from one second to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from dtrain.data import Batch
from dtrain.distributed.collectives import wait_for_all
from dtrain.distributed.world import World
from dtrain.training.step import TrainStep

_TURNS, _MOST_STEPS = 4, 500


@dataclass(frozen=True)
class Timed:
    """Steps to time.

    Attributes:
        step: Does them.
        window: Gives the micro-batches of a step, on the device.
        micro_batches: How many they are.
        warm_up: Steps before, which lay out buckets, load kernels and compile, or start workers.
    """

    step: TrainStep
    window: Callable[[], Iterable[Batch]]
    micro_batches: int
    warm_up: int

    def run(self, steps: int, device: torch.device) -> float:
        """Collective. Seconds for one of so many steps, on this rank."""
        wait_for_all()
        _wait_for(device)
        started = time.perf_counter()
        for _ in range(steps):
            self.step.accumulate(self.window(), self.micro_batches)
            self.step.settle()  # the one before, as the trainer does
            self.step.apply()
        self.step.settle()
        _wait_for(device)
        return (time.perf_counter() - started) / steps


def seconds_per_step(rivals: Sequence[Timed], world: World, seconds: float) -> list[list[float]]:
    """Collective. Times steps, the rivals by turns.

    Args:
        rivals: What to time.
        world: All ranks, also where a step is alone in its own world.
        seconds: How long each of them, roughly: three steps are the least.

    Returns:
        For each rival the seconds of a step of each rank, medians over the turns.
    """
    tried = []
    for rival in rivals:
        first = max(of_each_rank(rival.run(1, world.device), world))
        if rival.warm_up > 1 and first < seconds:
            rival.run(rival.warm_up - 1, world.device)
        tried.append(max(of_each_rank(rival.run(1, world.device), world)))
    turns = _TURNS if max(tried) * _TURNS <= 2 * seconds else 1
    steps = [min(max(int(seconds / turns / one), 1), _MOST_STEPS) for one in tried]
    taken = [
        [rival.run(number, world.device) for rival, number in zip(rivals, steps, strict=True)] for _ in range(turns)
    ]
    return [of_each_rank(float(seconds), world) for seconds in np.median(taken, axis=0)]


def of_each_rank(value: float, world: World) -> list[float]:
    """Collective. Every rank's value."""
    values = [0.0] * world.size
    dist.all_gather_object(values, value)
    return values


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
