"""Metrics of training steps.

* ``StepMetrics`` measures steps for the loop, and makes a record of the steps since the last record.
* ``MetricSums`` adds up settled steps. Metrics of the model come from applied steps only, so that an overflow does not show as
  an infinite loss; metrics of the machine come from all steps. The record divides sums by counts, so there are no means of
  means. All values are plain Python numbers: adding a step never waits for a device.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.nn.parallel import DistributedDataParallel

from dtrain.data import Batch
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.monitor.communication import Traffic, run_traffic
from dtrain.training.monitor.flops import flops_per_row, peak_flops
from dtrain.training.monitor.memory import peak
from dtrain.training.monitor.stragglers import Pieces, StragglerReport, StragglerTimer
from dtrain.training.step import StepOutcome

_MEMORY_EVERY = 1.0  # seconds between two readings of the process's memory


@dataclass(slots=True)  # not frozen: one is made in every step, and frozen ones are slow to construct
class Timing:
    """The host's measurements of one step.

    Attributes:
        used: Samples that the step used, over all ranks.
        seconds: Wall time of the step.
        waited: The part of it in which the loop waited for the loader.
        own: Own time of this rank.
    """

    used: int
    seconds: float
    waited: float
    own: Pieces


class StepMetrics:
    """Measures training steps and makes their records.

    Args:
        run: The run; ``skipped_steps`` and ``bad_samples`` of its totals are kept up to date.
        slow: Called on rank 0 with a sentence about ranks that stay slow.
        recovered: Called on rank 0 when they no longer are.
    """

    def __init__(
        self,
        run: TrainState,
        slow: Callable[[str], None] = lambda text: None,
        recovered: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._run = run
        totals = run.totals
        self._sums = MetricSums(
            run.world.device,
            counts=getattr(run.task, "counts", None),
            skipped_steps=totals.skipped_steps,
            bad_samples=totals.bad_samples,
        )
        self._restarts = (  # in every record of a step, if there were any
            {"time/restarts": totals.restarts, "time/lost_seconds": totals.lost_seconds} if totals.restarts else {}
        )
        self._stragglers = StragglerReport(run.world, slow, recovered)
        self._first_step = run.step.step + 1
        self._timer: StragglerTimer | None = None
        self._traffic: Traffic | None = None
        self.follow_model()

    def follow_model(self) -> None:
        """Measures the model in DDP that the step calls; again after the step has a new one."""
        if self._timer is not None:
            self._timer.end()
        if isinstance(model := self._run.step.model, DistributedDataParallel):
            self._timer = StragglerTimer(model, self._run.world.device)

    def begin(self) -> None:
        """Starts the measurement of a step."""
        if self._timer is not None:
            self._timer.begin()

    def count_flops(self, batch: Batch) -> str | None:
        """Counts the FLOPs of a sample, on every rank. Returns a message for the user if that is impossible, else None."""
        run, device = self._run, self._run.world.device
        try:
            flops = flops_per_row(run.task, run.model, batch, run.precision, device)
        except Exception as error:  # noqa: BLE001 - a measurement must not end a run; the step raises errors of the task
            return (
                f"FLOPs could not be counted ({type(error).__name__}: {error}), so records have neither "
                "throughput/tflops_per_second nor throughput/mfu."
            )
        self._sums.flops_per_sample = flops / run.world.size if flops else None
        if device.type == "cuda":
            self._sums.peak_flops = peak_flops(torch.cuda.get_device_name(device), run.precision.name)
        return None

    def own_time(self) -> Pieces:
        """Own time of this rank since ``begin``; empty in a world of one."""
        return self._timer.taken() if self._timer is not None else []

    def add(self, outcome: StepOutcome, timing: Timing) -> None:
        """Adds a settled step."""
        stats, totals = outcome.stats, self._run.totals
        self._sums.add(
            loss_sum=stats.loss_sum,
            count=stats.count,
            samples=timing.used,
            step_seconds=timing.seconds,
            wait_seconds=timing.waited,
            skipped=not stats.applied,
            grad_norm=outcome.grad_norm,
            lr=outcome.lr,
            lrs=outcome.lrs,
            loss_scale=stats.loss_scale if self._run.step.loss_scale is not None else None,
            metrics=stats.metrics,
            bytes=int(stats.bytes),
            bad=stats.bad,
        )
        if self._timer is not None and outcome.step > self._first_step:  # the first one loads kernels and compiles
            self._stragglers.add(self._timer.seconds(timing.own), timing.seconds)
        totals.skipped_steps, totals.bad_samples = self._sums.skipped_steps, self._sums.bad_samples
        totals.worker_restarts += stats.worker_restarts
        if stats.spike:
            totals.spikes, totals.spike_grad_norm = totals.spikes + 1, outcome.grad_norm
        if self._run.cfg.data.exclude is not None:  # what a step committed and no rank received
            totals.excluded_samples += timing.used - stats.samples - stats.bad

    def record(self, outcome: StepOutcome) -> dict[str, float | int]:
        """Collective, without a wait. The metrics of the steps since the last record, of which ``outcome`` is the last."""
        record = self._restarts | self._sums.record()
        if self._run.cfg.train.spike is not None:
            record["train/spikes"] = self._run.totals.spikes
            if self._run.totals.spikes:
                record["train/spike_grad_norm"] = self._run.totals.spike_grad_norm
        if self._run.cfg.data.exclude is not None:
            record["data/excluded_samples"] = self._run.totals.excluded_samples
        if self._run.totals.worker_restarts:
            record["data/worker_restarts"] = self._run.totals.worker_restarts
        record |= {f"data/samples/{name}": n for name, n in self._run.train_loader.samples_by_source().items()}
        if self._traffic is None:  # the first record: from now on the number of metrics is known
            self._traffic = run_traffic(self._run, len(outcome.stats.metrics))
        if self._traffic.collectives:
            record["comm/bytes_per_step"] = self._traffic.nbytes
        return record | self._stragglers.exchange(outcome.step)

    def end(self) -> None:
        """Collective. Waits for the last exchange, and removes the timer's hooks."""
        self._stragglers.end()
        if self._timer is not None:
            self._timer.end()


