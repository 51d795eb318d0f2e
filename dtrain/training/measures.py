"""What is measured while a run trains, from single steps to the records that are logged: on every rank alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from dtrain.data import Batch
from dtrain.precision.comm_hooks import COMM_DTYPES, bytes_per_step
from dtrain.precision.vote import word_bytes
from dtrain.tracking.meter import Meter
from dtrain.tracking.peak_flops import peak_flops
from dtrain.training.flops import flops_per_row
from dtrain.training.own_time import OwnTime, Pieces, Stragglers
from dtrain.training.parts import Parts
from dtrain.training.step import Outcome


@dataclass(slots=True)  # made in every step, and frozen ones take long to make
class Timing:
    """A step as the host saw it.

    Attributes:
        used: Samples that it used.
        seconds: How long it took.
        waited: How long of that the loop waited for the loader.
        own: What this rank took by itself.
    """

    used: int
    seconds: float
    waited: float
    own: Pieces


class Measures:
    """Everything that a record says about training steps, but where the run is.

    Args:
        parts: The objects of the run; the totals of its progress are kept up.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        progress, parallel, wrapped = parts.progress, parts.cfg.parallel, parts.step.wrapped
        self._meter = Meter(
            parts.world.device,
            counts=getattr(parts.task, "counts", None),
            skipped_steps=progress.skipped_steps,
            bad_samples=progress.bad_samples,
        )
        self._interruptions = (  # in every record of a step, if there were some
            {"time/restarts": progress.restarts, "time/lost_seconds": progress.lost_seconds}
            if progress.restarts
            else {}
        )
        self._stragglers = Stragglers(parts.world)
        self._first_step = parts.step.step + 1
        self._own_time: OwnTime | None = None
        self._ddp_bytes: int | None = None
        if isinstance(wrapped, DistributedDataParallel):
            self._own_time = OwnTime(wrapped, parts.world.device)
            if parallel.comm_hook is None:  # which decides by itself what is sent
                self._ddp_bytes = bytes_per_step(wrapped, COMM_DTYPES[parallel.comm_dtype])

    def begin(self) -> None:
        """A step begins."""
        if self._own_time is not None:
            self._own_time.begin()

    def count_work(self, batch: Batch) -> str | None:
        """Counts what the model computes for a sample; once, with any micro-batch, on every rank.

        Returns:
            Why it could not be counted, for a person; None if it was.
        """
        parts, device = self._parts, self._parts.world.device
        try:
            flops = flops_per_row(parts.task, parts.model, batch, parts.precision, device)
        except Exception as error:  # noqa: BLE001 - the task's own fault shows in the step; no measure ends a run
            return (
                f"FLOPs could not be counted ({type(error).__name__}: {error}), so records have neither "
                "throughput/tflops_per_second nor throughput/mfu."
            )
        self._meter.flops_per_sample = flops / parts.world.size if flops else None
        if device.type == "cuda":
            self._meter.peak_flops = peak_flops(torch.cuda.get_device_name(device), parts.precision.name)
        return None

    def own_time(self) -> Pieces:
        """What this rank has taken by itself since the step began."""
        return self._own_time.taken() if self._own_time is not None else []

    def add(self, outcome: Outcome, timing: Timing) -> None:
        """Adds a settled step."""
        tally, progress = outcome.tally, self._parts.progress
        self._meter.add(
            loss_sum=tally.loss_sum,
            count=tally.count,
            samples=timing.used,
            step_seconds=timing.seconds,
            wait_seconds=timing.waited,
            skipped=not tally.applied,
            grad_norm=outcome.grad_norm,
            lr=outcome.lr,
            loss_scale=tally.loss_scale if self._parts.step.loss_scale is not None else None,
            metrics=tally.metrics,
            bytes=int(tally.bytes),
            bad=tally.bad,
        )
        if self._own_time is not None and outcome.step > self._first_step:  # the first loads kernels, and compiles
            self._stragglers.add(self._own_time.seconds(timing.own))
        progress.skipped_steps, progress.bad_samples = self._meter.skipped_steps, self._meter.bad_samples

    def record(self, outcome: Outcome) -> dict[str, float | int]:
        """Collective, without a wait. What was measured since the record before.

        Args:
            outcome: Of the last step in it.
        """
        record = self._interruptions | self._meter.record()
        if self._ddp_bytes is not None:
            record["comm/bytes_per_step"] = self._ddp_bytes + word_bytes(len(outcome.tally.metrics))
        return record | self._stragglers.exchange(outcome.step)

    def end(self) -> None:
        """Collective. Nothing is on its way any more."""
        self._stragglers.end()
        if self._own_time is not None:
            self._own_time.end()
