"""A configured run, looked at part by part: its disks, its loader alone, its step alone, both together; and a verdict.

Every rank takes part. A few steps are done with a learning rate of zero; in the run's directory nothing is read, and
nothing stays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dtrain.config.schema import Config
from dtrain.data import Batch, ShardLoader
from dtrain.data.device_copies import DeviceCopies
from dtrain.diagnosis.account import about_parts, about_skips, about_verdict, samples_per_second
from dtrain.diagnosis.advice import Facts, advise
from dtrain.diagnosis.all_reduce import AllReduce
from dtrain.diagnosis.finding import Finding
from dtrain.diagnosis.loader_rate import LoaderRate, endless, loader_rate
from dtrain.diagnosis.machine import usable_cores
from dtrain.diagnosis.saving import Saving, between_saves
from dtrain.diagnosis.step_rate import Timed, of_each_rank, seconds_per_step
from dtrain.diagnosis.storage import Reading
from dtrain.diagnosis.subject import Subject
from dtrain.diagnosis.traps import place_of_checkpoints, traps
from dtrain.diagnosis.verdict import Times, Verdict, judge, save_stall
from dtrain.distributed.collectives import decided_by_rank_zero, wait_for_all
from dtrain.distributed.world import World
from dtrain.training.out_of_memory import out_of_memory_explained
from dtrain.training.step import TrainStep

# Buckets are laid out anew after the first backward, and a compiler may look at the first two.
_WARM_UP = 3


@dataclass(frozen=True)
class Examination:
    """What was found.

    Attributes:
        findings: In the order of printing; the verdict is the last.
        verdict: What limits the run.
        facts: What it was made from.
        samples_per_second: Of the run, if it had only that part, and as it is.
        advice: What to change.
    """

    findings: list[Finding]
    verdict: Verdict
    facts: Facts
    samples_per_second: dict[str, float]
    advice: list[str]

    def to_json(self) -> dict[str, Any]:
        """All of it but the findings."""
        facts = asdict(self.facts)
        return {
            "verdict": self.verdict.limit,
            "gains": self.verdict.gains,
            "samples_per_second": self.samples_per_second,
            "facts": facts | {"between_saves": _or_none(facts["between_saves"])},  # JSON knows no infinity
            "advice": self.advice,
        }


def examine(
    cfg: Config,
    run_dir: Path,
    world: World,
    all_reduce: AllReduce | None,
    *,
    seconds: float,
    tell: Callable[[str], None],
) -> Examination:
    """Collective. Measures a run and judges it.

    Args:
        cfg: Its config.
        run_dir: Its directory, which need not exist.
        world: The ranks.
        all_reduce: How fast they sum; None in a world of one.
        seconds: To spend on each measure, roughly.
        tell: Is told what is measured next.

    Raises:
        ConfigError: What the trainer would raise, on every rank.
    """
    tell("building the run as the trainer does")
    subject, warnings = Subject.build(cfg, world)
    loader, rows = subject.loader, cfg.train.global_batch_size
    with closing(loader):
        tell("reading the shards as files")
        reading = Reading.measure(loader.source, world, seconds / 3)
        tell("the loader alone")
        window, rate = _loader_alone(loader, seconds)
        data = max(of_each_rank(rate.seconds, world)) * rows / world.size
        with out_of_memory_explained(
            lambda: 1, rows=loader.rows_per_micro_batch, share=-(-rows // world.size), device=world.device
        ):
            tell("the step alone, on one batch" + (", with and without communication" if world.size > 1 else ""))
            step, compute, with_others = _step_alone(subject, window, seconds)
            tell("loader and step together")
            both = _together(subject, step, seconds)
        tell("copying and writing a checkpoint")
        saving = _save(subject, step, run_dir, seconds / 3)

    times = Times(
        data=data,
        compute=min(max(compute), with_others),
        step=with_others,
        together=both,
        at_once=loader.num_workers > 0,
    )
    between = between_saves(cfg.checkpoint, times.expected)
    times = replace(times, save=save_stall(saving.copy, saving.write, between) * times.expected)
    able_to_read = reading.samples_per_second if reading is not None else None
    facts = Facts(
        times=times,
        ranks=world.size,
        cores=max(usable_cores() // world.local_size, 1),
        device=world.device.type,
        precision=subject.precision.name,
        compiled=bool(cfg.train.compile),
        workers=loader.num_workers,
        waiting=rate.waiting,
        micro_batches=loader.micro_batches_per_step,
        rows=loader.rows_per_micro_batch,
        reading=rows / able_to_read if able_to_read is not None else None,
        gradient_bytes=subject.gradient_bytes(),
        reducing=all_reduce.estimate(subject.gradient_bytes()) if all_reduce is not None else 0.0,
        comm_dtype=cfg.parallel.comm_dtype,
        comm_hook=cfg.parallel.comm_hook is not None,
        unevenness=max(compute) / min(compute),
        writing=saving.write,
        between_saves=between,
        memory=_memory(world.device),
    )
    verdict = judge(times)
    advice = advise(verdict, facts)
    findings = [
        *(Finding("precision", warning, "warning") for warning in warnings),
        *traps(cfg, world, loader, window, subject.optimizer),
        *place_of_checkpoints(saving.folder, saving.nbytes, cfg.checkpoint.keep_last + 1),
        *(reading.findings(rows / times.step) if reading is not None else []),
        saving.finding(between),
        *about_parts(facts, rate, rows),
        *about_skips(step.step, step.applied_steps),
        about_verdict(verdict, times, rows, advice),
    ]
    return Examination(findings, verdict, facts, samples_per_second(times, able_to_read, rows), advice)


def _loader_alone(loader: ShardLoader, seconds: float) -> tuple[list[Batch], LoaderRate]:
    """Collective. The first window, and how fast the next ones come. Ends the loader's workers."""
    batches = endless(loader)
    window = list(islice(batches, loader.micro_batches_per_step))
    wait_for_all()
    rate = loader_rate(loader, batches, seconds)
    loader.close()
    return window, rate


