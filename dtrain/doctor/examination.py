"""Measures a configured run part by part: its disks, its loader, its step, loader and step together.

All ranks take part. The steps have a learning rate of zero, so they change no parameter. Nothing is read from the run
directory, and no file is left there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dtrain.config.schema import Config, ParallelConfig
from dtrain.console import Finding
from dtrain.data import Batch, ShardLoader
from dtrain.data.loading.batch import DeviceCopies
from dtrain.distributed.collectives import from_rank0, on_all_ranks, wait_for_all
from dtrain.distributed.world import World, process_cpu_count
from dtrain.doctor.disks import CheckpointWrites, ShardReads, save_interval
from dtrain.doctor.judge import (
    Bottleneck,
    Facts,
    PartTimes,
    advise,
    check_checkpoint_folder,
    check_config,
    find_bottleneck,
    save_stall,
)
from dtrain.doctor.measure import (
    AllReduce,
    LoaderRate,
    Timed,
    endless_batches,
    gather_values,
    loader_rate,
    seconds_per_step,
)
from dtrain.doctor.memory import device_bytes, plan_of
from dtrain.errors import ConfigError
from dtrain.training.build import build_precision, build_run, build_step
from dtrain.training.checkpoint.resume import build_rest
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.monitor.memory import out_of_memory_explained
from dtrain.training.setup.loaders import prepare_data
from dtrain.training.step import TrainStep

# DDP rebuilds its buckets after the first backward, and torch.compile may recompile in the second step.
_WARM_UP = 3
_NO_LIMIT = 10**9  # of consecutive skips, which are reported but do not end an examination


@dataclass(frozen=True)
class Examination:
    """Result of ``examine``.

    Attributes:
        findings: In the order of printing; the bottleneck is the last.
        bottleneck: The part that limits the run.
        facts: The basis of the advice.
        samples_per_second: Of the run, of each part alone, and of the shards.
        advice: Recommended changes, one line each.
    """

    findings: list[Finding]
    bottleneck: Bottleneck
    facts: Facts
    samples_per_second: dict[str, float]
    advice: list[str]

    def to_json(self) -> dict[str, Any]:
        """Everything but the findings."""
        facts = asdict(self.facts)
        interval = facts["save_interval"]
        return {
            "bottleneck": self.bottleneck.part,
            "gains": self.bottleneck.gains,
            "samples_per_second": self.samples_per_second,
            "facts": facts | {"save_interval": interval if math.isfinite(interval) else None},  # JSON has no infinity
            "advice": self.advice,
        }


def examine(
    cfg: Config,
    run_dir: Path,
    world: World,
    all_reduce: AllReduce | None,
    *,
    seconds: float,
    on_message: Callable[[str], None],
) -> Examination:
    """Collective. Measures a run and finds its bottleneck.

    Args:
        cfg: The config of the run.
        run_dir: The run directory; need not exist.
        world: The ranks.
        all_reduce: Measured speed of all-reduce; None with one rank.
        seconds: Approximate duration of each measurement.
        on_message: Called with a text before each measurement.

    Raises:
        ConfigError: On every rank, if the trainer would raise it.
    """
    on_message("estimating the memory of a step")
    memory = _memory_needed(cfg, world)
    if memory.level != "ok":  # shown now, because the step below may run out of memory
        on_message("\n-> ".join([memory.text, memory.remedy]))
    on_message("building the run as the trainer does")
    run, warnings = build_examined_run(cfg, world)
    loader, rows = run.train_loader, cfg.train.global_batch_size
    with closing(loader):
        on_message("reading the shards as files")
        reads = ShardReads.measure(loader.source, world, seconds / 3)
        on_message("the loader alone")
        window, rate = _loader_alone(loader, seconds)
        data = max(gather_values(rate.seconds, world)) * rows / world.size
        with out_of_memory_explained(
            lambda: 1,
            rows=lambda: loader.rows_per_micro_batch,
            share=-(-rows // world.size),
            device=world.device,
            ranks=world.size,
        ):
            on_message("the step alone, on one batch" + (", with and without communication" if world.size > 1 else ""))
            step, compute, with_communication = _step_alone(run, world, window, seconds)
            on_message("loader and step together")
            together = _together(loader, world, step, seconds)
        on_message("copying and writing a checkpoint")
        writes = _save(replace(run, step=step), run_dir, seconds / 3)

    times = PartTimes(
        data=data,
        compute=min(max(compute), with_communication),
        step=with_communication,
        together=together,
        overlap=loader.num_workers > 0,
    )
    interval = save_interval(cfg.checkpoint, times.expected)
    times = replace(times, save=save_stall(writes.copy, writes.write, interval) * times.expected)
    read_rate = reads.samples_per_second if reads is not None else None
    facts = Facts(
        times=times,
        ranks=world.size,
        cores=max(process_cpu_count() // world.local_size, 1),
        device=world.device.type,
        precision=run.precision.name,
        compiled=bool(cfg.train.compile),
        workers=loader.num_workers,
        waiting=rate.waiting,
        micro_batches=loader.micro_batches_per_step,
        rows=loader.rows_per_micro_batch,
        read_seconds=rows / read_rate if read_rate is not None else None,
        gradient_bytes=_gradient_bytes(run),
        reduce_seconds=all_reduce.estimate(_gradient_bytes(run)) if all_reduce is not None else 0.0,
        reduce_dtype=cfg.parallel.reduce_dtype,
        unevenness=max(compute) / min(compute),
        write_seconds=writes.write,
        save_interval=interval,
        memory=_memory(world.device),
    )
    bottleneck = find_bottleneck(times)
    advice = advise(bottleneck, facts)
    findings = [
        *(Finding("precision", warning, "warning") for warning in warnings),
        memory,
        *_not_sharded(cfg.parallel, world.size),
        *check_config(cfg, world, loader, window, run.optimizer),
        *check_checkpoint_folder(writes.folder, writes.nbytes, cfg.checkpoint.keep_last + 1),
        *(reads.findings(rows / times.step) if reads is not None else []),
        writes.finding(interval),
        *_parts(facts, rate, rows),
        *_skips(step.step, step.applied_steps),
        _bottleneck(bottleneck, times, rows, advice),
    ]
    return Examination(findings, bottleneck, facts, _samples_per_second(times, read_rate, rows), advice)


# -- measurements


def _memory_needed(cfg: Config, world: World) -> Finding:
    """Collective. What rank 0 computes about the memory of a step, without needing it.

    Raises:
        ConfigError: On every rank, if a part of the run cannot be built.
    """
    precision, _ = on_all_ranks(lambda: build_precision(cfg.precision, world.device))
    prepare_data(cfg.data)

    def compute() -> dict[str, str]:
        try:
            plan = plan_of(
                cfg,
                precision,
                world,
                ranks=world.size,
                ranks_per_node=world.local_size,
                capacity=device_bytes(world.device),
            )
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - errors of model and task are raised again by the step, which runs next
            return asdict(Finding("memory", f"not known in advance ({type(error).__name__}: {error})"))
        return asdict(plan.finding())

    return Finding(**from_rank0(compute))


def _loader_alone(loader: ShardLoader, seconds: float) -> tuple[list[Batch], LoaderRate]:
    """Collective. The first accumulation window, and the speed of the loader after it. Closes the workers."""
    batches = endless_batches(loader)
    window = list(islice(batches, loader.micro_batches_per_step))
    wait_for_all()
    rate = loader_rate(loader, batches, seconds)
    loader.close()
    return window, rate


def build_examined_run(cfg: Config, world: World) -> tuple[TrainState, list[str]]:
    """Collective. Builds the run, with a learning rate of zero and a step without communication; and precision warnings.

    All kernels of the optimizer run and no parameter changes, so a step can be repeated on the same micro-batches.

    Raises:
        ConfigError: On every rank, if the trainer would raise it.
    """
    run, warnings = build_run(
        cfg, Path(), world, with_eval_data=False, alone=True, schedule=_zero_rate, max_consecutive_skips=_NO_LIMIT
    )
    run.model.train()
    return run, warnings


def build_communicating_step(run: TrainState, world: World) -> TrainStep:
    """Collective. The step as the trainer runs it, with DDP and the vote, for the model and optimizer of ``run``."""
    return build_step(
        run.cfg,
        world,
        model=run.model,
        task=run.task,
        optimizer=run.optimizer,
        precision=run.precision,
        ema=run.ema,
        schedule=_zero_rate,
        max_consecutive_skips=_NO_LIMIT,
    )


def _zero_rate(applied_steps: int) -> float:
    return 0.0


def _step_alone(
    run: TrainState, world: World, window: list[Batch], seconds: float
) -> tuple[TrainStep, list[float], float]:
    """Collective. The step, its seconds without communication on each rank, and with it on the slowest rank."""
    to_device = DeviceCopies(world.device)

    def window_on_device() -> Iterator[Batch]:
        return map(to_device, window)

    alone = Timed(run.step, window_on_device, len(window), _WARM_UP)
    if world.size == 1:
        [per_rank] = seconds_per_step([alone], world, seconds)
        return alone.step, per_rank, max(per_rank)
    # With a static graph, hooks of DDP also run in a backward without DDP. The step without communication is then measured
    # before DDP is built, instead of alternately.
    alternate = not run.cfg.parallel.static_graph
    before = [] if alternate else seconds_per_step([alone], world, seconds)
    with_others = Timed(build_communicating_step(run, world), window_on_device, len(window), _WARM_UP)
    variants = [alone, with_others] if alternate else [with_others]
    without_communication, with_communication = [*before, *seconds_per_step(variants, world, seconds)]
    return with_others.step, without_communication, max(with_communication)


def _together(loader: ShardLoader, world: World, step: TrainStep, seconds: float) -> float:
    """Collective. Seconds of a step that takes its batches from the loader, on the slowest rank."""
    to_device = DeviceCopies(world.device)
    micro_batches, batches = loader.micro_batches_per_step, endless_batches(loader)
    warm_up = max(1, math.ceil(loader.num_workers / micro_batches))  # until each worker has made one micro-batch
    training = Timed(step, lambda: map(to_device, islice(batches, micro_batches)), micro_batches, warm_up)
    [per_rank] = seconds_per_step([training], world, seconds)
    return max(per_rank)


def _save(run: TrainState, run_dir: Path, seconds: float) -> CheckpointWrites:
    """Collective. Rank 0 copies a checkpoint to host memory, and writes as many bytes."""

    def copy() -> list[float]:
        started = time.perf_counter()
        checkpoint = run.checkpoint({})
        duration = time.perf_counter() - started
        return [checkpoint.nbytes, duration]

    build_rest(run)
    nbytes, copied = from_rank0(copy)
    return CheckpointWrites.measure(run_dir, int(nbytes), copied, seconds)


def _gradient_bytes(run: TrainState) -> int:
    """Bytes of the gradients that the ranks reduce in a step, in ``parallel.reduce_dtype``."""
    numbers = sum(parameter.numel() for parameter in run.model.parameters() if parameter.requires_grad)
    return numbers * (2 if run.cfg.parallel.reduce_dtype in ("bf16", "fp16") else 4)


def _memory(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / torch.cuda.get_device_properties(device).total_memory


def _samples_per_second(times: PartTimes, read_rate: float | None, rows: int) -> dict[str, float]:
    seconds = {"data": times.data, "compute": times.compute, "step": times.step, "together": times.together}
    rates = {name: rows / value for name, value in seconds.items()} | {"run": rows / times.actual}
    return rates | ({"shards": read_rate} if read_rate is not None else {})


# -- findings


def _not_sharded(parallel: ParallelConfig, ranks: int) -> Iterator[Finding]:
    """A warning if the run shards its model: the steps were timed with whole models."""
    if parallel.shard != "none" and ranks > 1:
        yield Finding(
            "parallel",
            f"shard={parallel.shard}, but the steps below were timed with DDP, with the whole model on each rank",
            "warning",
            "For the speed of the sharded model start the run, with profile.steps=[20,30] to see its communication",
        )


def _parts(facts: Facts, rate: LoaderRate, rows: int) -> Iterator[Finding]:
    """Findings about each part alone, and about loader and step together; ``rate`` is rank 0's."""
    times = facts.times

    def speed(seconds: float) -> str:
        return f"{rows / seconds:,.0f} samples/s, {1e3 * seconds:,.1f} ms per step"

    workers = f"{facts.workers} worker{'s' * (facts.workers > 1)} for each rank" if facts.workers else "no workers"
    busy = f", busy {rate.busy:.0%} of the time" if rate.busy is not None else ""
    bad = f"; {rate.bad} bad samples on rank 0" if rate.bad else ""
    yield Finding("loader alone", f"{speed(times.data)} ({workers}{busy}){bad}")
    if facts.ranks > 1:
        communication = times.step - times.compute
        yield Finding("step, no communication", speed(times.compute))
        yield Finding(
            "step alone",
            f"{speed(times.step)} (communication {1e3 * communication:,.1f} ms, {communication / times.step:.0%}; "
            f"{facts.gradient_bytes / 2**20:,.1f} MiB of gradients take {1e3 * facts.reduce_seconds:,.1f} ms without overlap)",
        )
    else:
        yield Finding("step alone", speed(times.step))
    yield Finding("both together", speed(times.together))


def _skips(steps: int, applied: int) -> Iterator[Finding]:
    """A warning if most steps were skipped: a skipped step takes less time in the optimizer."""
    if applied < steps / 2:
        yield Finding(
            "skips",
            f"{steps - applied} of {steps} steps were skipped, so the measured time of the optimizer is too short",
            "warning",
            "Losses or gradients are not finite: `dtrain doctor numerics` shows where",
        )


def _bottleneck(bottleneck: Bottleneck, times: PartTimes, rows: int, advice: Sequence[str]) -> Finding:
    """The finding about the bottleneck, with the advice as its remedy."""
    now = f"{rows / times.actual:,.0f} samples/s"
    part = bottleneck.part
    if part == "balanced":
        text = f"balanced: loader and step take equally long, {now}"
    elif part == "model":
        text = f"model: {now}; the loader alone makes {rows / times.data:,.0f} samples/s"
    else:
        text = f"{part}: {now}, {bottleneck.gains[part]:.1f} times as many without it"
    return Finding("bottleneck", text, "ok" if part in ("balanced", "model") else "warning", "\n".join(advice))
