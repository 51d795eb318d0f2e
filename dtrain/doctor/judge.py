"""Which part limits a run and what to change, computed from measured times; and known problems of its config.

* A loader with workers and a step run at the same time, so a step of the run takes as long as the slower one; without
  workers it takes the sum of both. Saves are added. That is the *expected* time; if loader and step together take longer,
  they compete for *cores*.
* The *gain* of a part is how many times faster the run would be if that part took no time.
* *Data*, *communication*, *saves* and *cores* are time that the model does not need. The one with the largest gain is the
  *bottleneck* if the gain is at least ``WORTHWHILE``. Otherwise the *model* limits the run, which is the goal; or loader and
  step are *balanced*: speeding up only one of them does not help.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dtrain.config.instantiate import by_target
from dtrain.config.metrics import require_torchmetrics
from dtrain.config.schema import Config
from dtrain.console import Finding, size_text
from dtrain.data import Batch, ShardLoader
from dtrain.data.fields.parse import parse_fields
from dtrain.data.shards.node_cache import file_system_type
from dtrain.distributed.world import World, process_cpu_count
from dtrain.doctor.machine import SHARED_MEMORY
from dtrain.errors import ConfigError, Explained
from dtrain.extras import require
from dtrain.runs.hub import is_hub_url
from dtrain.tracking.sinks import check_tracker
from dtrain.urls import fsspec_file_system, is_url, scheme

#: Smallest gain that is worth a change, and larger than the noise of the measurements.
WORTHWHILE = 1.25

_MAX_WAITING_WORKERS = 32  # advised number of workers that wait for storage
_MOST = 0.5
_UNEVEN = 1.3
_pip_command = re.compile(r"pip install (?:'[^']+'|[\w-]+)")
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class PartTimes:
    """Seconds of one optimizer step, on the slowest rank.

    Attributes:
        data: The loader alone.
        compute: The step alone, without communication between ranks.
        step: The step alone, with communication.
        together: Loader and step together.
        save: Seconds that the training loop waits for a save, divided by the steps between two saves.
        overlap: Whether loader and step run at the same time, which needs workers.
    """

    data: float
    compute: float
    step: float
    together: float
    save: float = 0.0
    overlap: bool = True

    @property
    def expected(self) -> float:
        """A step of the run if its parts did not slow each other down."""
        return self.combined(self.data, self.step) + self.save

    @property
    def actual(self) -> float:
        """A step of the run."""
        return self.together + self.save

    def combined(self, data: float, step: float) -> float:
        """A step of the run without saves, for a loader that takes ``data`` and a step that takes ``step`` seconds."""
        return max(data, step) if self.overlap else data + step


@dataclass(frozen=True)
class Bottleneck:
    """The part that limits a run.

    Attributes:
        part: ``data``, ``communication``, ``saves``, ``cores``, ``model`` or ``balanced``.
        gains: Gain of each part, in descending order, ``model`` last.
    """

    part: str
    gains: dict[str, float]

    def worthwhile(self) -> list[str]:
        """The parts except ``model`` that are worth a change, in descending order of their gain."""
        return [part for part, gain in self.gains.items() if gain >= WORTHWHILE and part != "model"]


def find_bottleneck(times: PartTimes) -> Bottleneck:
    """Finds the bottleneck of a run."""
    communication = max(times.step - times.compute, 0.0)
    overhead = {
        "data": times.expected / (times.step + times.save),
        "communication": times.expected / (times.combined(times.data, times.compute) + times.save),
        "saves": times.expected / (times.expected - times.save),
        "cores": times.actual / times.expected,
    }
    gains = {part: max(overhead[part], 1.0) for part in sorted(overhead, key=lambda part: -overhead[part])}
    gains["model"] = max(times.expected / (times.combined(times.data, communication) + times.save), 1.0)
    largest = next(iter(gains))
    if gains[largest] >= WORTHWHILE:
        return Bottleneck(largest, gains)
    return Bottleneck("balanced" if times.data * WORTHWHILE > times.step else "model", gains)


def save_stall(copy: float, write: float, interval: float) -> float:
    """Seconds that the training loop waits for saves, for each second of training.

    Args:
        copy: Seconds to copy a checkpoint to host memory; the training loop waits for it.
        write: Seconds to write it. A save waits until the previous one is written.
        interval: Seconds of training between two saves; infinite if there are none.
    """
    return (copy + max(write - interval, 0.0)) / interval


# -- advice


@dataclass(frozen=True)
class Facts:
    """The basis of the advice.

    Attributes:
        times: Times of the parts. All times are per optimizer step, unless stated otherwise.
        ranks: Number of ranks.
        cores: Cores of this machine for each of its ranks.
        device: ``cpu`` or ``cuda``.
        precision: Name of the precision.
        compiled: Whether the model is compiled.
        workers: Number of workers of each rank.
        waiting: Whether workers spend most of the time waiting, for storage or in the dataset.
        micro_batches: Micro-batches of each rank in a step.
        rows: Rows of a micro-batch.
        read_seconds: Seconds to read the samples of a step from the disk sequentially; None if unknown.
        gradient_bytes: Bytes of the gradients that the ranks reduce.
        reduce_seconds: Seconds to reduce them without overlap; 0 with one rank.
        reduce_dtype: Dtype in which they are reduced.
        unevenness: Time of the slowest rank without communication, divided by the time of the fastest.
        write_seconds: Seconds to write a checkpoint.
        save_interval: Seconds of training between two checkpoints.
        memory: Fraction of the device memory that was used at most; None on a CPU.
    """

    times: PartTimes
    ranks: int
    cores: int
    device: str
    precision: str
    compiled: bool
    workers: int
    waiting: bool
    micro_batches: int
    rows: int
    read_seconds: float | None
    gradient_bytes: int
    reduce_seconds: float
    reduce_dtype: str
    unevenness: float
    write_seconds: float
    save_interval: float
    memory: float | None


def advise(bottleneck: Bottleneck, facts: Facts) -> list[str]:
    """Recommended changes, in descending order of the gain; each line names the numbers that it is based on."""
    advice_by_part = {"data": _data, "communication": _communication, "saves": _saves, "cores": _cores}
    lines = [line for part in bottleneck.worthwhile() for line in advice_by_part[part](facts)]
    if bottleneck.part == "model":
        lines += _model(facts)
    if bottleneck.part == "balanced":
        lines.append("A faster step also needs a faster loader (more data.num_workers).")
    return lines


def _data(facts: Facts) -> Iterator[str]:
    times, workers = facts.times, max(facts.workers, 1)
    if facts.read_seconds is not None and facts.read_seconds > _MOST * times.data:
        yield (
            f"Reading takes {_ms(facts.read_seconds)} of the {_ms(times.data)} of the loader: move the shards to a faster "
            "disk (data.storage=slow copies them to data.cache.dir), or pack smaller samples."
        )
    needed = math.ceil(1.1 * workers * times.data / times.step)
    if facts.waiting:
        yield (
            f"data.num_workers={min(needed, _MAX_WAITING_WORKERS)}, even with fewer cores: workers wait most of the time, for "
            f"storage or in the dataset. About {needed:,} keep up with the step."
        )
        return
    room = max(facts.cores - (facts.device == "cpu"), 1)  # on a CPU the step itself needs a core
    if facts.workers < min(needed, room):
        yield (
            f"data.num_workers={min(needed, room)}: each rank has {facts.workers} workers and {facts.cores} cores, and needs "
            f"about {needed:,} workers to keep up with the step."
        )
    if needed > room:
        yield (
            f"Make samples cheaper: each rank needs about {needed:,} cores to keep up with the step, and has {facts.cores}. "
            "Pack images at the size that is used, use fewer augmentations, or do them on the device."
        )


def _communication(facts: Facts) -> Iterator[str]:
    times = facts.times
    lost = times.step - times.compute
    gradients = f"{facts.gradient_bytes / 2**20:,.1f} MiB of gradients take {_ms(facts.reduce_seconds)} on this network"
    if lost > 2 * facts.reduce_seconds + 1e-3:
        yield f"{gradients}, but a step loses {_ms(lost)}: check whether ranks wait for each other or for a core."
    elif facts.reduce_dtype == "fp32":
        yield f"parallel.reduce_dtype=bf16 halves them: {gradients}."
    if facts.unevenness > _UNEVEN:
        yield f"The slowest rank takes {facts.unevenness:.1f} times as long as the fastest, and all ranks wait for it."
    yield (
        f"Twice the train.global_batch_size with train.micro_batch_size={facts.rows} halves the communication for each "
        "sample, but changes the training."
    )


def _saves(facts: Facts) -> Iterator[str]:
    if facts.write_seconds > facts.save_interval:
        yield (
            f"Writing a checkpoint takes {facts.write_seconds:.1f} s, and they are {facts.save_interval:.1f} s apart: save "
            "less often (checkpoint.every_steps), or move run.dir to a faster disk."
        )
    else:
        yield "Save less often (checkpoint.every_steps, checkpoint.every_minutes): each save copies the run to host memory."


def _cores(facts: Facts) -> Iterator[str]:
    yield (
        f"Loader and step take {_ms(facts.times.actual)} together instead of {_ms(facts.times.expected)}: each rank has "
        f"{facts.cores} cores for a step and {facts.workers} workers. Use fewer ranks or workers on this machine, fewer "
        "threads (OMP_NUM_THREADS), or cheaper samples."
    )


def _model(facts: Facts) -> Iterator[str]:
    yield "Data and communication keep up with the model; nothing to change there."
    options = []
    if facts.device == "cuda" and facts.precision in ("fp32", "tf32"):
        options.append(f"precision=bf16 (now {facts.precision})")
    if facts.micro_batches > 1 and (facts.memory is None or facts.memory < _MOST):
        used = f", {facts.memory:.0%} of the memory is used" if facts.memory is not None else ""
        options.append(
            f"train.micro_batch_size above {facts.rows} (a step has {facts.micro_batches} micro-batches{used})"
        )
    if not facts.compiled:
        options.append("train.compile=true")
    if facts.device == "cpu":
        options.append("a GPU, or more cores for each rank")
    if options:
        yield f"To make the step faster, try: {'; '.join(options)}."


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


# -- known problems of a config on this machine


def missing_extras(cfg: Config) -> list[Finding]:
    """One error for each part of the config that needs a package that is not installed, with the command that installs it.

    Each part is checked by the function that the run itself uses, and other problems are left to the run.
    """
    findings: dict[str, Finding] = {}
    for key, check in _checks(cfg):
        try:
            check()
        except (ConfigError, Explained, ImportError, OSError, ValueError) as error:
            if command := _pip_command.search(str(error)):
                findings.setdefault(command[0], Finding(f"extra of {key}", str(error), "error", command[0]))
    return list(findings.values())


def _checks(cfg: Config) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Keys of the config, and what raises if a package for their value is missing."""
    data = cfg.data
    yield "tracker.name", partial(check_tracker, cfg.tracker)
    for name in list(cfg.train.metrics)[:1]:
        yield "train.metrics", partial(require_torchmetrics, name)
    if "digits" in str((data.prepare or {}).get("_target_")):
        yield "data.prepare", partial(by_target, "data.prepare", data.prepare)
    for key, value in {"data.train": data.train, "data.mixture": data.mixture, "data.eval": data.eval}.items():
        for url in {scheme(text): text for text in _texts(value) if is_url(text)}.values():
            yield key, partial(fsspec_file_system, url)
    if (mirror := cfg.checkpoint.mirror) is not None and is_url(mirror):
        yield "checkpoint.mirror", partial(fsspec_file_system, mirror)
    for key, path in {"run.weights_from": cfg.run.weights_from, "run.warm_start.path": cfg.run.warm_start.path}.items():
        if is_hub_url(path or ""):
            yield key, partial(require, "hf", key)
    sources = [source.get("fields") for source in data.mixture.values() if isinstance(source, Mapping)]
    for fields in filter(None, [data.fields, *sources]):
        yield "data.fields", partial(parse_fields, fields)


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value of a config."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def check_config(
    cfg: Config, world: World, loader: ShardLoader, window: Sequence[Batch], optimizer: torch.optim.Optimizer
) -> list[Finding]:
    """Known problems of the loader and the optimizer.

    Args:
        cfg: The config.
        world: The ranks.
        loader: The loader of this rank.
        window: Its micro-batches of one step, as workers transfer them.
        optimizer: The optimizer, after at least one step.
    """
    return [*_workers(world, loader), *_shared_memory(cfg, world, loader, window), *_optimizer(world, optimizer)]