def _step_alone(subject: Subject, window: list[Batch], seconds: float) -> tuple[TrainStep, list[float], float]:
    """Collective. The trainer's step, each rank's seconds of one without communication, and the slowest one's with it."""
    world, micro_batches = subject.world, len(window)
    to_device = DeviceCopies(world.device)

    def held() -> Iterator[Batch]:
        return map(to_device, window)

    alone = Timed(subject.step_alone(), held, micro_batches, _WARM_UP)
    if world.size == 1:
        [taken] = seconds_per_step([alone], world, seconds)
        return alone.step, taken, max(taken)
    before = [] if subject.takes_turns else seconds_per_step([alone], world, seconds)
    with_others = Timed(subject.step_with_others(), held, micro_batches, _WARM_UP)
    rivals = [alone, with_others] if subject.takes_turns else [with_others]
    own, everybodys = [*before, *seconds_per_step(rivals, world, seconds)]
    return with_others.step, own, max(everybodys)


def _together(subject: Subject, step: TrainStep, seconds: float) -> float:
    """Collective. Seconds of a step that waits for its batches, as the slowest rank sees them."""
    loader, to_device = subject.loader, DeviceCopies(subject.world.device)
    micro_batches, batches = loader.micro_batches_per_step, endless(loader)
    started = max(1, math.ceil(loader.num_workers / micro_batches))  # when each worker has built one
    training = Timed(step, lambda: map(to_device, islice(batches, micro_batches)), micro_batches, started)
    [taken] = seconds_per_step([training], subject.world, seconds)
    return max(taken)


def _save(subject: Subject, step: TrainStep, run_dir: Path, seconds: float) -> Saving:
    """Collective. Rank 0 copies a checkpoint, and writes as many bytes."""

    def copy() -> list[float]:
        started = time.perf_counter()
        checkpoint = subject.parts(step).checkpoint({})
        taken = time.perf_counter() - started
        return [sum(tensor.nbytes for group in checkpoint.tensors.values() for tensor in group.values()), taken]

    nbytes, copied = decided_by_rank_zero(copy)
    return Saving.measure(run_dir, int(nbytes), copied, seconds)


def _or_none(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _memory(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / torch.cuda.get_device_properties(device).total_memory
