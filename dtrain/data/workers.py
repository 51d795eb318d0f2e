"""How many workers: as asked, or with ``num_workers: auto`` as many as the data need, of the cores that there are.

* *Needed* are so many that a micro-batch is ready whenever a fast step may ask for one, judged by building a few in this
  process: decoding, augmentation and storage are the run's own.
* *There* are the cores that this process may use, shared with the other ranks of the machine, less the one that trains.

How many workers there are changes no batch and no order, so ranks that come to different numbers are as right as any.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

#: A micro-batch is to be ready every so many seconds: small models take no longer on a GPU.
READY_EVERY = 0.02
_TIMED = 3


def number_of_workers(asked: int | str, micro_batches: Iterable[Any]) -> tuple[int, str]:
    """How many workers, and why if that was left open.

    Args:
        asked: The number, or ``"auto"``.
        micro_batches: Of this rank, some of which are built to choose.

    Returns:
        The number, and the reason, for the banner; empty where it was asked for.

    Raises:
        ValueError: If ``asked`` is neither.
    """
    if asked == "auto":
        return choose_workers(seconds_to_build(micro_batches), cores_per_rank())
    if not isinstance(asked, int) or asked < 0:
        raise ValueError(f"num_workers: got {asked!r}, want a number from 0 on, or auto.")
    return asked, ""


def cores_per_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Cores of this machine for each of its ranks, at least 1.

    Args:
        environment: ``LOCAL_WORLD_SIZE`` is set by torchrun, ``SLURM_CPUS_PER_TASK`` by SLURM, whose task torchrun is.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = environment.get("SLURM_CPUS_PER_TASK", "")
    if granted.isdigit():
        cores = min(cores, int(granted))
    return max(1, cores // int(environment.get("LOCAL_WORLD_SIZE", "1")))


def seconds_to_build(micro_batches: Iterable[Any]) -> float:
    """What one of them takes here: the median of a few, without the first one, which opens files and fills caches."""
    iterator, times = iter(micro_batches), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        next(iterator)
        for _ in range(_TIMED):
            started = time.perf_counter()
            next(iterator)
            times.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(times)


def choose_workers(seconds: float, cores: int) -> tuple[int, str]:
    """How many workers, and why.

    Args:
        seconds: To build a micro-batch.
        cores: For this rank.

    Returns:
        The number, 0 where there is no core for one; and the reason, for the banner.
    """
    needed = max(1, math.ceil(seconds / READY_EVERY))
    number = min(needed, cores - 1)
    built = f"a micro-batch takes {1000 * seconds:.1f} ms to build"
    if number == needed:
        return number, f"{built}: enough for one every {1000 * READY_EVERY:.0f} ms"
    each = f"one every {1000 * seconds / number:.0f} ms" if number else "built between the steps"
    return number, f"{built}: {each}, all that {cores} core{'s' * (cores > 1)} for each rank leave for it"
