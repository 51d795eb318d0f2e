"""What happened between two log lines, added up on the host.

* A *settled step* is one whose outcome the host knows: applied or skipped, with the sums of all ranks.
* The *window* is the settled steps since the last record. What describes the model comes from its applied steps alone,
  so that an overflow does not show as an infinite loss; what describes the machine comes from all of them.
* The *totals* of the run (skipped steps, bad samples) outlive the window and belong in the checkpoint.

Sums and counts are kept until :meth:`Meter.record` divides, so no mean of means can arise. Everything is a plain Python
number: adding a step never waits for a device.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Mapping

import torch

from dtrain.tracking.peak_memory import peak

_LOOK_EVERY = 1.0  # seconds


class Meter:
    """Adds up settled steps and turns them into one flat record for each log line.

    Args:
        device: Where the model lives; adds this rank's memory, on a GPU the peak of the window.
        counts: What the task counts, if it is no samples: ``tokens`` adds ``throughput/tokens_per_second``.
        skipped_steps: Total to continue from.
        bad_samples: Total to continue from.

    Attributes:
        skipped_steps: Skipped steps of the run so far.
        bad_samples: Bad samples of the run so far.
        flops_per_sample: Floating-point operations for a sample, divided by the number of devices; None: not counted.
        peak_flops: What a device can do in a second; None: nobody knows.
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
        self._looked = float("-inf")
        self.flops_per_sample: float | None = None
        self.peak_flops: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._last: dict[str, float] = {}
        self._samples = 0
        self._counted = (0.0, 0)
        self._seconds = array("d")  # of each step
        self._wait = 0.0
        self._bytes = 0
        self._rows = 0

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
        loss_scale: float | None = None,
        metrics: Mapping[str, tuple[float, float]] | None = None,
        bytes: int = 0,
        rows: int | None = None,
        bad: int = 0,
    ) -> None:
        """Adds one settled step.

        Args:
            loss_sum: Sum of the losses of the global batch's valid rows (or tokens).
            count: How many those were.
            samples: Samples of the global batch that the step committed, skipped or not.
            step_seconds: Wall time of the step, its wait for data included.
            wait_seconds: The part of it in which the loop waited for the loader.
            skipped: True if no rank applied the step.
            grad_norm: Norm of the global gradient, after unscaling and before clipping.
            lr: Learning rate that the step used.
            loss_scale: Loss scale that the step used; None where gradients are not scaled.
            metrics: Further (sum, count) pairs of the task, over the same rows as the loss.
            bytes: What this rank's workers handed over for the step.
            rows: For how many rows they did; None: for ``samples``.
            bad: Bad samples among the step's samples.
        """
        self._samples += samples
        self._seconds.append(step_seconds)
        self._wait += wait_seconds
        self._bytes += bytes
        self._rows += samples if rows is None else rows
        self.bad_samples += bad
        if loss_scale is not None:
            self._last["precision/loss_scale"] = loss_scale
        if skipped:
            self.skipped_steps += 1
            return
        if lr is not None:
            self._last["train/lr"] = lr
        self._counted = (self._counted[0] + count, self._counted[1] + samples)
        self._add_up("train/loss", loss_sum, count)
        if grad_norm is not None:
            self._add_up("train/grad_norm", grad_norm, 1)
        for name, (total, number) in (metrics or {}).items():
            self._add_up(f"train/{name}", total, number)

    def _add_up(self, name: str, total: float, count: float) -> None:
        before, counted = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (before + total, counted + count)

    def record(self) -> dict[str, float | int]:
        """The window as metrics, named as in metrics.jsonl; starts the next window.

        A name that does not apply is left out: no loss when each step of the window was skipped, no time when there was
        no step. ``train/lr`` and ``precision/loss_scale`` are the last ones used, ``train/grad_norm`` the mean over the
        applied steps, ``precision/skipped_steps`` and ``data/bad_samples`` totals of the run. Percentiles of the seconds of
        a step are of the nearest rank.
        """
        record: dict[str, float | int] = {name: total / count for name, (total, count) in self._sums.items() if count}
        record |= self._last
        record["precision/skipped_steps"] = self.skipped_steps
        if self._seconds:
            record |= self._speed()
        if self._rows and self._bytes:
            record["data/bytes_per_sample"] = self._bytes / self._rows
        record["data/bad_samples"] = self.bad_samples
        if self._device is not None:
            record |= self._memory(self._device)
        self._reset()
        return record

    def _memory(self, device: torch.device) -> dict[str, float]:
        now = time.monotonic()
        # Asking the kernel for the process's memory takes as long as all the rest of a record.
        if device.type == "cuda" or now - self._looked > _LOOK_EVERY:
            self._peak, self._looked = dict([peak(device)]), now
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        return self._peak

    def _speed(self) -> dict[str, float]:
        ordered = sorted(self._seconds)
        seconds = math.fsum(ordered)
        samples_per_second = self._samples / seconds
        speed = {"throughput/samples_per_second": samples_per_second}
        count, samples = self._counted
        if self._counts is not None and samples:
            # By way of the samples: a skipped step has used the machine, but its count is not known.
            speed[f"throughput/{self._counts}_per_second"] = samples_per_second * count / samples
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
