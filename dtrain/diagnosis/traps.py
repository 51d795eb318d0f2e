"""What is known to go wrong with a run such as this one, on a machine such as this one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from dtrain.config.schema import Config
from dtrain.data import Batch, ShardLoader
from dtrain.data.mounts import file_system
from dtrain.diagnosis.finding import Finding, size_text
from dtrain.diagnosis.machine import SHARED_MEMORY, usable_cores
from dtrain.distributed.world import World

_IN_MEMORY = ("tmpfs", "ramfs")


def traps(
    cfg: Config, world: World, loader: ShardLoader, window: Sequence[Batch], optimizer: torch.optim.Optimizer
) -> list[Finding]:
    """Those of the loader and of the optimizer.

    Args:
        cfg: The config.
        world: The ranks.
        loader: This rank's.
        window: Its micro-batches of a step, as they were on the wire.
        optimizer: Stepped at least once.
    """
    return [*_workers(world, loader), *_shared_memory(cfg, world, loader, window), *_optimizer(world, optimizer)]


def _workers(world: World, loader: ShardLoader) -> Iterator[Finding]:
    workers, cores = loader.num_workers * world.local_size, usable_cores()
    if workers > cores:
        yield Finding(
            "workers",
            f"{workers} on this machine ({loader.num_workers} for each of {world.local_size} ranks), and {cores} cores",
            "warning",
            f"data.num_workers={cores // world.local_size}, unless workers wait for storage most of the time",
        )


def _shared_memory(cfg: Config, world: World, loader: ShardLoader, window: Sequence[Batch]) -> Iterator[Finding]:
    if not loader.num_workers or not SHARED_MEMORY.is_dir():
        return
    largest = max(batch.wire_bytes for batch in window)
    needed = largest * (cfg.data.prefetch + 1) * loader.num_workers * world.local_size
    free = shutil.disk_usage(SHARED_MEMORY).free
    text = f"up to {size_text(needed)} of batches in /dev/shm, which has {size_text(free)} free"
    if needed > free:
        remedy = "Start the container with a larger --shm-size; or lower data.prefetch or data.num_workers"
        yield Finding("prefetched", text, "error", remedy)
    else:
        yield Finding("prefetched", text)


def _optimizer(world: World, optimizer: torch.optim.Optimizer) -> Iterator[Finding]:
    name = type(optimizer).__name__
    if world.device.type == "cuda" and not getattr(optimizer, "_step_supports_amp_scaling", False):
        yield Finding(
            "optimizer",
            f"{name} is not fused: the host waits for the GPU in every step, to know whether it is skipped",
            "warning",
            "optimizer.fused=true, where its class has it",
        )
        return
    dampened = any(group.get("fused") and group.get("dampening") for group in optimizer.param_groups)
    if world.device.type == "cuda" and isinstance(optimizer, torch.optim.SGD) and dampened:
        yield Finding(
            "optimizer",
            "fused SGD with dampening: its first step must not be skipped on the GPU (its momentum would be what the memory "
            "held before), so the host waits for that one",
        )
        return
    yield Finding("optimizer", f"{name}{' (fused)' if optimizer.defaults.get('fused') else ''}")


def place_of_checkpoints(folder: Path, nbytes: int, keep: int) -> Iterator[Finding]:
    """What is wrong with the place where checkpoints go.

    Args:
        folder: Of the run, or the nearest one that exists.
        nbytes: Of a checkpoint.
        keep: How many there are at the same time.
    """
    kind = file_system(folder)
    if kind in _IN_MEMORY:
        yield Finding(
            "checkpoints",
            f"{folder} is a file system in memory ({kind}): they are gone when the machine restarts",
            "warning",
            "run.dir=FOLDER on a disk",
        )
    free = shutil.disk_usage(folder).free
    if free < keep * nbytes:
        yield Finding(
            "checkpoints",
            f"{keep} of {size_text(nbytes)} need more than the {size_text(free)} that are free in {folder}",
            "error",
            "Make room, lower checkpoint.keep_last, or use another run.dir",
        )