class MetricSums:
    """Adds up settled steps and makes one flat record of them.

    Args:
        device: The model's device, whose peak memory is recorded (on a GPU since the last record); None: without.
        counts: Unit of the task's counts if it is not samples: ``tokens`` adds ``throughput/tokens_per_second``.
        skipped_steps: Total of the run so far.
        bad_samples: Total of the run so far.

    Attributes:
        skipped_steps: Skipped steps of the run so far.
        bad_samples: Bad samples of the run so far.
        flops_per_sample: Floating-point operations for a sample, divided by the number of devices; None: not counted.
        peak_flops: Peak FLOP/s of a device; None: unknown.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        counts: str | None = None,
        skipped_steps: int = 0,
        bad_samples: int = 0,
    ) -> None:
        self._device = device
        self._counts = counts
        self.skipped_steps = skipped_steps
        self.bad_samples = bad_samples
        self._peak: dict[str, float] = {}
        self._read_memory_at = float("-inf")
        self.flops_per_sample: float | None = None
        self.peak_flops: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._samples = 0
        self._seconds = array("d")  # of each step
        self._wait = 0.0
        self._bytes = 0
        self._loss_scale: float | None = None
        # Of the applied steps:
        self._applied_samples = self._norms = 0
        self._lr: float | None = None
        self._lrs: Mapping[str, float] = {}
        self._loss_sum = self._count = self._grad_norms = 0.0
        self._metrics: dict[str, list[float]] = {}  # sum and count of each

    def add(
        self,
        *,
        loss_sum: float,
        count: float,
        samples: int,
        step_seconds: float,
        wait_seconds: float = 0.0,
        skipped: bool = False,
        grad_norm: float | None = None,
        lr: float | None = None,
        lrs: Mapping[str, float] = MappingProxyType({}),
        loss_scale: float | None = None,
        metrics: Mapping[str, tuple[float, float]] = MappingProxyType({}),
        bytes: int = 0,
        bad: int = 0,
    ) -> None:
        """Adds one settled step.

        Args:
            loss_sum: Sum of the losses of the global batch's valid rows (or tokens).
            count: Number of these rows.
            samples: Samples that the step committed, skipped or not.
            step_seconds: Wall time of the step, including the wait for data.
            wait_seconds: The part of it in which the loop waited for the loader.
            skipped: True if no rank applied the step.
            grad_norm: Norm of the global gradient, after unscaling and before clipping.
            lr: Learning rate that the step used.
            lrs: Learning rates of the named parameter groups.
            loss_scale: Loss scale that the step used; None where gradients are not scaled.
            metrics: Further (sum, count) pairs of the task, over the same rows as the loss.
            bytes: Bytes that all ranks' workers transferred for the step.
            bad: Bad samples among the step's samples.
        """
        self._samples += samples
        self._seconds.append(step_seconds)
        self._wait += wait_seconds
        self._bytes += bytes
        self.bad_samples += bad
        self._loss_scale = loss_scale
        if skipped:
            self.skipped_steps += 1
            return
        self._applied_samples += samples
        self._lr, self._lrs = lr, lrs
        self._loss_sum += loss_sum
        self._count += count
        if grad_norm is not None:
            self._grad_norms += grad_norm
            self._norms += 1
        for name, (total, number) in metrics.items():
            sums = self._metrics.get(name)
            if sums is None:
                self._metrics[name] = [total, number]
            else:
                sums[0] += total
                sums[1] += number

    def record(self) -> dict[str, float | int]:
        """The metrics since the last record, named as in metrics.jsonl; starts the next record.

        A name that does not apply is left out: no loss if every step was skipped, no time without a step. ``train/lr`` and
        ``precision/loss_scale`` are the last ones used, ``train/grad_norm`` is the mean over the applied steps,
        ``precision/skipped_steps`` and ``data/bad_samples`` are totals of the run. Percentiles of step seconds are
        nearest-rank percentiles.
        """
        record: dict[str, float | int] = {
            f"train/{name}": total / count for name, (total, count) in self._metrics.items() if count
        }
        if self._count:
            record["train/loss"] = self._loss_sum / self._count
        if self._norms:
            record["train/grad_norm"] = self._grad_norms / self._norms
        if self._lr is not None:
            record["train/lr"] = self._lr
        record |= {f"train/lr/{name}": rate for name, rate in self._lrs.items()}
        if self._loss_scale is not None:
            record["precision/loss_scale"] = self._loss_scale
        record["precision/skipped_steps"] = self.skipped_steps
        if self._seconds:
            record |= self._speed()
        if self._samples and self._bytes:
            record["data/bytes_per_sample"] = self._bytes / self._samples
        record["data/bad_samples"] = self.bad_samples
        if self._device is not None:
            record |= self._memory(self._device)
        self._reset()
        return record

    def _memory(self, device: torch.device) -> dict[str, float]:
        now = time.monotonic()
        # On a CPU this reads /proc, which takes as long as the rest of the record.
        if device.type == "cuda" or now - self._read_memory_at > _MEMORY_EVERY:
            self._peak, self._read_memory_at = dict([peak(device)]), now
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        return self._peak

    def _speed(self) -> dict[str, float]:
        ordered = sorted(self._seconds)
        seconds = math.fsum(ordered)
        samples_per_second = self._samples / seconds
        speed = {"throughput/samples_per_second": samples_per_second}
        if self._counts is not None and self._applied_samples:
            # Computed from the samples, because the counts of skipped steps are not known, but their time counts.
            speed[f"throughput/{self._counts}_per_second"] = samples_per_second * self._count / self._applied_samples
        if self.flops_per_sample is not None:
            flops = samples_per_second * self.flops_per_sample
            speed["throughput/tflops_per_second"] = flops / 1e12
            if self.peak_flops is not None:
                speed["throughput/mfu"] = flops / self.peak_flops
        speed["time/step_seconds"] = seconds / len(ordered)
        for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
            speed[f"time/step_seconds_{name}"] = ordered[math.ceil(share * len(ordered)) - 1]
        speed["time/data_wait_fraction"] = self._wait / seconds
        return speed