def _workers(world: World, loader: ShardLoader) -> Iterator[Finding]:
    workers, cores = loader.num_workers * world.local_size, process_cpu_count()
    if workers > cores:
        yield Finding(
            "workers",
            f"{workers} on this machine ({loader.num_workers} for each of {world.local_size} ranks), but only {cores} cores",
            "warning",
            f"Set data.num_workers={cores // world.local_size}, unless workers wait for storage most of the time",
        )


def _shared_memory(cfg: Config, world: World, loader: ShardLoader, window: Sequence[Batch]) -> Iterator[Finding]:
    if not loader.num_workers or not SHARED_MEMORY.is_dir():
        return
    largest = max(batch.transfer_bytes for batch in window)
    needed = largest * (cfg.data.prefetch + 1) * loader.num_workers * world.local_size
    free = shutil.disk_usage(SHARED_MEMORY).free
    text = f"up to {size_text(needed)} of batches in /dev/shm, which has {size_text(free)} free"
    if needed > free:
        remedy = "Start the container with a larger --shm-size, or decrease data.prefetch or data.num_workers"
        yield Finding("prefetched", text, "error", remedy)
    else:
        yield Finding("prefetched", text)


def _optimizer(world: World, optimizer: torch.optim.Optimizer) -> Iterator[Finding]:
    name = type(optimizer).__name__
    on_gpu = world.device.type == "cuda"
    if on_gpu and not getattr(optimizer, "_step_supports_amp_scaling", False):
        yield Finding(
            "optimizer",
            f"{name} is not fused: in every step the host waits for the GPU to know whether the step is skipped",
            "warning",
            "Set optimizer.fused=true if the class has this option",
        )
        return
    dampened = any(group.get("fused") and group.get("dampening") for group in optimizer.param_groups)
    if on_gpu and isinstance(optimizer, torch.optim.SGD) and dampened:
        yield Finding(
            "optimizer",
            "fused SGD with dampening: the host waits for the GPU in the first step, because skipping that step on the GPU "
            "would leave the momentum uninitialised",
        )
        return
    yield Finding("optimizer", f"{name}{' (fused)' if optimizer.defaults.get('fused') else ''}")


def check_checkpoint_folder(folder: Path, nbytes: int, count: int) -> Iterator[Finding]:
    """Known problems of the folder for checkpoints.

    Args:
        folder: The run directory, or its nearest existing parent.
        nbytes: Size of a checkpoint.
        count: Maximum number of checkpoints that exist at the same time.
    """
    kind = file_system_type(folder)
    if kind in _MEMORY_FILE_SYSTEMS:
        yield Finding(
            "checkpoints",
            f"{folder} is on a file system in memory ({kind}): its checkpoints are lost when the machine restarts",
            "warning",
            "Set run.dir to a folder on a disk",
        )
    free = shutil.disk_usage(folder).free
    if free < count * nbytes:
        yield Finding(
            "checkpoints",
            f"{count} checkpoints of {size_text(nbytes)} need more than the {size_text(free)} free in {folder}",
            "error",
            "Free some space, decrease checkpoint.keep_last, or set a different run.dir",
        )
